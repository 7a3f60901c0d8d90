"""How far a metric depends on which samples a site happens to have: intervals by the bootstrap.

A resample draws as many samples as there are, with replacement; so it is a weight for every sample. Metrics of weighted
samples are sums of weights, which numpy adds up for many resamples at once. A thousand calls of scikit-learn would take
longer than a small run trains. With equal weights the results are scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.metric_entries import ENTRIES, values_of
from fedshift.evaluation.weighted_samples import Classified, Numbers, Outcomes

LIMITS = (2.5, 97.5)
"""The percentiles that bound an interval of 95 %."""
_MOST, _FEWEST = 3_000_000, 200
"""Limits for one site: samples times resamples at most, and resamples at least. Large sites get fewer resamples, since
their metrics vary less."""
_AT_ONCE = 1 << 20
"""Weights in memory at a time."""


def intervals(
    outcomes: Outcomes, metrics: Sequence[str], groups: NDArray[np.int64] | None, resamples: int
) -> dict[str, tuple[float, float]]:
    """95 % intervals by the percentiles of bootstrap resamples. The same samples are drawn at every call.

    The expected calibration error has none: resamples are always worse calibrated than the samples that they are drawn
    from, so the percentiles say nothing of it.

    Args:
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
    drawn = resampled_metrics(
        lambda weights: weighted_metrics(outcomes, metrics, weights), n, groups, resamples, classes
    )
    return limits_of(drawn)


def limits_of(drawn: Mapping[str, Numbers]) -> dict[str, tuple[float, float]]:
    """The interval of each metric whose resamples have numbers, within what it can be.

    Example:
        >>> limits_of({"accuracy": np.arange(101.0), "auroc": np.array([])})
        {'accuracy': (2.5, 97.5)}
    """
    limits: dict[str, tuple[float, float]] = {}
    for metric, values in drawn.items():
        if len(values):
            low, high = np.percentile(values, LIMITS)
            limits[metric] = ENTRIES[metric].within(low), ENTRIES[metric].within(high)
    return limits


def resampled_metrics(
    weighted_metrics: Callable[[Numbers], dict[str, Numbers]],
    n: int,
    groups: NDArray[np.int64] | None,
    resamples: int,
    width: int = 1,
) -> dict[str, Numbers]:
    """The metrics of bootstrap resamples, without those that are not finite: a resample may lack a class.

    Args:
        weighted_metrics: the metrics (b,) of samples with the weights (b, n).
        groups: (n,) or None. Samples of one group are drawn together.
        resamples: how many; fewer if the site is large.
        width: numbers per sample that are added up for a metric.

    Example:
        >>> right = np.array([1.0, 1.0, 1.0, 0.0])
        >>> drawn = resampled_metrics(lambda weights: {"accuracy": 25 * weights @ right}, 4, None, 1000)["accuracy"]
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


def weighted_metrics(outcomes: Outcomes, metrics: Sequence[str], weights: Numbers) -> dict[str, Numbers]:
    """The metrics of weighted samples of classes, in percent.

    Args:
        weights: a weight per sample, (b, n).

    Returns:
        Metric → (b,); not a number where the weights leave out a class that it needs.

    Example:
        >>> labels, scores = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
        >>> outcomes = Outcomes.of(labels, scores.argmax(1), scores, None)
        >>> weighted_metrics(outcomes, ["accuracy"], np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]]))["accuracy"].round(2)
        array([66.67, 66.67])
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return values_of("accuracy", Classified(outcomes, weights), tuple(metrics))
