"""What is measured of a task: after every round, and once at the end of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import Task
from fedshift.data.tasks.objective import Objective, Regression
from fedshift.evaluation.bootstrap import limits_of, resampled_metrics
from fedshift.evaluation.metric_entries import Metric, metrics_of, values_of
from fedshift.evaluation.metrics import accuracy, per_class_accuracy
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.site_metrics import Scored, site_metrics
from fedshift.evaluation.weighted_samples import Numbers, Pairs, Quantities, Tagged
from fedshift.extras import import_extra

Predicted = NDArray[Any]
Pair = tuple[Predicted, NDArray[Any]]
"""The predictions for the samples of a site, and their labels."""


@dataclass(frozen=True)
class MetricOptions:
    """How the metrics of a site are computed."""

    threshold: float | None = None  # score of the positive class from which a sample is positive
    resamples: int = 0  # bootstrap samples of the intervals; 0: no intervals
    smallest_group: int = 0  # the fewest samples that a number may be made of


class Measuring(ABC):
    """Base: how a task is measured."""

    metric: ClassVar[Metric]  # what is measured after every round, and what methods are compared by
    # whether labels are classes, so that right predictions of each can be counted
    counts_classes: ClassVar[bool] = False
    tells_support: ClassVar[bool] = False  # whether a site says how many samples have each class or label

    @property
    def metrics(self) -> tuple[SiteMetric, ...]:
        """All that is measured at the end."""
        return metrics_of(self.metric)

    @abstractmethod
    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float | None:
        """The metric of some samples; None where it cannot be measured."""

    def by_class(self, pairs: Mapping[str, Pair], classes: int) -> list[float | None]:
        """The same for each class over all sites; empty if labels are no classes."""
        return []

    def shows_few(self, labels: NDArray[Any], smallest_group: int) -> bool:
        """Whether the metric would be made of fewer than ``smallest_group`` of the samples."""
        return False

    @abstractmethod
    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        """All metrics of a site's samples."""


class OfClasses(Measuring):
    """Classification."""

    metric: ClassVar[Metric] = "accuracy"
    counts_classes: ClassVar[bool] = True
    tells_support: ClassVar[bool] = True

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float:
        return accuracy(predicted, labels)

    def by_class(self, pairs: Mapping[str, Pair], classes: int) -> list[float | None]:
        predicted, labels = (np.concatenate([pair[index] for pair in pairs.values()]) for index in (0, 1))
        return per_class_accuracy(predicted, labels, classes)

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return site_metrics(site, part, scored, **vars(options))


class OfQuantities(Measuring):
    """Regression. ``mean``: of the label at the sources, which is what a model without inputs would say."""

    metric: ClassVar[Metric] = "rmse"

    def __init__(self, mean: float) -> None:
        self._mean = mean

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float:
        return rmse(predicted, labels)

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return regression_metrics(site, part, scored, self._mean, options.resamples)


class OfTimes(Measuring):
    """Time to event."""

    metric: ClassVar[Metric] = "concordance"

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float | None:
        return concordance(predicted, labels)

    def shows_few(self, labels: NDArray[Any], smallest_group: int) -> bool:
        return int(labels[:, 1].sum()) < smallest_group

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return survival_metrics(site, part, scored, options.resamples)


class OfLabels(Measuring):
    """Multi-label classification."""

    metric: ClassVar[Metric] = "label_accuracy"
    tells_support: ClassVar[bool] = True

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float | None:
        return label_accuracy(predicted, labels)

    def by_class(self, pairs: Mapping[str, Pair], classes: int) -> list[float | None]:
        predicted, labels = (np.concatenate([pair[index] for pair in pairs.values()]) for index in (0, 1))
        return [label_accuracy(predicted[:, n], labels[:, n]) for n in range(classes)]

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return label_metrics(site, part, scored, options.resamples, options.smallest_group)


def measuring_of(objective: Objective) -> Measuring:
    """How the task of an objective is measured.

    Example:
        >>> from fedshift.data.tasks.objective import CLASSES
        >>> measuring_of(CLASSES).metric
        'accuracy'
    """
    if isinstance(objective, Regression):
        return OfQuantities(objective.mean)
    kinds: Mapping[Task, type[Measuring]] = {"time_to_event": OfTimes, "multi_label": OfLabels}
    return kinds.get(objective.task, OfClasses)()


def label_accuracy(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of labels that are right, over samples and labels, in percent.

    Example:
        >>> label_accuracy(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]]))
        75.0
    """
    return 100.0 * float(np.mean(predicted == labels))


def label_metrics(site: str, part: Part, scored: Scored, resamples: int = 0, smallest_group: int = 0) -> SiteMetrics:
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


def rmse(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """The root of the mean squared error, in the label's unit.

    Raises:
        ValueError: the shapes differ, or there is no sample.

    Example:
        >>> rmse(np.array([1.0, 2.0]), np.array([1.0, 4.0])) ** 2
        2.0000000000000004
    """
    metrics = import_extra("sklearn.metrics", extra="report", what="measuring regression")
    return float(metrics.root_mean_squared_error(labels.astype(np.float64), predicted.astype(np.float64)))


def regression_metrics(site: str, part: Part, scored: Scored, mean: float, resamples: int = 0) -> SiteMetrics:
    """RMSE and MAE in the label's unit, R² in percent, and the RMSE of always saying the mean of the sources.

    R² compares with always saying this site's own mean: 100 is perfect, and it may be below 0. A site whose labels are
    all equal has none.

    Args:
        resamples: bootstrap samples of the intervals; 0: no intervals.

    Example:
        >>> labels, said = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])
        >>> found = regression_metrics("a", "target", Scored(labels, said, said[:, None]), mean=2.0)
        >>> {metric: round(value, 2) for metric, value in found.values.items()}, round(found.baseline, 2)
        ({'rmse': 0.58, 'mae': 0.33, 'r2': 50.0}, 0.82)
    """
    metrics = import_extra("sklearn.metrics", extra="report", what="measuring regression")
    labels, predicted = scored.labels.astype(np.float64), scored.predicted.astype(np.float64)
    mae = float(metrics.mean_absolute_error(labels, predicted))
    values: dict[SiteMetric, float] = {"rmse": rmse(predicted, labels), "mae": mae}
    if np.ptp(labels) > 0:
        values["r2"] = 100.0 * float(metrics.r2_score(labels, predicted))
    limits: dict[SiteMetric, tuple[float, float]] = {}
    if resamples:

        def metrics_of_weights(weights: Numbers) -> dict[str, Numbers]:
            with np.errstate(divide="ignore", invalid="ignore"):
                return values_of("rmse", Quantities(labels, predicted, weights), values)

        limits = limits_of(resampled_metrics(metrics_of_weights, len(labels), scored.groups, resamples))
    return SiteMetrics(
        site=site,
        part=part,
        samples=len(labels),
        support=[],
        values=values,
        intervals=limits,
        baseline=rmse(np.full_like(labels, mean), labels),
    )


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
