"""The samples of a site, each with a weight: the sums that metrics are made of, for many weights at once.

A resample of the bootstrap draws as many samples as there are, with replacement; so it is a weight for every sample.
Every sum here is (b,) or (b, classes) for weights (b, n). `fedshift.evaluation.metric_entries` makes metrics of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Outcomes:
    """What the metrics of a site's samples are sums of."""

    labels: NDArray[np.int64]  # class numbers (n,)
    predicted: NDArray[np.int64]  # likewise
    right: NDArray[np.bool_]  # whether the prediction is right (n,)
    scores: NDArray[np.float32]  # probabilities (n, classes)
    positive: NDArray[np.bool_] | None  # whether the score reaches the threshold (n,); None without one
    confidence: Numbers  # the score that calibration looks at (n,): of the positive class, else of the predicted one
    # what it should foretell (n,): whether the sample is positive, else whether the prediction is right
    outcome: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        labels: NDArray[np.int64],
        predicted: NDArray[np.int64],
        scores: NDArray[np.float32],
        threshold: float | None,
    ) -> Outcomes:
        """The outcomes of samples. ``threshold`` is the score of the positive class from which one is positive."""
        right = predicted == labels
        binary = scores.shape[1] == 2
        confidence = (scores[:, 1] if binary else scores[np.arange(len(labels)), predicted]).astype(np.float64)
        return cls(
            labels,
            predicted,
            right,
            scores,
            None if threshold is None else scores[:, 1] >= np.asarray(threshold, dtype=scores.dtype),
            np.clip(confidence, 0.0, 1.0),
            labels == 1 if binary else right,
        )


class _Weighted:
    """Samples with weights (b, n)."""

    def __init__(self, weights: Numbers) -> None:
        self.weights = weights

    @cached_property
    def total(self) -> Numbers:
        """The sum of the weights."""
        total: Numbers = self.weights.sum(axis=1)
        return total


class Classified(_Weighted):
    """Samples of classes. A class that no weight is on gives numbers that are not finite."""

    def __init__(self, outcomes: Outcomes, weights: Numbers) -> None:
        super().__init__(weights)
        self.outcomes = outcomes
        self._true = np.eye(outcomes.scores.shape[1])[outcomes.labels]

    @cached_property
    def right(self) -> Numbers:
        """Samples that are predicted right."""
        return self.weights @ self.outcomes.right

    @cached_property
    def support(self) -> Numbers:
        """Samples of each class, (b, classes)."""
        return self.weights @ self._true

    @cached_property
    def predicted(self) -> Numbers:
        """Samples that each class is predicted for, (b, classes)."""
        return self.weights @ np.eye(self.outcomes.scores.shape[1])[self.outcomes.predicted]

    @cached_property
    def recalls(self) -> Numbers:
        """The share of each present class that is predicted right, (present classes, b)."""
        recalls = self.weights @ (self._true * self.outcomes.right[:, None]) / self.support
        shares: Numbers = recalls[:, np.unique(self.outcomes.labels)].T
        return shares

    def share_recognised(self, number: int) -> Numbers | None:
        """The share of one of two classes that is on its side of the threshold; None without a threshold."""
        positive = self.outcomes.positive
        if positive is None:
            return None
        answer = positive if number else ~positive
        share: Numbers = self.weights @ (answer & (self.outcomes.labels == number)) / self.support[:, number]
        return share

    @cached_property
    def squares(self) -> Numbers:
        """Squared distances of scores and outcomes; with more than two classes half of them over all classes."""
        outcomes = self.outcomes
        if outcomes.scores.shape[1] == 2:
            squares: Numbers = (outcomes.confidence - outcomes.outcome) ** 2
        else:
            squares = ((outcomes.scores - self._true) ** 2).sum(axis=1) / 2
        total: Numbers = self.weights @ squares
        return total

    @cached_property
    def ranked(self) -> tuple[Numbers, Numbers]:
        """Area under the ROC curve, and average precision: of the second of two classes, else means over classes."""
        by_sample = np.ascontiguousarray(self.weights.T)
        present = [1] if self.outcomes.scores.shape[1] == 2 else np.unique(self.outcomes.labels)
        areas, precisions = zip(*(_ranking_areas(self.outcomes, number, by_sample) for number in present), strict=True)
        return self.mean(np.stack(areas)), self.mean(np.stack(precisions))

    @staticmethod
    def mean(by_class: Numbers) -> Numbers:
        """The mean over the classes (rows) that have a number."""
        known = np.isfinite(by_class)
        means: Numbers = np.where(known, by_class, 0.0).sum(axis=0) / known.sum(axis=0)
        return means


class Quantities(_Weighted):
    """Samples of a quantity: what was said of each, and what was true, (n,)."""

    def __init__(self, labels: Numbers, predictions: Numbers, weights: Numbers) -> None:
        super().__init__(weights)
        self._labels, self._error = labels, predictions - labels

    @cached_property
    def squares(self) -> Numbers:
        """Squared errors."""
        return self.weights @ self._error**2

    @cached_property
    def distances(self) -> Numbers:
        """Absolute errors."""
        return self.weights @ np.abs(self._error)

    @cached_property
    def spread(self) -> Numbers:
        """Squared distances of the labels from their mean; not a number where all are equal."""
        centred = self._labels - self._labels.mean()  # the sums of squares of labels far from 0 would lose digits
        spread = self.weights @ centred**2 - (self.weights @ centred) ** 2 / self.total
        known: Numbers = np.where(spread > 1e-12 * self.total * np.var(self._labels), spread, np.nan)
        return known


class Pairs(_Weighted):
    """Pairs of samples that can be compared, and how right each is, (n, n)."""

    def __init__(self, comparable: Numbers, ordered: Numbers, weights: Numbers) -> None:
        super().__init__(weights)
        self._comparable, self._ordered = comparable, ordered

    @cached_property
    def comparable(self) -> Numbers:
        """Pairs that can be compared."""
        return self._sum(self._comparable)

    @cached_property
    def ordered(self) -> Numbers:
        """Those of them that are in the right order; a tie counts half."""
        return self._sum(self._ordered)

    def _sum(self, pairs: Numbers) -> Numbers:
        total: Numbers = ((self.weights @ pairs) * self.weights).sum(1)
        return total


class Tagged(_Weighted):
    """Samples with several labels, each 0 or 1: true and predicted (n, labels), and the score of each label."""

    def __init__(
        self, labels: NDArray[np.int64], predicted: NDArray[np.int64], scores: NDArray[np.float32], weights: Numbers
    ) -> None:
        super().__init__(weights)
        self._labels, self._predicted, self._scores = labels, predicted, scores

    @cached_property
    def right(self) -> Numbers:
        """Samples, each by the share of its labels that is right."""
        right: Numbers = self.weights @ (self._predicted == self._labels).mean(axis=1)
        return right

    @cached_property
    def f1(self) -> Numbers:
        """The harmonic mean of precision and sensitivity, mean over labels; 0 for a label never said and never true."""
        hits = self.weights @ (self._labels * self._predicted)
        predicted, true = self.weights @ self._predicted, self.weights @ self._labels
        mean: Numbers = np.nan_to_num(2 * hits / (predicted + true)).mean(axis=1)
        return mean

    @cached_property
    def ranked(self) -> tuple[Numbers, Numbers] | None:
        """Area under the ROC curve, and average precision, means over the labels that some have and others have not."""
        parts = []
        for number in np.flatnonzero((self._labels.min(axis=0) == 0) & (self._labels.max(axis=0) == 1)):
            pair = np.stack([1 - self._scores[:, number], self._scores[:, number]], axis=1)
            outcomes = Outcomes.of(self._labels[:, number], self._predicted[:, number], pair, None)
            parts.append(Classified(outcomes, self.weights).ranked)
        if not parts:
            return None
        areas, precisions = (np.nanmean([part[index] for part in parts], axis=0) for index in (0, 1))
        return areas, precisions


def _ranking_areas(outcomes: Outcomes, number: int, by_sample: Numbers) -> tuple[Numbers, Numbers]:
    """Area under the ROC curve, and average precision, of one class against the others, (b,) each.

    Both are sums over the points of the curves at which there are samples of the class. Weights are whole numbers, so
    all sums but the last are exact in any order.

    ``by_sample``: a row of weights for each sample, (n, b).
    """
    scores = outcomes.scores[:, number]
    order = np.argsort(-scores, kind="stable")
    first = np.flatnonzero(np.diff(scores[order], prepend=np.inf))  # equal scores are one point of the curves
    rows = np.flatnonzero((outcomes.labels == number)[order])
    if not len(rows):
        return np.full(by_sample.shape[1], np.nan), np.full(by_sample.shape[1], np.nan)
    points, starts = np.unique(np.searchsorted(first, rows, side="right") - 1, return_index=True)
    ends = np.append(first, len(order))[points + 1]
    drawn = by_sample[order]
    hits = np.add.reduceat(drawn[rows], starts, axis=0)
    true = hits.cumsum(axis=0)
    either = np.add.reduceat(drawn[: ends[-1]], np.append(0, ends[:-1]), axis=0).cumsum(axis=0)
    misses = np.add.reduceat(drawn, first, axis=0)[points] - hits if len(first) < len(order) else np.zeros_like(hits)
    positives, negatives = true[-1], by_sample.sum(axis=0) - true[-1]
    area = ((negatives - (either - true) + misses / 2) * hits).sum(axis=0) / (positives * negatives)
    precision = np.divide(true, either, out=np.zeros_like(true), where=either > 0)
    gains = precision * hits
    if len(first) == len(order) and gains.shape[1] > 1:
        return area, gains.sum(axis=0) / positives
    # numpy sums in pairs, so the zeros of points that add nothing stay in: without them the last bit would differ from
    # committed results.
    whole = np.zeros((gains.shape[1], len(first)))
    whole[:, points] = gains.T
    return area, whole.sum(axis=1) / positives
