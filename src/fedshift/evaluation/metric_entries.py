"""Every metric, one entry each. Whatever names, bounds, computes, compares or draws a metric reads it here.

Records, intervals, tables, the page, the verdict, ``--metric`` and ``evaluation.headline`` follow from the entries. To
add a metric, add its entry to `ENTRIES` and a test that compares it with somebody else's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedshift.evaluation.weighted_samples import Classified, Numbers, Pairs, Quantities, Tagged

Metric = Literal["accuracy", "dice", "rmse", "concordance", "label_accuracy"]
"""What a run measures after every round, by its task: accuracy in percent; for segmentation the Dice coefficient in
percent; for regression the root mean squared error in the label's unit; for time to event Harrell's concordance in
percent; for several labels the share of labels that are right, in percent."""
Need = Literal["two classes", "several classes present", "a threshold"]
_AVERAGE = "The average is the unweighted mean over targets."


@dataclass(frozen=True)
class MetricEntry:
    """What a metric is.

    Args:
        name: in records, and for ``--metric`` and ``evaluation.headline``.
        title: in tables, on axes and in headings.
        meaning: what a reader who does not know it must know.
        tasks: the metric of the rounds of each task that has it → its value for weighted samples (b,) as a share, or
            in the label's unit; None where it is not computed from weighted samples, and then has no interval here.
        column: its short name above a column of the page; by default the title.
        unit: of its numbers; "" is that of the label.
        better: whether more or less of it is better.
        low: its lowest possible value; None: it has none.
        high: its highest; likewise.
        needs: what samples it takes.
        by_class: whether it treats classes apart. A site that does not tell the support of a class tells none of them.
        origin: ``end``: it is computed once, from the scores of the last round's model; ``rounds``: after every round;
            ``headline``: both, and methods are compared by it.
        what: name and unit below a table; by default made of the title and the unit.
    """

    name: str
    title: str
    meaning: str
    tasks: Mapping[Metric, Callable[[Any], Numbers | None] | None]
    column: str = ""
    unit: Literal["%", "pixels", ""] = "%"
    better: Literal["more", "less"] = "more"
    low: float | None = 0.0
    high: float | None = 100.0
    needs: frozenset[Need] = frozenset()
    by_class: bool = False
    origin: Literal["end", "rounds", "headline"] = "end"
    what: str = ""

    @property
    def of_sites(self) -> bool:
        """Whether a record of the last round has it by site."""
        return self.origin == "end" or any(self.tasks.values())

    @property
    def in_words(self) -> str:
        """Name and unit, for a note below a table."""
        less = " (less is better)" if self.better == "less" else ""
        return self.what or f"{self.title} in {'percent' if self.unit else 'the unit of the label'}{less}"

    def in_percent(self, share: Numbers) -> Numbers:
        """Shares as percent; what has a unit of its own stays as it is."""
        percent: Numbers = 100.0 * share
        return percent if self.unit == "%" else share

    def within(self, value: float) -> float:
        """The value, or the bound that rounding took it past."""
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return float(min(max(value, low), high))

    def check(self, value: float) -> None:
        """Raise ValueError for a value that it cannot have."""
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            low, high = ("any number" if bound is None else f"{bound:g}" for bound in (self.low, self.high))
            raise ValueError(f"{self.name} is {value}, which is not from {low} to {high}")


def _matthews(samples: Classified) -> Numbers:
    """The correlation of predicted and true classes, over the confusion matrix; 0 where one class is always said.

    Source: Matthews, Biochimica et Biophysica Acta 1975; several classes: Gorodkin, Computational Biology and Chemistry
    2004.
    """
    true, predicted, total = samples.support, samples.predicted, samples.total
    covariance = total * samples.right - (true * predicted).sum(axis=1)
    spreads = (total**2 - (predicted**2).sum(axis=1)) * (total**2 - (true**2).sum(axis=1))
    correlation: NDArray[np.float64] = covariance / (spreads + (spreads == 0)) ** 0.5
    return correlation


def _accuracy(samples: Classified) -> Numbers:
    return samples.right / samples.total


def _balanced_accuracy(samples: Classified) -> Numbers:
    return samples.mean(samples.recalls)


def _auroc(samples: Classified) -> Numbers:
    return samples.ranked[0]


def _auprc(samples: Classified) -> Numbers:
    return samples.ranked[1]


def _sensitivity(samples: Classified) -> Numbers | None:
    return samples.share_recognised(1)


def _specificity(samples: Classified) -> Numbers | None:
    return samples.share_recognised(0)


def _brier(samples: Classified) -> Numbers:
    return samples.squares / samples.total


def _rmse(samples: Quantities) -> Numbers:
    root: Numbers = (samples.squares / samples.total) ** 0.5
    return root


def _mae(samples: Quantities) -> Numbers:
    return samples.distances / samples.total


def _r2(samples: Quantities) -> Numbers:
    return 1 - samples.squares / samples.spread


def _concordance(samples: Pairs) -> Numbers:
    return samples.ordered / samples.comparable


def _label_accuracy(samples: Tagged) -> Numbers:
    return samples.right / samples.total


def _f1(samples: Tagged) -> Numbers:
    return samples.f1


def _auroc_of_labels(samples: Tagged) -> Numbers | None:
    return samples.ranked[0] if samples.ranked else None


def _auprc_of_labels(samples: Tagged) -> Numbers | None:
    return samples.ranked[1] if samples.ranked else None


_LISTED = (
    MetricEntry(
        "accuracy",
        "Accuracy",
        "Each column is a target; the number is the share of its samples that the model of the last round got right. "
        f"{_AVERAGE}",
        {"accuracy": _accuracy},
        column="accuracy",
        origin="headline",
    ),
    MetricEntry(
        "balanced_accuracy",
        "Balanced accuracy",
        "It is the mean over classes of the share that is recognised: 50 for guessing between two classes, however "
        "rare one of them is.",
        {"accuracy": _balanced_accuracy},
        column="balanced",
        by_class=True,
    ),
    MetricEntry(
        "mcc",
        "Matthews correlation",
        "It is the correlation of predicted and true classes, in percent: 0 for guessing or always saying one class, "
        "however rare the others are.",
        {"accuracy": _matthews},
        column="MCC",
        low=-100.0,
        needs=frozenset({"several classes present"}),
        by_class=True,
    ),
    MetricEntry(
        "auroc",
        "AUROC",
        "It is how often a sample of the class has a higher score than one of another class: 50 for guessing. With "
        "more than two classes it is the mean over the classes at the target, with several labels the mean over "
        "labels.",
        {"accuracy": _auroc, "label_accuracy": _auroc_of_labels},
        needs=frozenset({"several classes present"}),
        by_class=True,
    ),
    MetricEntry(
        "auprc",
        "AUPRC",
        "It is the mean precision over all thresholds: for guessing, the share of the class. With more than two "
        "classes it is the mean over the classes at the target.",
        {"accuracy": _auprc, "label_accuracy": _auprc_of_labels},
        needs=frozenset({"several classes present"}),
        by_class=True,
    ),
    MetricEntry(
        "sensitivity",
        "Sensitivity",
        "It is the share of the positive class that is recognised, at the threshold that the sources' held-out samples "
        "choose.",
        {"accuracy": _sensitivity},
        column="sensitivity",
        needs=frozenset({"two classes", "a threshold"}),
        by_class=True,
    ),
    MetricEntry(
        "specificity",
        "Specificity",
        "It is the share of the negative class that is recognised, at the threshold that the sources' held-out samples "
        "choose.",
        {"accuracy": _specificity},
        column="specificity",
        needs=frozenset({"two classes", "a threshold"}),
        by_class=True,
    ),
    MetricEntry(
        "brier",
        "Brier score",
        "It is the mean squared distance between score and outcome, in percent: 0 is perfect, 25 is to say 50 % of "
        "everything.",
        {"accuracy": _brier},
        column="Brier",
        better="less",
    ),
    MetricEntry(
        "calibration_error",
        "Expected calibration error",
        "It is how far scores are from the shares that come true, mean over ten bins of scores.",
        {"accuracy": None},  # its curve says it; resamples are always worse calibrated, so it has no interval
        column="calibration error",
        better="less",
    ),
    MetricEntry(
        "dice",
        "Dice coefficient",
        "Each column is a target; the number is how far predicted and true masks overlap, mean over its images and "
        f"structures, last round. {_AVERAGE}",
        {"dice": None},
        origin="headline",
    ),
    MetricEntry(
        "hausdorff",
        "Hausdorff distance",
        "",
        {"dice": None},
        unit="pixels",
        better="less",
        high=None,
        origin="rounds",
        what="Hausdorff distance in pixels (less is better)",
    ),
    MetricEntry(
        "hd95",
        "HD95",
        "It is the 95th percentile of the Hausdorff distance: 95 % of each contour are no further from the other one.",
        {"dice": None},
        unit="pixels",
        better="less",
        high=None,
        origin="rounds",
        what="HD95, the 95th percentile of the Hausdorff distance, in pixels (less is better)",
    ),
    MetricEntry(
        "rmse",
        "RMSE",
        "Each column is a target; the number is the root of the mean squared error of its samples, in the label's "
        f"unit, last round. {_AVERAGE}",
        {"rmse": _rmse},
        unit="",
        better="less",
        high=None,
        origin="headline",
        what="Root mean squared error in the label's unit (less is better)",
    ),
    MetricEntry("mae", "MAE", "It is the mean absolute error.", {"rmse": _mae}, unit="", better="less", high=None),
    MetricEntry(
        "r2",
        "R²",
        "It is the share of the variance of the target's labels that is explained: 0 for always saying the target's "
        "own mean, and below 0 for worse than that.",
        {"rmse": _r2},
        column="R², %",
        low=None,
    ),
    MetricEntry(
        "concordance",
        "Concordance",
        "Each column is a target; the number is the share of comparable pairs of its samples of whom the one with the "
        f"earlier event was said to be at higher risk, last round: 50 is chance. {_AVERAGE}",
        {"concordance": _concordance},
        column="concordance",
        origin="headline",
        what="Harrell's concordance in percent",
    ),
    MetricEntry(
        "label_accuracy",
        "Label accuracy",
        "Each column is a target; the number is the share of labels that are right, over its samples and labels, last "
        f"round. {_AVERAGE}",
        {"label_accuracy": _label_accuracy},
        column="label accuracy",
        origin="headline",
        what="Share of labels that are right, in percent",
    ),
    MetricEntry(
        "f1",
        "F1",
        "It is the mean over labels of the harmonic mean of precision and sensitivity.",
        {"label_accuracy": _f1},
    ),
)
ENTRIES: Mapping[str, MetricEntry] = {entry.name: entry for entry in _LISTED}
"""By name, in the order in which tables and the page have them."""
OF_SITES: tuple[str, ...] = tuple(entry.name for entry in _LISTED if entry.of_sites)
"""The metrics that records of the last round have by site."""
TASK_METRICS: tuple[Metric, ...] = get_args(Metric)


def metrics_of(metric: Metric) -> tuple[str, ...]:
    """The metrics that the sites of a task have, by the metric of its rounds.

    Example:
        >>> metrics_of("rmse")
        ('rmse', 'mae', 'r2')
    """
    return tuple(name for name in OF_SITES if metric in ENTRIES[name].tasks)


def values_of(metric: Metric, samples: Any, names: Mapping[str, Any] | tuple[str, ...]) -> dict[str, Numbers]:
    """The metrics of weighted samples, in percent or in the label's unit, (b,) each.

    Args:
        metric: what the rounds of the task measure.
        samples: of `fedshift.evaluation.weighted_samples`.
        names: the metrics to compute. Those that cannot be computed are left out.

    Example:
        >>> import numpy as np
        >>> from fedshift.evaluation.weighted_samples import Quantities
        >>> samples = Quantities(np.array([1.0, 3.0]), np.array([2.0, 5.0]), np.ones((1, 2)))
        >>> values_of("rmse", samples, ("mae",))["mae"].tolist()
        [1.5]
    """
    result: dict[str, Numbers] = {}
    for name in names:
        value = ENTRIES[name].tasks.get(metric)
        numbers = value(samples) if value is not None else None
        if numbers is not None:
            result[name] = ENTRIES[name].in_percent(numbers)
    return result
