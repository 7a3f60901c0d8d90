"""Adversarial losses: worked numbers, the formulas written out with probabilities, gradients and who gets them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import numbers
from torch import Tensor, nn

from fedshift.functional.adversarial import domain_identifier_loss, reverse_gradient
from fedshift.methods.federated.fada import generator_loss
from fedshift.methods.pooled.cdan import certainty_weights, condition
from fedshift.methods.pooled.cmss import curriculum_weights, weighted_adversarial_loss
from fedshift.methods.pooled.mdan import combine_domains


def test_reversal_changes_gradients_alone() -> None:
    features = numbers(3, 2).requires_grad_()
    reversed_features = reverse_gradient(features, 0.3)
    assert torch.equal(reversed_features, features)
    (reversed_features.square().sum()).backward()
    torch.testing.assert_close(features.grad, -0.3 * 2 * features.detach())
    assert not reverse_gradient(features.detach()).requires_grad


def test_reversal_has_first_and_second_derivatives() -> None:
    # With strength −1 it is the identity in both directions.
    features = numbers(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reverse_gradient(x, -1.0) ** 3, (features,))
    assert torch.autograd.gradgradcheck(lambda x: reverse_gradient(x, -1.0) ** 3, (features,))


def test_one_step_teaches_the_classifier_and_confuses_the_features() -> None:
    torch.manual_seed(0)
    extractor, classifier = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    source, target = numbers(8, 4, seed=1), numbers(8, 4, seed=2) + 1

    def loss(strength: float) -> Tensor:
        return domain_identifier_loss(
            classifier(reverse_gradient(extractor(source), strength)),
            classifier(reverse_gradient(extractor(target), strength)),
        )

    parameters = [*extractor.parameters(), *classifier.parameters()]
    plain = torch.autograd.grad(loss(-1.0), parameters)
    adversarial = torch.autograd.grad(loss(0.5), parameters)
    for index, (expected, found) in enumerate(zip(plain, adversarial, strict=True)):
        torch.testing.assert_close(found, (-0.5 if index < 2 else 1) * expected)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_losses_against_probabilities(sources: int, targets: int, seed: int) -> None:
    source, target = numbers(sources, seed=seed) * 3, numbers(targets, seed=seed + 1) * 3
    weights = numbers(sources, seed=seed + 2).abs()
    of_source, of_target = (1 / (1 + np.exp(-logits.numpy())) for logits in (source, target))
    identifier = -np.log(of_source).mean() - np.log(1 - of_target).mean()
    assert domain_identifier_loss(source, target).item() == pytest.approx(identifier, rel=1e-9)
    generator = -np.log(of_source).mean() - np.log(of_target).mean()
    assert generator_loss(source, target).item() == pytest.approx(generator, rel=1e-9)
    weighted = -(weights.numpy() * np.log(of_source)).mean() - np.log(1 - of_target).mean()
    assert weighted_adversarial_loss(source, target, weights).item() == pytest.approx(weighted, rel=1e-9)
    torch.testing.assert_close(
        domain_identifier_loss(source[:, None], target[:, None]), domain_identifier_loss(source, target)
    )
    # Of two identifiers of which one says the opposite, the sides change places.
    torch.testing.assert_close(domain_identifier_loss(source, target), domain_identifier_loss(-target, -source))
    torch.testing.assert_close(generator_loss(source, target), domain_identifier_loss(source, -target))


def test_losses_stay_finite_when_the_identifier_is_sure_and_wrong() -> None:
    source, target = torch.tensor([-1000.0]).requires_grad_(), torch.tensor([1000.0]).requires_grad_()
    loss = domain_identifier_loss(source, target)
    loss.backward()
    assert loss.item() == pytest.approx(2000)
    assert source.grad is not None
    assert source.grad.item() == pytest.approx(-1)
    assert generator_loss(source.detach(), -target.detach()).item() == pytest.approx(2000)


@given(st.integers(1, 8), st.floats(-50, 50), st.integers(0, 99))
def test_curriculum_weights(samples: int, constant: float, seed: int) -> None:
    scores = numbers(samples, seed=seed) * 4
    weights = curriculum_weights(scores)
    exponentials = np.exp(scores.numpy())
    assert weights.numpy() == pytest.approx(samples * exponentials / exponentials.sum(), rel=1e-9)
    assert weights.sum().item() == pytest.approx(samples)
    torch.testing.assert_close(curriculum_weights(scores + constant), weights)
    torch.testing.assert_close(curriculum_weights(scores[:, None]), weights[:, None])
    even = curriculum_weights(torch.full_like(scores, constant))
    torch.testing.assert_close(even, torch.ones_like(scores))
    logits, target = numbers(samples, seed=seed + 1), numbers(3, seed=seed + 2)
    torch.testing.assert_close(weighted_adversarial_loss(logits, target, even), domain_identifier_loss(logits, target))


def test_the_curriculum_prefers_samples_that_look_like_the_target() -> None:
    """Through the reversal, the curriculum network raises the loss: scores of samples far from "source" go up."""
    scores = torch.zeros(3).double().requires_grad_()
    weights = curriculum_weights(reverse_gradient(scores))
    logits = torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)
    weighted_adversarial_loss(logits, torch.zeros(1).double(), weights).backward()
    assert scores.grad is not None
    easy, middle, hard = scores.grad.tolist()
    assert easy > middle > hard
    assert easy + middle + hard == pytest.approx(0, abs=1e-12)


@given(st.integers(1, 5), st.floats(0, 2), st.floats(0.1, 20), st.floats(-5, 5), st.integers(0, 99))
def test_combining(sites: int, mu: float, gamma: float, constant: float, seed: int) -> None:
    source, domain = numbers(sites, seed=seed).abs(), numbers(sites, seed=seed + 1).abs()
    loss = combine_domains(source, domain, mu, gamma).item()
    each = source.numpy() + mu * domain.numpy()
    assert loss == pytest.approx(math.log(sum(math.exp(gamma * value) for value in each)) / gamma, abs=1e-9)
    assert each.max() - 1e-9 <= loss <= each.max() + math.log(sites) / gamma + 1e-9
    hard = combine_domains(source, domain, mu, gamma, "maxmin").item()
    assert hard == pytest.approx(max(source.tolist()) + mu * min(domain.tolist()))
    for rule, value in (("dynamic", loss), ("maxmin", hard)):
        shifted = combine_domains(source + constant, domain, mu, gamma, rule).item()  # type: ignore[arg-type]
        assert shifted == pytest.approx(value + constant, abs=1e-9)
    if sites == 1:
        assert loss == pytest.approx(hard)


def test_combining_large_losses_does_not_overflow() -> None:
    assert combine_domains(torch.tensor([500.0, 1.0]), torch.zeros(2)).item() == pytest.approx(500)


def test_conditioning_has_the_right_support() -> None:
    features = numbers(2, 3)
    onehot = torch.eye(4).double()[[1, 3]]
    found = condition(features, onehot).view(2, 4, 3)
    for row, label in enumerate((1, 3)):
        assert torch.equal(found[row, label], features[row])
        assert found[row].count_nonzero() == 3
    uniform = condition(features, torch.full((2, 4), 0.25).double()).view(2, 4, 3)
    torch.testing.assert_close(uniform, (features / 4)[:, None].expand(2, 4, 3))


def test_a_random_projection_keeps_inner_products_on_average() -> None:
    features, probabilities = numbers(3, 5), numbers(3, 4, seed=1).softmax(1)
    projections = numbers(5, 20000, seed=2), numbers(4, 20000, seed=3)
    whole, projected = condition(features, probabilities), condition(features, probabilities, projections)
    assert projected.shape == (3, 20000)
    torch.testing.assert_close(projected @ projected.T, whole @ whole.T, atol=0.15, rtol=0.1)


def test_certainty_weights() -> None:
    weights = certainty_weights(torch.tensor([0.0, math.log(2)]).double())
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.5]).double() / 3.5)
