"""How far a metric depends on which samples a site happens to have: intervals by the bootstrap.

A resample draws as many samples as there are, with replacement; so it is a weight for every sample. Metrics of weighted
samples are sums of weights, which numpy adds up for many resamples at once. A thousand calls of scikit-learn would take
longer than a small run trains. With equal weights the results are scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.records import SiteMetric

Numbers = NDArray[np.float64]
LIMITS = (2.5, 97.5)
"""The percentiles that bound an interval of 95 %."""
_MOST, _FEWEST = 3_000_000, 200
"""Limits for one site: samples times resamples at most, and resamples at least. Large sites get fewer resamples, since
their metrics vary less."""
_AT_ONCE = 1 << 20
"""Weights in memory at a time."""


@dataclass(frozen=True)
class Outcomes:
    """What the metrics of a site's samples are sums of.

    Attributes:
        labels: class numbers (n,).
        right: whether the prediction is right (n,).
        scores: probabilities (n, classes).
        positive: whether the score reaches the threshold (n,); None without one.
        confidence: the score that calibration looks at (n,): of the positive class, else of the predicted one.
        outcome: what it should foretell (n,): whether the sample is positive, else whether the prediction is right.
    """

    labels: NDArray[np.int64]
    right: NDArray[np.bool_]
    scores: NDArray[np.float32]
    positive: NDArray[np.bool_] | None
    confidence: Numbers
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
            right,
            scores,
            None if threshold is None else scores[:, 1] >= np.asarray(threshold, dtype=scores.dtype),
            np.clip(confidence, 0.0, 1.0),
            labels == 1 if binary else right,
        )


def intervals(
    outcomes: Outcomes,
    metrics: Sequence[SiteMetric],
    groups: NDArray[np.int64] | None,
    resamples: int,
) -> dict[SiteMetric, tuple[float, float]]:
    """95 % intervals by the percentiles of bootstrap resamples. The same samples are drawn at every call.

    The expected calibration error has none: resamples are always worse calibrated than the samples that they are drawn
    from, so the percentiles say nothing of it.

    Args:
        outcomes: the samples.
        metrics: what to compute.
        groups: (n,) or None. Samples of one group are drawn together.
        resamples: how many; fewer if the site is large.

    Returns:
        Metric → (low, high) in percent.

    Example:
        >>> labels, predicted = np.zeros(100, dtype=int), np.repeat([0, 1], [80, 20])  # 80 of 100 are right
        >>> outcomes = Outcomes.of(labels, predicted, np.eye(2)[predicted], None)
        >>> [round(limit) for limit in intervals(outcomes, ["accuracy"], None, 1000)["accuracy"]]
        [72, 88]
    """
    n, classes = outcomes.scores.shape
    drawn = resampled(lambda weights: weighted(outcomes, metrics, weights), n, groups, resamples, classes)
    found: dict[SiteMetric, tuple[float, float]] = {}
    for metric, values in drawn.items():
        if len(values):
            low, high = np.clip(np.percentile(values, LIMITS), 0.0, 100.0)
            found[metric] = float(low), float(high)
    return found


def resampled(
    weighted_metrics: Callable[[Numbers], dict[SiteMetric, Numbers]],
    n: int,
    groups: NDArray[np.int64] | None,
    resamples: int,
    width: int = 1,
) -> dict[SiteMetric, Numbers]:
    """The metrics of bootstrap resamples, without those that are not finite: a resample may lack a class.

    Args:
        weighted_metrics: the metrics (b,) of samples with the weights (b, n).
        n: samples.
        groups: (n,) or None. Samples of one group are drawn together.
        resamples: how many; fewer if the site is large.
        width: numbers per sample that are added up for a metric.

    Example:
        >>> right = np.array([1.0, 1.0, 1.0, 0.0])
        >>> drawn = resampled(lambda weights: {"accuracy": 100 * weights @ right / 4}, 4, None, 1000)["accuracy"]
        >>> len(drawn), np.unique(drawn).tolist()
        (1000, [0.0, 25.0, 50.0, 75.0, 100.0])
    """
    number = min(resamples, max(_FEWEST, _MOST // (n * width)))
    drawn = [weighted_metrics(weights) for weights in _draws(n, groups, number)]
    joined = {metric: np.concatenate([part[metric] for part in drawn]) for metric in drawn[0]}
    return {metric: values[np.isfinite(values)] for metric, values in joined.items()}


def _draws(n: int, groups: NDArray[np.int64] | None, resamples: int) -> Iterator[Numbers]:
    """How often each resample drew each sample, (b, n) at a time."""
    draws = np.random.default_rng(0)
    units, of = (n, None) if groups is None else _units(groups)
    while resamples > 0:
        size = min(resamples, max(1, _AT_ONCE // n))
        chosen = draws.integers(0, units, size=(size, units)) + units * np.arange(size)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=size * units).reshape(size, units).astype(np.float64)
        yield counts if of is None else counts[:, of]
        resamples -= size


def _units(groups: NDArray[np.int64]) -> tuple[int, NDArray[np.intp]]:
    names, of = np.unique(groups, return_inverse=True)
    return len(names), of


def weighted(outcomes: Outcomes, metrics: Sequence[SiteMetric], weights: Numbers) -> dict[SiteMetric, Numbers]:
    """The metrics of weighted samples, in percent.

    Args:
        outcomes: the samples.
        metrics: what to compute.
        weights: a weight per sample, (b, n).

    Returns:
        Metric → (b,); not a number where the weights leave out a class that it needs.

    Example:
        >>> labels, scores = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
        >>> outcomes = Outcomes.of(labels, scores.argmax(1), scores, None)
        >>> weighted(outcomes, ["accuracy"], np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]]))["accuracy"].round(2)
        array([66.67, 66.67])
    """
    labels, classes = outcomes.labels, outcomes.scores.shape[1]
    total = weights.sum(axis=1)
    true = np.eye(classes)[labels]
    support = weights @ true
    found: dict[SiteMetric, Numbers] = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        if "accuracy" in metrics:
            found["accuracy"] = weights @ outcomes.right / total
        if "balanced_accuracy" in metrics:
            recalls = weights @ (true * outcomes.right[:, None]) / support
            found["balanced_accuracy"] = _mean(recalls[:, np.unique(labels)].T)
        if outcomes.positive is not None:
            found["sensitivity"] = weights @ (outcomes.positive & (labels == 1)) / support[:, 1]
            found["specificity"] = weights @ (~outcomes.positive & (labels == 0)) / support[:, 0]
        if "brier" in metrics:
            found["brier"] = weights @ _squares(outcomes, true) / total
        if "auroc" in metrics or "auprc" in metrics:
            by_sample = np.ascontiguousarray(weights.T)
            ranked = [_ranked(outcomes, number, by_sample) for number in ([1] if classes == 2 else np.unique(labels))]
            found["auroc"], found["auprc"] = (_mean(np.stack(parts)) for parts in zip(*ranked, strict=True))
    return {metric: 100.0 * found[metric] for metric in metrics if metric in found}


def _mean(by_class: Numbers) -> Numbers:
    """The mean over the classes (rows) that have a number; called where 0/0 is allowed."""
    known = np.isfinite(by_class)
    means: Numbers = np.where(known, by_class, 0.0).sum(axis=0) / known.sum(axis=0)
    return means


def _squares(outcomes: Outcomes, true: Numbers) -> Numbers:
    if outcomes.scores.shape[1] == 2:
        squares: Numbers = (outcomes.confidence - outcomes.outcome) ** 2
        return squares
    halves: Numbers = ((outcomes.scores - true) ** 2).sum(axis=1) / 2
    return halves


def _ranked(outcomes: Outcomes, number: int, by_sample: Numbers) -> tuple[Numbers, Numbers]:
    """Area under the ROC curve, and average precision, of one class against the others, (b,) each.

    Both are sums over the points of the curves at which there are samples of the class. Weights are whole numbers, so
    all sums but the last are exact in any order.

    Args:
        outcomes: the samples.
        number: the class.
        by_sample: a row of weights for each sample, (n, b).
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
