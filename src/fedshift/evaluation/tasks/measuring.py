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
from fedshift.evaluation.metric_entries import Metric, metrics_of
from fedshift.evaluation.metrics import accuracy, per_class_accuracy
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.site_metrics import Scored, site_metrics
from fedshift.evaluation.tasks import multi_label, regression, survival

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
        return regression.rmse(predicted, labels)

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return regression.regression_metrics(site, part, scored, self._mean, options.resamples)


class OfTimes(Measuring):
    """Time to event."""

    metric: ClassVar[Metric] = "concordance"

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float | None:
        return survival.concordance(predicted, labels)

    def shows_few(self, labels: NDArray[Any], smallest_group: int) -> bool:
        return int(labels[:, 1].sum()) < smallest_group

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return survival.survival_metrics(site, part, scored, options.resamples)


class OfLabels(Measuring):
    """Multi-label classification."""

    metric: ClassVar[Metric] = "label_accuracy"
    tells_support: ClassVar[bool] = True

    def value(self, predicted: Predicted, labels: NDArray[Any]) -> float | None:
        return multi_label.label_accuracy(predicted, labels)

    def by_class(self, pairs: Mapping[str, Pair], classes: int) -> list[float | None]:
        predicted, labels = (np.concatenate([pair[index] for pair in pairs.values()]) for index in (0, 1))
        return [multi_label.label_accuracy(predicted[:, n], labels[:, n]) for n in range(classes)]

    def at_site(self, site: str, part: Part, scored: Scored, options: MetricOptions) -> SiteMetrics:
        return multi_label.label_metrics(site, part, scored, options.resamples, options.smallest_group)


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
