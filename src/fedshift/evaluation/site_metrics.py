"""What the scores of one site's samples say of a model: discrimination and calibration, in percent.

Computed once a run, at its end. `metrics` has what is computed after every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.bootstrap import intervals, weighted_metrics
from fedshift.evaluation.metric_entries import ENTRIES, metrics_of
from fedshift.evaluation.metrics import accuracy, withheld
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.weighted_samples import Outcomes

BINS = 10
"""Bins of scores, of equal width, in a reliability curve."""


@dataclass(frozen=True)
class Scored:
    """The samples of one site and what a model says of them."""

    labels: NDArray[Any]  # class numbers (n,), or what else the task's labels are
    predicted: NDArray[Any]  # class numbers (n,), or values in the label's unit
    scores: NDArray[np.float32]  # probabilities (n, classes), or values (n, 1)
    # (n,) or None. Samples with the same number, such as those of one patient, are drawn together
    groups: NDArray[np.int64] | None = None


def site_metrics(
    site: str,
    part: Part,
    scored: Scored,
    *,
    threshold: float | None = None,
    resamples: int = 0,
    smallest_group: int = 0,
) -> SiteMetrics:
    """Compute all metrics that the samples of a site allow.

    AUROC and AUPRC need two classes. With two classes they are those of the second one, the positive class. With more
    they are the mean over the classes that the site has samples of (one class against the others). The Brier score is
    half the squared distance between scores and labels, so that it is the usual one for two classes.

    The expected calibration error is the mean gap between score and outcome over bins of scores, weighted by their
    samples. The score is that of the positive class; with more than two classes, that of the predicted class, and the
    outcome is whether it is right.

    Args:
        threshold: score of the positive class from which a sample is positive. At a held-out part it is chosen here.
        resamples: bootstrap samples of the intervals; 0: no intervals.
        smallest_group: the fewest samples that a number may be made of.

    Example:
        >>> scores = np.array([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]])
        >>> found = site_metrics("a", "target", Scored(np.array([0, 0, 1, 1]), scores.argmax(1), scores))
        >>> found.support, found.values["accuracy"], found.values["auroc"]
        ([2, 2], 50.0, 75.0)
    """
    labels, scores = scored.labels, scored.scores
    classes = scores.shape[1]
    counts = np.bincount(labels, minlength=classes).tolist()
    hidden = withheld(counts, smallest_group)
    if classes != 2 or (part == "held_out" and hidden):
        threshold = None
    elif part == "held_out":
        threshold = best_threshold(labels, scores[:, 1])
    values: dict[SiteMetric, float] = {"accuracy": accuracy(scored.predicted, labels)}
    curve: list[tuple[float, float, int]] = []
    limits: dict[SiteMetric, tuple[float, float]] = {}
    if np.isfinite(scores).all():
        used = threshold if part == "target" else None
        outcomes = Outcomes.of(labels, scored.predicted, scores, used)
        values |= _unweighted_metrics(outcomes)
        curve, values["calibration_error"] = _calibration(outcomes)
        if resamples:
            limits = intervals(outcomes, tuple(values), scored.groups, resamples)
    shown = [metric for metric in values if not hidden or not ENTRIES[metric].by_class]
    unseen = withheld([count for *_, count in curve], smallest_group)
    return SiteMetrics(
        site=site,
        part=part,
        samples=len(labels),
        support=[None if number in hidden else count for number, count in enumerate(counts)],
        values={metric: values[metric] for metric in shown},
        intervals={metric: limits[metric] for metric in shown if metric in limits},
        threshold=threshold,
        reliability=[point for number, point in enumerate(curve) if number not in unseen],
    )


def best_threshold(labels: NDArray[np.int64], scores: NDArray[Any]) -> float | None:
    """The threshold in 0.01 … 0.99 with the largest sensitivity + specificity, the nearest to 0.5 of equal ones.

    None without samples of both classes. It is one of 99 numbers, so that it does not tell the score of a sample.

    Example:
        >>> best_threshold(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 0.9]))
        0.3
    """
    if len(np.unique(labels)) < 2:
        return None
    grid = np.arange(1, 100) / 100
    above = [np.sort(scores[labels == number]).searchsorted(grid.astype(scores.dtype)) for number in (0, 1)]
    youden = above[0] / np.count_nonzero(labels == 0) - above[1] / np.count_nonzero(labels == 1)
    best = grid[youden >= youden.max() - 1e-12]
    return float(best[np.abs(best - 0.5).argmin()])


def common_threshold(sources: Sequence[SiteMetrics]) -> float | None:
    """The median of the thresholds that the sources chose; None if none chose one.

    Example:
        >>> fixed = {"site": "a", "part": "held_out", "samples": 2, "support": [1, 1], "values": {}}
        >>> common_threshold([SiteMetrics(threshold=chosen, **fixed) for chosen in (0.3, None, 0.4, 0.9)])
        0.4
    """
    chosen = [site.threshold for site in sources if site.threshold is not None]
    return median(chosen) if chosen else None


def _unweighted_metrics(outcomes: Outcomes) -> dict[SiteMetric, float]:
    """The metrics of a bootstrap in which every sample counts once, as far as the classes that are there allow."""
    alone = len(np.unique(outcomes.labels)) < 2
    names = [
        name
        for name in metrics_of("accuracy")
        if name != "accuracy" and not (alone and "several classes present" in ENTRIES[name].needs)
    ]
    result = weighted_metrics(outcomes, names, np.ones((1, len(outcomes.labels))))
    return {name: ENTRIES[name].within(value) for name, (value,) in result.items() if np.isfinite(value)}


def _calibration(outcomes: Outcomes) -> tuple[list[tuple[float, float, int]], float]:
    """Mean score, share of outcomes and samples of each bin that has any, in percent; and the mean gap."""
    bins = np.searchsorted(np.linspace(0.0, 1.0, BINS + 1)[1:-1], outcomes.confidence)
    _, bins, counts = np.unique(bins, return_inverse=True, return_counts=True)
    means = np.bincount(bins, weights=outcomes.confidence) / counts
    shares = np.bincount(bins, weights=outcomes.outcome) / counts
    curve = [
        (min(100.0, 100.0 * float(mean)), 100.0 * float(share), int(count))
        for mean, share, count in zip(means, shares, counts, strict=True)
    ]
    return curve, float(np.average(np.abs(shares - means), weights=counts)) * 100.0
