"""How well each of several labels is told, by scikit-learn, with intervals by the bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.bootstrap import limits_of, resampled_metrics
from fedshift.evaluation.metric_entries import values_of
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.site_metrics import Scored
from fedshift.evaluation.weighted_samples import Numbers, Tagged
from fedshift.extras import import_extra


def label_accuracy(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of labels that are right, over samples and labels, in percent.

    Example:
        >>> label_accuracy(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]]))
        75.0
    """
    return 100.0 * float(np.mean(predicted == labels))


def label_metrics(
    site: str,
    part: Part,
    scored: Scored,
    resamples: int = 0,
    smallest_group: int = 0,
) -> SiteMetrics:
    """The share of right labels; AUROC, average precision and F1, each the mean over labels, in percent.

    AUROC and average precision are the mean over the labels that some samples have and others have not. ``support`` is
    how many samples have each label. A site keeps it back where fewer than ``smallest_group`` have the label or have it
    not, and then keeps back what looks at labels one by one, too.

    Args:
        resamples: bootstrap samples of the intervals; 0: no intervals.
        smallest_group: the fewest samples that a number may be made of.

    Example:
        >>> labels, scores = np.array([[1, 0], [0, 1], [1, 1]]), np.array([[0.9, 0.2], [0.6, 0.7], [0.8, 0.4]])
        >>> found = label_metrics("a", "target", Scored(labels, (scores > 0.5).astype(int), scores.astype(np.float32)))
        >>> found.support, round(found.values["label_accuracy"], 2), found.values["auroc"]
        ([2, 2], 66.67, 100.0)
    """
    metrics = import_extra("sklearn.metrics", extra="report", what="measuring several labels a sample")

    labels, predicted, scores = scored.labels.astype(np.int64), scored.predicted.astype(np.int64), scored.scores
    counts, n = labels.sum(axis=0), len(labels)
    hidden = [0 < min(count, n - count) < smallest_group for count in counts.tolist()]
    values: dict[SiteMetric, float] = {"label_accuracy": label_accuracy(predicted, labels)}
    mixed = (counts > 0) & (counts < n)
    if not any(hidden):
        values["f1"] = 100.0 * float(metrics.f1_score(labels, predicted, average="macro", zero_division=0))
        if mixed.any() and np.isfinite(scores).all():
            values["auroc"] = 100.0 * float(metrics.roc_auc_score(labels[:, mixed], scores[:, mixed], average="macro"))
            values["auprc"] = 100.0 * float(
                metrics.average_precision_score(labels[:, mixed], scores[:, mixed], average="macro")
            )
    limits: dict[SiteMetric, tuple[float, float]] = {}
    if resamples:

        def metrics_of_weights(weights: Numbers) -> dict[str, Numbers]:
            with np.errstate(invalid="ignore", divide="ignore"):
                return values_of("label_accuracy", Tagged(labels, predicted, scores, weights), values)

        limits = limits_of(resampled_metrics(metrics_of_weights, n, scored.groups, resamples, labels.shape[1]))
    rates = counts / n
    return SiteMetrics(
        site=site,
        part=part,
        samples=n,
        support=[None if hide else count for hide, count in zip(hidden, counts.tolist(), strict=True)],
        values=values,
        intervals=limits,
        baseline=None if any(hidden) else 100.0 * float(np.maximum(rates, 1 - rates).mean()),
    )
