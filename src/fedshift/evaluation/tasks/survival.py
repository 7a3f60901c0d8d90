"""Whether those who have an event sooner are said to: Harrell's concordance, with intervals by the bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.bootstrap import limits_of, resampled_metrics
from fedshift.evaluation.metric_entries import values_of
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.site_metrics import Scored
from fedshift.evaluation.weighted_samples import Numbers, Pairs

_MOST = 4000
"""Samples of a site from which there are no intervals: these need every pair of samples in memory."""
_ROWS = 256
CHANCE = 50.0


def concordance(risks: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """The share of comparable pairs that are in the right order, in percent; a tie of risks counts half.

    Two samples can be compared if one had the event while the other was still observed, or was seen last at that time.

    Source: Harrell et al., JAMA 1982.

    Args:
        risks: larger for those who are said to have the event sooner, (n,).
        labels: times, and events as 0 or 1, (n, 2).

    Returns:
        The share; None if no pair can be compared.

    Example:
        >>> concordance(np.array([3.0, 1.0, 2.0]), np.array([[1.0, 1], [2.0, 1], [3.0, 0]]))
        66.66666666666667
    """
    right = total = 0.0
    for begin in range(0, len(risks), _ROWS):
        comparable, ordered = _pairs(risks, labels, slice(begin, begin + _ROWS))
        right, total = right + float(ordered.sum()), total + float(comparable.sum())
    return 100.0 * right / total if total else None


def _pairs(risks: NDArray[Any], labels: NDArray[Any], rows: slice) -> tuple[Numbers, Numbers]:
    """Which pairs (i in ``rows``, j) can be compared since i had the event sooner, and how right each is."""
    times, events = labels[:, 0], labels[:, 1] > 0
    later = (times[rows, None] < times) | ((times[rows, None] == times) & ~events)
    comparable = (events[rows, None] & later).astype(np.float64)
    predicted = risks.astype(np.float64)
    return comparable, comparable * (0.5 + 0.5 * np.sign(predicted[rows, None] - predicted))


def survival_metrics(site: str, part: Part, scored: Scored, resamples: int = 0) -> SiteMetrics:
    """Concordance, beside 50 % by chance; none at a site where no pair can be compared.

    Args:
        resamples: bootstrap samples of the interval; 0: no interval.

    Example:
        >>> risks, labels = np.array([3.0, 1.0, 2.0]), np.array([[1.0, 1], [2.0, 1], [3.0, 0]])
        >>> survival_metrics("a", "target", Scored(labels, risks, risks[:, None])).values["concordance"]
        66.66666666666667
    """
    risks, labels = scored.predicted, scored.labels
    result, n = concordance(risks, labels), len(labels)
    limits: dict[SiteMetric, tuple[float, float]] = {}
    if result is not None and resamples and n <= _MOST:
        comparable, ordered = _pairs(risks, labels, slice(None))

        def metrics_of_weights(weights: Numbers) -> dict[str, Numbers]:
            with np.errstate(invalid="ignore", divide="ignore"):
                return values_of("concordance", Pairs(comparable, ordered, weights), ("concordance",))

        limits = limits_of(resampled_metrics(metrics_of_weights, n, scored.groups, resamples, width=n))
    return SiteMetrics(
        site=site,
        part=part,
        samples=n,
        support=[],
        values={} if result is None else {"concordance": result},
        intervals=limits,
        baseline=CHANCE,
        events=int((labels[:, 1] > 0).sum()),
    )
