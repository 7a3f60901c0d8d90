"""Metrics that a table can report, and the words for them in tables, figures and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import OF_CLASSES, Metric, RunResult, Selection, SiteMetric
from fedshift.evaluation.summary import Value


@dataclass(frozen=True)
class Measure:
    """A metric of finished runs.

    Args:
        name: the name on axes and in headings.
        value: returns the metric of a run.
        what: name and unit, for a note; "" where ``notes`` replace the usual notes.
        title: the title above the table.
        repeat: what the table averages over.
        less_is_better: whether the smallest value is the best.
        notes: the notes below the table.
        meaning: an explanation for readers who do not know the metric.
        metric: the name by which records of the last round have it by site; "" if they do not.
        unit: of the numbers, for axes and notes; "" for that of the label.
    """

    name: str
    value: Value
    what: str = ""
    title: str = ""
    repeat: str = "seed"
    less_is_better: bool = False
    notes: tuple[str, ...] = ()
    meaning: str = ""
    metric: SiteMetric | Literal[""] = ""
    unit: str = "%"

    @property
    def axis(self) -> str:
        """The label of an axis."""
        return f"{self.name.lower()}, {self.unit}" if self.unit else f"{self.name}, in the label's unit"


ACCURACY = Measure(
    "Accuracy",
    RunResult.accuracy,
    "Accuracy in percent",
    meaning="Each column is a target; the number is the share of its samples that the model of the last round got "
    "right. The average is the unweighted mean over targets.",
    metric="accuracy",
)
DICE = Measure(
    "Dice coefficient",
    RunResult.accuracy,
    "Dice coefficient in percent",
    meaning="Each column is a target; the number is how far predicted and true masks overlap, mean over its images and "
    "structures, last round. The average is the unweighted mean over targets.",
)
HAUSDORFF = Measure(
    "Hausdorff distance",
    RunResult.hausdorff,
    "Hausdorff distance in pixels (less is better)",
    "Hausdorff distance",
    less_is_better=True,
    unit="pixels",
)
RMSE = Measure(
    "RMSE",
    RunResult.accuracy,
    "Root mean squared error in the label's unit (less is better)",
    less_is_better=True,
    meaning="Each column is a target; the number is the root of the mean squared error of its samples, in the label's "
    "unit, last round. The average is the unweighted mean over targets.",
    metric="rmse",
    unit="",
)
CONCORDANCE = Measure(
    "Concordance",
    RunResult.accuracy,
    "Harrell's concordance in percent",
    meaning="Each column is a target; the number is the share of comparable pairs of its samples of whom the one with "
    "the earlier event was said to be at higher risk, last round: 50 is chance. The average is the unweighted mean "
    "over targets.",
    metric="concordance",
)
LABELS = Measure(
    "Label accuracy",
    RunResult.accuracy,
    "Share of labels that are right, in percent",
    meaning="Each column is a target; the number is the share of labels that are right, over its samples and labels, "
    "last round. The average is the unweighted mean over targets.",
    metric="label_accuracy",
)
METRICS: dict[Metric, Measure] = {
    "accuracy": ACCURACY,
    "dice": DICE,
    "rmse": RMSE,
    "concordance": CONCORDANCE,
    "label_accuracy": LABELS,
}


def _at_the_end(
    metric: SiteMetric, name: str, meaning: str, *, less_is_better: bool = False, unit: str = "%"
) -> Measure:
    """A measure of the last round's scores."""

    def value(result: RunResult, select: Selection) -> float | None:
        return result.site_metric(metric, select)

    what = f"{name} in {'percent' if unit else 'the unit of the label'}" + (
        " (less is better)" if less_is_better else ""
    )
    return Measure(name, value, what, less_is_better=less_is_better, meaning=meaning, metric=metric, unit=unit)


_OF_SCORES = (
    _at_the_end(
        "balanced_accuracy",
        "Balanced accuracy",
        "It is the mean over classes of the share that is recognised: 50 for "
        "guessing between two classes, however rare one of them is.",
    ),
    _at_the_end(
        "auroc",
        "AUROC",
        "It is how often a sample of the class has a higher score than one of another class: 50 for "
        "guessing. With more than two classes it is the mean over the classes at the target, with several "
        "labels the mean over labels.",
    ),
    _at_the_end(
        "auprc",
        "AUPRC",
        "It is the mean precision over all thresholds: for guessing, the share of the class. With more "
        "than two classes it is the mean over the classes at the target.",
    ),
    _at_the_end(
        "sensitivity",
        "Sensitivity",
        "It is the share of the positive class that is recognised, at the threshold that "
        "the sources' held-out samples choose.",
    ),
    _at_the_end(
        "specificity",
        "Specificity",
        "It is the share of the negative class that is recognised, at the threshold that "
        "the sources' held-out samples choose.",
    ),
    _at_the_end(
        "brier",
        "Brier score",
        "It is the mean squared distance between score and outcome, in percent: 0 is perfect, "
        "25 is to say 50 % of everything.",
        less_is_better=True,
    ),
    _at_the_end(
        "calibration_error",
        "Expected calibration error",
        "It is how far scores are from the shares that come true, mean over ten bins of scores.",
        less_is_better=True,
    ),
)
_OF_QUANTITIES = (
    _at_the_end("mae", "MAE", "It is the mean absolute error.", less_is_better=True, unit=""),
    _at_the_end(
        "r2",
        "R²",
        "It is the share of the variance of the target's labels that is explained: 0 for always saying the target's "
        "own mean, and below 0 for worse than that.",
    ),
)
MEASURES: dict[str, Measure] = {
    "accuracy": ACCURACY,
    "dice": DICE,
    "hausdorff": HAUSDORFF,
    "rmse": RMSE,
    "concordance": CONCORDANCE,
    "label_accuracy": LABELS,
    "f1": _at_the_end("f1", "F1", "It is the mean over labels of the harmonic mean of precision and sensitivity."),
    **{measure.metric: measure for measure in (*_OF_SCORES, *_OF_QUANTITIES)},
}
"""By the name that `--metric` and `evaluation.headline` take."""
_NAMES: dict[Metric, tuple[str, ...]] = {
    "accuracy": OF_CLASSES,
    "dice": ("dice", "hausdorff"),
    "rmse": ("rmse", "mae", "r2"),
    "concordance": ("concordance",),
    "label_accuracy": ("label_accuracy", "auroc", "auprc", "f1"),
}
"""The measures that runs can have, by the metric of their rounds."""


def measure_of(name: str, results: Sequence[RunResult]) -> Measure:
    """The measure called ``name``.

    Raises:
        UserError: these results cannot have it.
    """
    of_task = {name for result in results for name in _NAMES[result.metric]}
    known = [known for known in MEASURES if known in of_task]
    if name not in known:
        raise UserError(f"--metric: these results have no '{name}'; {nearest(name, known)}")
    return MEASURES[name]
