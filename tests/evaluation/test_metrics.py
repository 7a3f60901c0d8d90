"""Metrics against hand numbers, scikit-learn and their invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from fedshift.evaluation.metrics import (
    accuracy,
    confusion_matrix,
    counts_by_class,
    harmonic_mean,
    per_class_accuracy,
)

CLASSES = 5
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=60)


def test_hand_numbers() -> None:
    labels = np.array([0, 0, 0, 2, 2])
    predictions = np.array([0, 0, 1, 2, 0])
    assert accuracy(predictions, labels) == 60.0
    assert per_class_accuracy(predictions, labels, 4) == [pytest.approx(200 / 3), None, 50.0, None]
    assert confusion_matrix(predictions, labels, 3).tolist() == [[2, 1, 0], [0, 0, 0], [1, 0, 1]]
    labels = np.full(3, 200, dtype=np.uint8)
    assert per_class_accuracy(labels, labels, 201)[200] == 100.0
    assert harmonic_mean(98.5, 93.0) == pytest.approx(95.671018, abs=1e-6)
    assert harmonic_mean(0.0, 0.0) == 0.0
    assert harmonic_mean(0.0, 80.0) == 0.0
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="negative"):
            harmonic_mean(bad, 50.0)


@given(pairs)
@settings(max_examples=30)
def test_scikit_learn_agrees(drawn: list[tuple[int, int]]) -> None:
    predictions, labels = np.array(drawn).T
    assert accuracy(predictions, labels) == pytest.approx(100 * reference.accuracy_score(labels, predictions))
    matrix = confusion_matrix(predictions, labels, CLASSES)
    assert (matrix == reference.confusion_matrix(labels, predictions, labels=range(CLASSES))).all()
    recall = reference.recall_score(labels, predictions, labels=range(CLASSES), average=None, zero_division=np.nan)
    ours = [np.nan if value is None else value for value in per_class_accuracy(predictions, labels, CLASSES)]
    np.testing.assert_allclose(ours, 100 * recall)


@given(pairs)
@settings(max_examples=30)
def test_accuracy_is_the_mean_of_the_classes_by_their_size(drawn: list[tuple[int, int]]) -> None:
    predictions, labels = np.array(drawn).T
    counts = np.bincount(labels, minlength=CLASSES)
    parts = per_class_accuracy(predictions, labels, CLASSES)
    weighted = sum(count * part for count, part in zip(counts, parts, strict=True) if part is not None)
    assert weighted / len(labels) == pytest.approx(accuracy(predictions, labels))


@pytest.mark.parametrize(
    ("predictions", "labels"), [([0, 1], [0]), ([], []), ([[0]], [[0]]), ([3], [0]), ([0], [3]), ([-1], [0])]
)
def test_bad_input(predictions: list[int], labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"shape|samples|lie in"):
        confusion_matrix(np.array(predictions, dtype=int), np.array(labels, dtype=int), 3)


@settings(max_examples=30)
@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_harmonic_mean_lies_between_its_arguments_and_below_their_mean(a: float, b: float) -> None:
    mean = harmonic_mean(a, b)
    assert min(a, b) - 1e-9 <= mean <= (a + b) / 2 + 1e-9
    assert mean == pytest.approx(harmonic_mean(b, a))


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([10, 20, 30], "yyy"),  # ten are enough
        ([9, 20, 30], "nny"),  # 9 alone could be had from the whole: 20 goes too
        ([9, 1, 30], "nny"),  # two, and together 10
        ([8, 1, 30], "nnn"),  # two, but together 9
        ([4, 10, 20], "nny"),  # the smallest of the others goes
        ([3, 0, 20, 30], "nyny"),  # an absent class tells nothing of anybody
        ([5, 5, 40, 11], "nnyy"),
        ([1, 2, 3, 3, 40], "nnnnn"),
        ([1, 2, 3, 4, 40], "nnnny"),
    ],
)
def test_classes_that_are_shown(counts: list[int], shown: str) -> None:
    """Worked out on paper for groups of 10."""
    labels = np.repeat(np.arange(len(counts)), counts)
    right = np.arange(len(labels)) % 2 == 0
    predictions = np.where(right, labels, (labels + 1) % len(counts))
    pairs = counts_by_class(predictions, labels, len(counts), 10)
    assert "".join("n" if pair is None else "y" for pair in pairs) == shown
    for label, pair in enumerate(pairs):
        if pair is not None:
            assert pair == [int(right[labels == label].sum()), counts[label]]
