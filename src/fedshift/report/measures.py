"""Metrics that a table can report, and the words for them in tables, figures and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedshift.errors import UserError, nearest
from fedshift.evaluation.metric_entries import ENTRIES, TASK_METRICS, Metric, MetricEntry
from fedshift.evaluation.records import RunResult, Selection, SiteMetric
from fedshift.evaluation.summary import Value

MISSING = "–"
"""What stands where nothing was measured."""


@dataclass(frozen=True)
class Measure:
    """A metric of finished runs.

    Args:
        name: the name on axes and in headings.
        value: returns the metric of a run.
        what: name and unit, for a note; "" where ``notes`` replace the usual notes.
        title: the title above the table.
        repeat: what the table averages over.
        share_sites: whether columns have sites in common, as pairs of sites do.
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
    share_sites: bool = False
    less_is_better: bool = False
    notes: tuple[str, ...] = ()
    meaning: str = ""
    metric: SiteMetric | Literal[""] = ""
    unit: str = "%"

    @property
    def axis(self) -> str:
        """The label of an axis."""
        return f"{self.name.lower()}, {self.unit}" if self.unit else f"{self.name}, in the label's unit"


def _measure(entry: MetricEntry) -> Measure:
    """How runs and tables have a metric."""

    def at_the_end(result: RunResult, select: Selection) -> float | None:
        return result.site_metric(entry.name, select)

    distance = RunResult.hd95 if entry.name == "hd95" else RunResult.hausdorff
    values: dict[str, Value] = {"headline": RunResult.accuracy, "rounds": distance, "end": at_the_end}
    return Measure(
        entry.title,
        values[entry.origin],
        entry.in_words,
        entry.title if entry.origin == "rounds" else "",
        less_is_better=entry.better == "less",
        meaning=entry.meaning,
        metric=entry.name if entry.of_sites else "",
        unit=entry.unit,
    )


MEASURES: dict[str, Measure] = {name: _measure(entry) for name, entry in ENTRIES.items()}
"""By the name that `--metric` and `evaluation.headline` take."""
METRICS: dict[Metric, Measure] = {metric: MEASURES[metric] for metric in TASK_METRICS}
"""By the metric of a task's rounds."""
ACCURACY, DISTANCES = MEASURES["accuracy"], (MEASURES["hd95"], MEASURES["hausdorff"])


def measure_of(name: str, results: Sequence[RunResult]) -> Measure:
    """The measure called ``name``. UserError if these results cannot have it."""
    known = [name for name, entry in ENTRIES.items() if any(result.metric in entry.tasks for result in results)]
    if name not in known:
        raise UserError(f"--metric: these results have no '{name}'; {nearest(name, known)}")
    return MEASURES[name]


Kind = Literal[
    "average",
    "baseline",
    "below",
    "choice",
    "estimate",
    "explained",
    "few",
    "gain",
    "harmonic",
    "measure",
    "none",
    "partial",
    "privacy",
    "progress",
    "repeats",
    "scale",
    "seeds",
    "selection",
    "sent",
    "settings",
    "steps",
    "trained",
    "used",
    "warning",
    "work",
]


@dataclass(frozen=True)
class Note:
    """A sentence below a table, with what it is about."""

    kind: Kind  # what it is about
    text: str  # the sentence
    parts: tuple[str, ...] = ()  # what it is made of, for a page that says the same in fewer words
