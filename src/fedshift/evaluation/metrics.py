"""Accuracy, overall and per class, and the harmonic mean of two accuracies. All in percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]


def _check_shapes(predictions: Integers, labels: Integers) -> tuple[Integers, Integers]:
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.ndim != 1 or predictions.shape != labels.shape:
        raise ValueError(f"predictions {predictions.shape} and labels {labels.shape} must both have the shape (n,)")
    if len(labels) == 0:
        raise ValueError("no samples: an accuracy needs at least one")
    return predictions, labels


def accuracy(predictions: Integers, labels: Integers) -> float:
    """Share of samples whose prediction is the label, in percent.

    Args:
        predictions: class numbers, shape (n,), n ≥ 1.
        labels: class numbers, shape (n,).

    Raises:
        ValueError: the shapes differ, or there is no sample.

    Example:
        >>> accuracy(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]))
        75.0
    """
    predictions, labels = _check_shapes(predictions, labels)
    return 100.0 * int(np.count_nonzero(predictions == labels)) / len(labels)


def confusion_matrix(predictions: Integers, labels: Integers, classes: int) -> NDArray[np.int64]:
    """Count how often each class is predicted as each: entry (i, j) counts samples of class i predicted as j.

    Args:
        predictions: class numbers in 0 … classes−1, shape (n,).
        labels: class numbers in 0 … classes−1, shape (n,).

    Returns:
        Counts, shape (classes, classes); they sum to n.

    Raises:
        ValueError: the shapes differ, there is no sample, or a number lies outside 0 … classes−1.

    Example:
        >>> confusion_matrix(np.array([0, 1, 1]), np.array([0, 1, 0]), classes=2).tolist()
        [[1, 1], [0, 1]]
    """
    predictions, labels = _check_shapes(predictions, labels)
    for name, values in (("predictions", predictions), ("labels", labels)):
        if values.min() < 0 or values.max() >= classes:
            raise ValueError(f"{name} must lie in 0 … {classes - 1}; found {values.min()} … {values.max()}")
    pairs = labels.astype(np.int64) * classes + predictions.astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def per_class_accuracy(predictions: Integers, labels: Integers, classes: int) -> list[float | None]:
    """Recall of each class in percent; None for a class without samples.

    Args:
        predictions: class numbers in 0 … classes−1, shape (n,).
        labels: class numbers in 0 … classes−1, shape (n,).

    Raises:
        ValueError: as in `confusion_matrix`.

    Example:
        >>> per_class_accuracy(np.array([0, 1, 1]), np.array([0, 1, 0]), classes=3)
        [50.0, 100.0, None]
    """
    matrix = confusion_matrix(predictions, labels, classes)
    counts = matrix.sum(axis=1)
    return [
        100.0 * int(hit) / int(count) if count else None for hit, count in zip(matrix.diagonal(), counts, strict=True)
    ]


def harmonic_mean(a: float, b: float) -> float:
    """HM = 2ab / (a + b) of two accuracies, 0 where both are 0 (MDFNet's win-win score of ACC_s and ACC_t).

    Raises:
        ValueError: an accuracy is negative or not a number.

    Example:
        >>> round(harmonic_mean(98.5, 93.0), 6)
        95.671018
    """
    if not (a >= 0 and b >= 0):
        raise ValueError(f"accuracies cannot be negative: {a}, {b}")
    return 2.0 * a * b / (a + b) if a + b > 0 else 0.0


def counts_by_class(
    predictions: Integers, labels: Integers, classes: int, smallest_group: int
) -> list[list[int] | None]:
    """Count correct predictions and samples of each class; withhold classes that would reveal single samples.

    Which ones, `withheld` says.

    Args:
        predictions: class numbers, shape (n,).
        labels: class numbers, shape (n,).
        smallest_group: the fewest samples of a class that may be counted.

    Returns:
        [correct, samples] for each class, or None where it is withheld.

    Example:
        >>> labels = np.repeat([0, 1, 2], [10, 8, 1])
        >>> counts_by_class(labels, labels, classes=3, smallest_group=5)
        [[10, 10], None, None]
    """
    pairs = [
        [int(np.count_nonzero((labels == number) & (predictions == number))), int(np.count_nonzero(labels == number))]
        for number in range(classes)
    ]
    hidden = withheld([of for _, of in pairs], smallest_group)
    return [None if number in hidden else pair for number, pair in enumerate(pairs)]


def withheld(counts: Sequence[int], smallest_group: int) -> list[int]:
    """Which of some counts may not be told, because one of them would reveal fewer than ``smallest_group`` samples.

    Counts of 0 may be told. A single withheld count could be computed from the total and the others, so further counts
    are withheld, the smallest first, until at least two are, with at least ``smallest_group`` samples together.

    Example:
        >>> withheld([10, 8, 1, 0], smallest_group=5)
        [2, 1]
    """
    order = sorted((of, number) for number, of in enumerate(counts) if of > 0)
    hidden = [number for of, number in order if of < smallest_group]
    for _, number in order[len(hidden) :]:
        if not hidden or (len(hidden) > 1 and sum(counts[other] for other in hidden) >= smallest_group):
            break
        hidden.append(number)
    return hidden
