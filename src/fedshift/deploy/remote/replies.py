"""What only a message from another machine holds: a reply's header, and a site's report of a measurement."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, TypeVar

import torch
from pydantic import Field, StringConstraints

from fedshift.data.domain import Preprocessing
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.remote.policy import ACCURACY, CONFIDENCES, MOMENTS
from fedshift.deploy.remote.requests import FileName
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.plain_sums import GivenInputs, GivenSums, check_classes
from fedshift.evaluation.measuring import Measuring, measuring_of
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import SiteMetrics
from fedshift.evaluation.site_metrics import BINS
from fedshift.federation.messages import Statistics
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.integer_sums import LayoutEntry
from fedshift.federation.setting_json import SettingRecipe
from fedshift.weights import NamedTensors

_LONGEST_FILE = 255
"""Characters in the name of a file."""
_Count = Annotated[int, Field(ge=0, le=2**53)]
_File = Annotated[str, StringConstraints(max_length=_LONGEST_FILE)]


class CallAnswer(Frozen):
    """What the header of a reply to a call says.

    Attributes:
        answers: the key of the request.
        mini_batches: on how many the site trained.
        memory: the files of its memory by entry.
        layout: what the integers of a masked contribution stand for.
    """

    answers: str = ""
    mini_batches: Annotated[int, Field(ge=0)]
    memory: dict[_File, FileName]  # the coordinator names these files in its next request
    layout: LayoutEntry | None = None

    def check(self, left: int, remembers: Collection[str]) -> None:
        """Check what a site says that it did.

        Args:
            left: mini-batches that the site had left.

        Raises:
            FedshiftError: it is impossible.
        """
        if self.mini_batches > left:  # absent sites are charged by this number, too: see `Federation.forfeit`
            raise FedshiftError(f"it claims more mini-batches than the {left} that it had left")
        if len(self.memory) > len(remembers) + 1:  # and the residuals of rounding
            raise FedshiftError("it does not say what the site remembers")


class Measures(Frozen):
    """A site's report of a measurement.

    Attributes:
        accuracy: in percent; of other tasks than classification, their main metric.
        samples: how many were measured.
        classes: (right, of) per class; None where it is kept back.
        metrics: at the end of a run, of a site that sends them.
        sums: of confidences, likewise.
    """

    accuracy: float
    samples: Annotated[int, Field(ge=1, le=2**53)]
    classes: tuple[tuple[_Count, _Count] | None, ...]
    metrics: SiteMetrics | None = None
    sums: GivenSums | None = None


class MeasureAnswer(Frozen):
    """What a site answers that is asked to measure a model."""

    measures: Measures


class Measured(Statistics):
    """Stands in the ledger for a model that was sent to be measured, and for the site's report of it."""

    kind = ACCURACY


class Confidences(Statistics):
    """Stands in the ledger for a site's sums of confidences."""

    kind = CONFIDENCES


class SummedInputs(Statistics):
    """Stands in the ledger for a site's sums of inputs."""

    kind = MOMENTS


K = TypeVar("K", bound=NamedTensors)


def for_ledger(kind: type[K], size: int) -> K:
    """Content of ``size`` bytes for the ledger; it takes no memory."""
    return kind({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def sums_bytes(sums: GivenSums) -> Confidences:
    """The numbers in a site's sums of confidences, for the ledger."""
    numbers = 2 + 2 * len(sums.by_confidence[0]) + 2 * len(sums.losses) + sums.sums.answers.size
    return for_ledger(Confidences, 8 * (numbers + (0 if sums.by_score is None else 2 * len(sums.by_score[0]))))


def inputs_bytes(inputs: GivenInputs) -> SummedInputs:
    """The numbers in sums of inputs, for the ledger."""
    return for_ledger(SummedInputs, 8 * (1 + len(inputs.total) + len(inputs.squares) + len(inputs.cubes or ())))


def report_bytes(report: Measures) -> Measured:
    """The numbers in a site's report of a measurement, for the ledger."""
    numbers, metrics = 2 + 2 * len(report.classes), report.metrics
    if metrics is not None:
        numbers += (
            len(metrics.support) + len(metrics.values) + 2 * len(metrics.intervals) + 3 * len(metrics.reliability)
        )
    return for_ledger(Measured, 8 * numbers)


def check_measures(report: Measures, recipe: SettingRecipe) -> None:
    """Raise FedshiftError if the numbers of a site's report are impossible, or of another task."""
    measuring = measuring_of(objective_of(Preprocessing.model_validate(recipe.preprocessing)))
    most = ENTRIES[measuring.metric].high or math.inf
    pairs = [pair for pair in report.classes if pair]
    if not (0 <= report.accuracy <= most and all(right <= of <= report.samples for right, of in pairs)):
        raise FedshiftError("its measurement is not an accuracy")
    counted = recipe.classes if measuring.counts_classes else 0
    if len(report.classes) != counted:
        raise FedshiftError(f"it measured {len(report.classes)} classes, the experiment has {counted}")
    if report.metrics is not None:
        _check_metrics(report.metrics, report.samples, recipe.classes, measuring)
    if report.sums is not None:
        check_classes(report.sums, recipe.classes)
        if report.sums.samples != report.samples:
            raise FedshiftError("its sums of confidences are of another number of samples than it measured")


def _check_metrics(metrics: SiteMetrics, samples: int, classes: int, measuring: Measuring) -> None:
    counts = [count for count in metrics.support if count is not None]
    of_bins = [count for *_, count in metrics.reliability]
    if len(metrics.support) != (classes if measuring.tells_support else 0) or len(of_bins) > BINS:
        raise FedshiftError("its metrics are of another number of classes or bins than they were asked for")
    if (
        metrics.samples != samples
        or (sum(counts) if measuring.counts_classes else max(counts, default=0)) > samples
        or sum(of_bins) > samples
        or (metrics.events or 0) > samples
    ):
        raise FedshiftError("its metrics are of another number of samples than it measured")
    if any(low > high for low, high in metrics.intervals.values()):
        raise FedshiftError("its metrics have an interval whose lower end is above the upper one")
    if not set(measuring.metrics).issuperset((*metrics.values, *metrics.intervals)):
        raise FedshiftError("its metrics are of another task")
