"""Metrics that a table can report, and the words for them in tables, figures and the page."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.evaluation.records import Metric, RunResult
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
    """

    name: str
    value: Value
    what: str = ""
    title: str = ""
    repeat: str = "seed"
    less_is_better: bool = False
    notes: tuple[str, ...] = ()
    meaning: str = ""


ACCURACY = Measure(
    "Accuracy",
    RunResult.accuracy,
    "Accuracy in percent",
    meaning="Each column is a target; the number is the share of its samples that the model of the last round got "
    "right. The last column is the unweighted mean over targets.",
)
DICE = Measure(
    "Dice coefficient",
    RunResult.accuracy,
    "Dice coefficient in percent",
    meaning="Each column is a target; the number is how far predicted and true masks overlap, mean over its images and "
    "structures, last round. The last column is the unweighted mean over targets.",
)
HAUSDORFF = Measure(
    "Hausdorff distance",
    RunResult.hausdorff,
    "Hausdorff distance in pixels (less is better)",
    "Hausdorff distance",
    less_is_better=True,
)
METRICS: dict[Metric, Measure] = {"accuracy": ACCURACY, "dice": DICE}
