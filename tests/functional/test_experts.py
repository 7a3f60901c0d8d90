"""DAEL's losses against loops over experts, samples and classes; who is taught and who teaches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.functional.experts import (
    confident_pseudo_labels,
    consensus_regularisation,
    expert_cross_entropy,
    unlabelled_ensemble_loss,
)


def probabilities(*shape: int, seed: int = 0, sharpness: float = 2.0) -> Tensor:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
    return (sharpness * logits).softmax(-1)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_cross_entropy(samples: int, classes: int, seed: int) -> None:
    rows = probabilities(samples, classes, seed=seed)
    labels = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))
    found = expert_cross_entropy(rows, labels)
    expected = [-math.log(row[label] + 1e-5) for row, label in zip(rows.tolist(), labels.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(
        expert_cross_entropy(rows, labels, 0.0), functional.nll_loss(rows.log(), labels, reduction="none")
    )


def test_cross_entropy_of_an_impossible_class_is_finite() -> None:
    rows = torch.tensor([[0.0, 1.0]], dtype=torch.float64).requires_grad_()
    loss = expert_cross_entropy(rows, torch.tensor([0])).sum()
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(1e-5))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[pytest.approx(-1e5), 0.0]]


def test_consensus_of_two_is_the_other_expert() -> None:
    strong, weak = probabilities(2, 5, 3), probabilities(5, 3, seed=1)
    for domain in (0, 1):
        expected = (strong[1 - domain] - weak).square().sum(1).mean()
        torch.testing.assert_close(consensus_regularisation(strong, weak, domain), expected)


def test_worked_numbers_of_consensus() -> None:
    strong = torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]]], dtype=torch.float64)
    weak = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    # Others than expert 0: (0.4, 0.6), off by 0.3 in both classes. Than expert 2: (0.75, 0.25), off by 0.05.
    assert consensus_regularisation(strong, weak, 0).item() == pytest.approx(0.18, abs=1e-12)
    assert consensus_regularisation(strong, weak, 2).item() == pytest.approx(0.005, abs=1e-12)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_consensus_against_loops(experts: int, samples: int, classes: int, seed: int) -> None:
    strong, weak = probabilities(experts, samples, classes, seed=seed), probabilities(samples, classes, seed=seed + 1)
    for domain in range(experts):
        total = 0.0
        for i in range(samples):
            for c in range(classes):
                others = [strong[j, i, c].item() for j in range(experts) if j != domain]
                total += (sum(others) / len(others) - weak[i, c].item()) ** 2
        found = consensus_regularisation(strong, weak, domain).item()
        assert found == pytest.approx(total / samples, abs=1e-12)
        assert 0 <= found <= 2
    agreed = weak.expand(experts, -1, -1)
    assert consensus_regularisation(agreed, weak, 0).item() == pytest.approx(0, abs=1e-15)


def test_the_teacher_is_not_taught() -> None:
    strong, weak = probabilities(3, 4, 2).requires_grad_(), probabilities(4, 2, seed=1).requires_grad_()
    consensus_regularisation(strong, weak, 1).backward()
    assert weak.grad is None
    assert strong.grad is not None
    assert not strong.grad[1].any()
    assert strong.grad[0].all()
    torch.testing.assert_close(strong.grad[0], strong.grad[2])


def test_gradient_of_consensus() -> None:
    strong, weak = probabilities(3, 4, 2).requires_grad_(), probabilities(4, 2, seed=1)
    assert torch.autograd.gradcheck(lambda p: consensus_regularisation(p, weak, 2), (strong,))


def test_impossible_consensus() -> None:
    strong, weak = probabilities(2, 4, 3), probabilities(4, 3)
    with pytest.raises(UserError):
        consensus_regularisation(strong[:1], weak, 0)
    for domain in (-1, 2):
        with pytest.raises(UserError, match=f"domain {domain} of 2"):
            consensus_regularisation(strong, weak, domain)
    for teacher in (weak[:1], weak[:, :1], weak[0]):
        with pytest.raises(UserError):
            consensus_regularisation(strong, teacher, 0)
    for experts in (weak, strong[:, :0]):
        with pytest.raises(UserError, match=r"\(K, b, C\)"):
            consensus_regularisation(experts, weak, 0)


def test_worked_pseudo_labels() -> None:
    experts = torch.tensor(
        [
            [[0.60, 0.40], [0.30, 0.70], [0.05, 0.95], [0.949, 0.051]],
            [[0.02, 0.98], [0.20, 0.80], [0.90, 0.10], [0.40, 0.60]],
        ],
        dtype=torch.float64,
    )
    labels, mask = confident_pseudo_labels(experts)
    assert labels.tolist() == [1, 1, 1, 0]
    assert mask.tolist() == [True, False, True, False]
    assert confident_pseudo_labels(experts.float())[1].tolist() == mask.tolist()
    assert confident_pseudo_labels(experts, 0.9)[1].tolist() == [True, False, True, True]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_pseudo_labels_against_loops(experts: int, samples: int, classes: int, threshold: float, seed: int) -> None:
    rows = probabilities(experts, samples, classes, seed=seed)
    labels, mask = confident_pseudo_labels(rows.clone().requires_grad_(), threshold)
    assert (labels.dtype, mask.dtype) == (torch.int64, torch.bool)
    for i in range(samples):
        surest = max(range(experts), key=lambda k: max(rows[k, i].tolist()))
        assert labels[i] == rows[surest, i].argmax()
        assert bool(mask[i]) == (rows[surest, i].max().item() >= threshold)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_unlabelled_loss_against_loops(experts: int, samples: int, classes: int, threshold: float, seed: int) -> None:
    weak, strong = (probabilities(experts, samples, classes, seed=seed + view) for view in (0, 1))
    labels, mask = confident_pseudo_labels(weak, threshold)
    total = 0.0
    for i in range(samples):
        if mask[i]:
            mean = sum(strong[k, i, int(labels[i])].item() for k in range(experts)) / experts
            total -= math.log(mean + 1e-5)
    assert unlabelled_ensemble_loss(strong, labels, mask).item() == pytest.approx(total / samples, abs=1e-12)


def test_unsure_experts_teach_nothing() -> None:
    weak = probabilities(3, 4, 2, sharpness=0.1)
    strong = probabilities(3, 4, 2, seed=1).requires_grad_()
    labels, mask = confident_pseudo_labels(weak, 0.95)
    loss = unlabelled_ensemble_loss(strong, labels, mask)
    loss.backward()
    assert loss.item() == 0
    assert strong.grad is not None
    assert not strong.grad.any()


def test_pseudo_labels_are_constants() -> None:
    experts = probabilities(3, 4, 2, sharpness=9.0).requires_grad_()
    labels, mask = confident_pseudo_labels(experts, 0.5)
    assert not labels.requires_grad
    assert not mask.requires_grad
    strong = probabilities(3, 4, 2, seed=1).requires_grad_()
    unlabelled_ensemble_loss(strong, labels, mask).backward()
    assert experts.grad is None
    assert strong.grad is not None
    # All experts share the lesson, about the labelled class alone.
    torch.testing.assert_close(strong.grad, strong.grad[:1].expand(3, -1, -1))
    assert torch.equal(strong.grad[0] != 0, functional.one_hot(labels, 2).bool())


def test_gradient_of_the_unlabelled_loss() -> None:
    strong = probabilities(3, 4, 2).requires_grad_()
    labels, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, True])
    assert torch.autograd.gradcheck(lambda p: unlabelled_ensemble_loss(p, labels, mask), (strong,))


def test_impossible_shapes() -> None:
    strong, labels, mask = probabilities(3, 4, 2), torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
    for experts in (strong[0], strong[:, :0]):
        with pytest.raises(UserError, match=r"\(K, b, C\)"):
            confident_pseudo_labels(experts)
        with pytest.raises(UserError, match=r"\(K, b, C\)"):
            unlabelled_ensemble_loss(experts, labels, mask)
    for wrong_labels, wrong_mask in ((labels[:3], mask), (labels, mask[:, None])):
        with pytest.raises(UserError, match="4"):
            unlabelled_ensemble_loss(strong, wrong_labels, wrong_mask)
