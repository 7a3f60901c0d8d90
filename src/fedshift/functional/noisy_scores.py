"""Counts of a model's scores by class under differential privacy, and samples that have these counts.

A sample, or a group with one vote, adds 1 at most to one cell of a histogram: that of its class and of what the model
says of it, in bands of confidence. So one that comes or goes changes the counts by a vector of norm 1 at most, and
normal noise on each hides it (the Gaussian mechanism). What is made of the noisy counts costs nothing more: they become
the counts of so many samples that are nearest to them, and samples in the middle of their cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

CONFIDENCES = (0.5, 0.75, 0.9, 0.97)
"""Between which lie the bands of confidence."""


def edges(threshold: float) -> Floats:
    """Of two classes, the scores of the second one between which lie its bands; both decisions are among them.

    Example:
        >>> edges(0.4).round(2).tolist()
        [0.03, 0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 0.97]
    """
    upper = np.array(CONFIDENCES)
    return np.unique(np.concatenate([1 - upper, upper, [threshold]]))


def cells(scores: npt.ArrayLike, labels: npt.ArrayLike, threshold: float = 0.5) -> tuple[Whole, int]:
    """The cell of each sample (n,), and how many cells there are.

    ``scores``: probabilities (n, classes). ``labels``: class numbers (n,). ``threshold``: of two classes, the score
    from which the second one is called.

    Example:
        >>> cells([[0.95, 0.05], [0.2, 0.8]], [0, 1])
        (array([ 1, 13]), 16)
    """
    shares, truth = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    classes = shares.shape[1]
    if classes == 2:
        between = edges(threshold)
        predicted = np.searchsorted(between, shares[:, 1], side="right")
        number = len(between) + 1
    else:
        bands = len(CONFIDENCES) + 1
        predicted = shares.argmax(axis=1) * bands + np.searchsorted(CONFIDENCES, shares.max(axis=1), side="right")
        number = classes * bands
    return truth * number + predicted, classes * number


def nearest_counts(noisy: Floats, samples: int) -> Whole:
    """The counts of so many samples that are nearest to noisy ones (cells,): none is negative.

    Source: the projection onto a simplex of Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008.

    Example:
        >>> nearest_counts(np.array([6.4, -3.0, 5.0]), 10).tolist()
        [6, 0, 4]
    """
    ordered = np.sort(noisy)[::-1]
    sums = np.cumsum(ordered) - samples
    last = np.flatnonzero(ordered - sums / np.arange(1, len(ordered) + 1) > 0)[-1]
    exact = np.maximum(noisy - sums[last] / (last + 1), 0.0)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = samples - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return np.asarray(whole)


def samples_of(counts: Sequence[int] | Whole, classes: int, threshold: float = 0.5) -> tuple[Floats, Whole]:
    """Samples with these counts (cells,): probabilities (n, classes) in the middle of their cells, and labels (n,).

    Example:
        >>> where, number = cells([[0.95, 0.05], [0.2, 0.8]], [0, 1])
        >>> scores, labels = samples_of(np.bincount(where, minlength=number), 2)
        >>> scores.round(3).tolist(), labels.tolist()
        ([[0.935, 0.065], [0.175, 0.825]], [0, 1])
    """
    middles = _of_two(threshold) if classes == 2 else _of_more(classes)
    which = np.repeat(np.arange(len(counts)), counts)
    return middles[which % len(middles)], which // len(middles)


def _of_two(threshold: float) -> Floats:
    ends = np.concatenate([[0.0], edges(threshold), [1.0]])
    second = (ends[1:] + ends[:-1]) / 2
    return np.stack([1 - second, second], axis=1)


def _of_more(classes: int) -> Floats:
    ends = np.array([1 / classes, *CONFIDENCES, 1.0])
    sure = (ends[1:] + ends[:-1]) / 2
    rows = []
    for answer in range(classes):
        scores = np.repeat((1 - sure)[:, None] / (classes - 1), classes, axis=1)
        scores[:, answer] = sure
        rows.append(scores)
    return np.concatenate(rows)
