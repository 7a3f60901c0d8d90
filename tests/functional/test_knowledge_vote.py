"""KD3A's knowledge vote and distillation: worked numbers, a vote sample by sample, invariants, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor
from torch.nn import functional

from fedshift.methods.federated.kd3a import distillation_loss, knowledge_vote, mean_ensemble, mixup, released_labels

TEACHERS = torch.tensor([[[0.95, 0.03, 0.02]], [[0.92, 0.05, 0.03]], [[0.02, 0.96, 0.02]]], dtype=torch.float64)
BALLOTS = st.sampled_from(["rows", "top1"])


def random_teachers(teachers: int, samples: int, classes: int, seed: int, sharpness: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(teachers, samples, classes, generator=generator, dtype=torch.float64)).softmax(2)


def naive_vote(rows: list[list[float]], gate: float, ballots: str) -> tuple[list[float], float, int]:
    """One sample by the words of the paper: gate, class vote, mean."""
    classes = range(len(rows[0]))
    first = [max(classes, key=lambda c, row=row: row[c]) for row in rows]  # type: ignore[misc]
    kept = [k for k, row in enumerate(rows) if max(row) > gate]
    votes = [0.0] * len(rows[0])
    for k in kept or range(len(rows)):
        for c in classes:
            if ballots == "rows" or c == first[k]:
                votes[c] += rows[k][c]
    winner = max(classes, key=lambda c: votes[c])
    survivors = [k for k in kept if first[k] == winner]
    averaged = survivors or list(range(len(rows)))
    mean = [sum(rows[k][c] for k in averaged) / len(averaged) for c in classes]
    return mean, len(survivors) or 0.001, winner


def test_both_ballots_can_elect_different_classes() -> None:
    teachers = torch.tensor([[[0.6, 0.4, 0.0]], [[0.0, 0.45, 0.55]]]).double()
    assert knowledge_vote(teachers, 0.5, ballots="top1").labels.tolist() == [0]
    # Rows elect class 1, which is nobody's first: no teacher is left.
    consensus = knowledge_vote(teachers, 0.5)
    assert consensus.labels.tolist() == [1]
    assert consensus.support.tolist() == [0.001]
    assert consensus.probabilities[0].tolist() == pytest.approx([0.3, 0.425, 0.275])


def test_the_gate_is_not_passed_by_equality() -> None:
    teachers = torch.tensor([[[0.75, 0.25]]]).double()
    assert knowledge_vote(teachers, 0.75).support.tolist() == [0.001]
    assert knowledge_vote(teachers, 0.7499).support.tolist() == [1]


@given(
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.5, 0.8]),
    BALLOTS,
    st.integers(0, 999),
)
def test_vote_against_one_sample_at_a_time(
    teachers: int, samples: int, classes: int, gate: float, ballots: str, seed: int
) -> None:
    predictions = random_teachers(teachers, samples, classes, seed, sharpness=2.0)
    consensus = knowledge_vote(predictions, gate, ballots=ballots)  # type: ignore[arg-type]
    assert consensus.probabilities.shape == (samples, classes)
    for x in range(samples):
        mean, support, label = naive_vote(predictions[:, x].tolist(), gate, ballots)
        assert consensus.probabilities[x].tolist() == pytest.approx(mean, abs=1e-12)
        assert consensus.support[x].item() == support
        assert consensus.labels[x].item() == label


@given(st.integers(1, 6), st.floats(0, 0.99), BALLOTS, st.integers(0, 999), st.randoms(use_true_random=False))
def test_what_holds_for_any_vote(teachers: int, gate: float, ballots: str, seed: int, random) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(teachers, 20, 4, seed)
    before = predictions.clone()
    consensus = knowledge_vote(predictions, gate, ballots=ballots)  # type: ignore[arg-type]
    assert torch.equal(predictions, before)
    assert set(consensus.support.tolist()) <= {0.001, *map(float, range(1, teachers + 1))}
    torch.testing.assert_close(consensus.probabilities.sum(1), torch.ones(20).double())
    supported = consensus.support >= 1
    assert torch.equal(consensus.probabilities.argmax(1)[supported], consensus.labels[supported])
    turned = predictions[random.sample(range(teachers), teachers)]
    again = knowledge_vote(turned, gate, ballots=ballots)  # type: ignore[arg-type]
    torch.testing.assert_close(again.probabilities, consensus.probabilities)
    assert torch.equal(again.support, consensus.support)


def test_types_are_kept() -> None:
    for dtype in (torch.float32, torch.float64):
        consensus = knowledge_vote(TEACHERS.to(dtype), 0.9)
        assert {consensus.probabilities.dtype, consensus.support.dtype} == {dtype}
        assert {tensor.dtype for tensor in released_labels(consensus)} == {dtype}
        assert consensus.labels.dtype == torch.int64


def test_mean_ensemble() -> None:
    consensus = mean_ensemble(TEACHERS)
    assert consensus.probabilities[0].tolist() == pytest.approx([0.63, 0.346667, 0.023333], abs=1e-6)
    assert consensus.support.tolist() == [1]
    assert consensus.labels.tolist() == [0]


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 999))
def test_distillation_against_scipy(batch: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, classes, generator=generator, dtype=torch.float64)
    probabilities, support = (
        random_teachers(1, batch, classes, seed)[0],
        torch.rand(batch, generator=generator).double(),
    )
    probabilities[0] = functional.one_hot(torch.tensor(0), classes)
    expected = torch.from_numpy(rel_entr(probabilities.numpy(), logits.softmax(1).numpy())).sum(1)
    torch.testing.assert_close(distillation_loss(logits, probabilities, support), (support * expected).mean())
    assert distillation_loss(probabilities.clamp(min=1e-30).log(), probabilities, support).item() < 1e-12


def test_hard_labels_give_the_cross_entropy_and_mixed_ones_its_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4).double().requires_grad_()
    labels, weights = torch.randint(4, (6,)), torch.tensor([1.0, 0, 1, 1, 0, 1]).double()
    hard = functional.one_hot(labels, 4).double()
    expected = (weights * functional.cross_entropy(logits, labels, reduction="none")).mean()
    torch.testing.assert_close(distillation_loss(logits, hard, weights), expected)
    mixed = 0.3 * hard + 0.7 * hard.flip(0)
    cross_entropy = (weights * functional.cross_entropy(logits, mixed, reduction="none")).mean()
    (expected_gradient,) = torch.autograd.grad(cross_entropy, logits)
    (gradient,) = torch.autograd.grad(distillation_loss(logits, mixed, weights), logits)
    torch.testing.assert_close(gradient, expected_gradient)


@given(st.floats(0, 1), st.integers(0, 999))
def test_mixup_at_its_ends_and_between(lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, permutation = torch.randn(5, 2, 3, generator=generator), torch.randperm(5, generator=generator)
    probabilities = random_teachers(1, 5, 4, seed)[0]
    mixed, targets = mixup(inputs, probabilities, lam, permutation)
    torch.testing.assert_close(mixed, lam * inputs + (1 - lam) * inputs[permutation])
    torch.testing.assert_close(targets, lam * probabilities + (1 - lam) * probabilities[permutation])
    for end, expected in ((1.0, inputs), (0.0, inputs[permutation])):
        assert torch.equal(mixup(inputs, probabilities, end, permutation)[0], expected)
