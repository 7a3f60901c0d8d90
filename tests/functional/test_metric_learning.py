"""Triplets written as loops, and classes that confuse alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.methods.composition.triplets import drawn_with_repetition, momentum_triplet_loss
from fedshift.methods.pooled.masf import class_confusion, confusion_divergence, semi_hard_triplet_loss


def drawn(number: int, seed: int, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, dtype=torch.float64, generator=draws), torch.randint(
        3, (number,), generator=draws
    )


def squared(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).square().sum())


@given(st.integers(1, 9), st.floats(0, 5), st.integers(0, 99))
def test_semi_hard_triplets_are_those_of_a_loop(number: int, margin: float, seed: int) -> None:
    points, labels = drawn(number, seed)
    losses = []
    for a, p in itertools.permutations(range(number), 2):
        others = [squared(points[a], points[n]) for n in range(number) if labels[n] != labels[a]]
        if labels[a] != labels[p] or not others:
            continue
        own = squared(points[a], points[p])
        farther = [distance for distance in others if distance > own]
        losses.append(max(0.0, own - (min(farther) if farther else max(others)) + margin))
    expected = sum(losses) / len(losses) if losses else 0.0
    assert semi_hard_triplet_loss(points, labels, margin).item() == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 99))
def test_triplets_over_a_queue_are_those_of_a_loop(number: int, stored: int, seed: int) -> None:
    """A later sample's key is the positive, and each semi-hard key of the queue a negative."""
    (points, labels), (keys, _), (queue, queue_labels) = (
        drawn(number, seed),
        drawn(number, seed + 1),
        drawn(stored, seed + 2),
    )
    losses = []
    for i, j in itertools.combinations(range(number), 2):
        own = squared(points[i], keys[j])
        others = [squared(points[i], key) for key, other in zip(queue, queue_labels, strict=True) if other != labels[i]]
        losses += [own - d + 2.0 for d in others if labels[i] == labels[j] and 0 < own - d + 2.0 < 2.0]
    found = momentum_triplet_loss(points, keys, labels, queue, queue_labels, 2.0)
    assert found.item() == pytest.approx(sum(losses) / len(losses) if losses else 0.0, abs=1e-9)


def test_as_many_are_drawn_as_there_are_but_no_more_than_asked_with_repetition() -> None:
    found = torch.tensor([[True, True, True, False], [False] * 4, [False, False, False, True]])
    draws = torch.Generator().manual_seed(0)
    times = [drawn_with_repetition(found, 2, draws) for _ in range(200)]
    assert all(one.sum(1).tolist() == [2, 0, 1] for one in times)
    assert all(not one[~found].any() for one in times)
    assert max(one.max() for one in times) == 2
    assert (sum(times, torch.zeros(3, 4))[0, :3] / 400).tolist() == pytest.approx([1 / 3] * 3, abs=0.06)
    assert drawn_with_repetition(found, None, draws).sum(1).tolist() == [3, 0, 1]


def test_confusions_are_softened_means() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 6.0]])
    rows, present = class_confusion(logits, torch.tensor([0, 0, 2]), 3, temperature=2.0)
    weights = [math.exp(0.5), math.exp(1.0), 1.0]
    assert rows[0].tolist() == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6)
    assert present.tolist() == [True, False, True]


def test_the_divergence_is_symmetric_and_counts_common_classes_alone() -> None:
    one = torch.tensor([[0.8, 0.2], [0.3, 0.7]]), torch.tensor([True, True])
    other = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([True, False])
    expected = (0.3 * math.log(0.8 / 0.5) - 0.3 * math.log(0.2 / 0.5)) / 2 / 2
    assert confusion_divergence(one, other).item() == pytest.approx(expected, rel=1e-6)
    assert confusion_divergence(other, one).item() == pytest.approx(expected, rel=1e-6)
    assert confusion_divergence(one, one).item() == 0
