"""DAEL's losses against loops over experts, samples and classes; who is taught and who teaches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedshift.methods.heads import confident_pseudo_labels, expert_cross_entropy, unlabelled_ensemble_loss
from fedshift.methods.pooled.dael import consensus_regularisation


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
