"""The records of a run: one `RoundRecord` per line of `rounds.jsonl`, one `RunResult` as `result.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedshift.evaluation.metric_entries import ENTRIES, OF_SITES, Metric
from fedshift.evaluation.metrics import harmonic_mean
from fedshift.evaluation.site_bytes import SiteBytes
from fedshift.section import Section, Sparing
from fedshift.text import decimals

Selection = Literal["last", "source", "oracle"]
Part = Literal["target", "held_out", "common"]
"""Which samples of a site are measured; common: of a test set that no one trains on, beside the targets."""
if TYPE_CHECKING:
    SiteMetric = str
else:
    SiteMetric = Literal[OF_SITES]
"""What is computed once, from the scores of the last round's model (see `metric_entries`)."""
ERRORS: frozenset[str] = frozenset(name for name, entry in ENTRIES.items() if entry.better == "less")
"""The metrics of which less is better."""
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A metric of the rounds: percent, or an error in the label's unit."""
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Pixels = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def format_metric(metric: str, number: float) -> str:
    """A number of a metric as a table has it.

    Example:
        >>> format_metric("accuracy", 70.126), format_metric("rmse", 0.0123456)
        ('70.13', '0.0123')
    """
    return decimals(number, ENTRIES[metric].unit)


def with_unit(metric: str, number: float) -> str:
    """The same with its unit.

    Example:
        >>> with_unit("accuracy", 70.126), with_unit("rmse", 0.0123456)
        ('70.13 %', 'RMSE 0.0123')
    """
    entry = ENTRIES[metric]
    return f"{number:.2f} {entry.unit}" if entry.unit else f"{entry.title} {format_metric(metric, number)}"


class _Record(Section):
    # A loss may be infinite. It is written as legal JSON that reads back as the same number.
    model_config = ConfigDict(ser_json_inf_nan="strings")


def _no_bytes() -> dict[Literal["up", "down"], dict[str, Count]]:
    return {"up": {}, "down": {}}


class RoundRecord(_Record, Sparing):
    """One line of `rounds.jsonl`, written after the round was evaluated."""

    later: ClassVar[tuple[str, ...]] = ("common_accuracy", "target_hd95")

    round: Count = Field(description="number of rounds done when this was measured")
    target_accuracy: dict[str, NotNegative] = Field(
        description="the run's metric at each measured target or unseen domain: accuracy in percent, an error, …"
    )
    source_accuracy: dict[str, NotNegative] = Field(
        default_factory=dict, description="the same on the held-out part of each source that has one"
    )
    per_class: list[Percent | None] = Field(
        default_factory=list, description="accuracy per class at the target(s), percent; None where a class is absent"
    )
    target_hausdorff: dict[str, Pixels] = Field(
        default_factory=dict, description="of earlier versions: Hausdorff distance at each target, in pixels"
    )
    target_hd95: dict[str, Pixels] = Field(
        default_factory=dict, description="for segmentation: HD95 at each target, in pixels; written only if measured"
    )
    common_accuracy: dict[str, NotNegative] = Field(
        default_factory=dict, description="the same on each common test set; written only if there is one"
    )
    metric: Metric = Field(
        default="accuracy", description="what the fields called accuracy hold; written only if it is no percentage"
    )
    losses: dict[str, float] = Field(default_factory=dict, description="mean training loss of the round per site")
    aggregation_weights: dict[str, Any] = Field(
        default_factory=dict, description="the sites' weights, as the method reports them"
    )
    seconds: Seconds = Field(description="wall-clock seconds of this round, evaluation included")
    mini_batches: Count = Field(description="local mini-batches per site since the start, CSAC's acquisition included")
    bytes: dict[Literal["up", "down"], dict[str, Count]] = Field(
        default_factory=_no_bytes, description="bytes of this round per kind of content, all sites together"
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="further values that the method reports")

    @model_validator(mode="after")
    def _shares_are_percent(self) -> RoundRecord:
        for value in chain(
            *(item.values() for item in (self.target_accuracy, self.source_accuracy, self.common_accuracy))
        ):
            ENTRIES[self.metric].check(value)
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = super()._as_before(plain)
        if ENTRIES[self.metric].unit == "%":
            written.pop("metric", None)
        return written

    @property
    def target_mean(self) -> float | None:
        """Unweighted mean accuracy over the measured targets; None if the round was not measured."""
        return fmean(self.target_accuracy.values()) if self.target_accuracy else None

    @property
    def hausdorff_mean(self) -> float | None:
        """Unweighted mean Hausdorff distance over the measured targets; None if it was not measured."""
        return fmean(self.target_hausdorff.values()) if self.target_hausdorff else None

    @property
    def hd95_mean(self) -> float | None:
        """Unweighted mean HD95 over the measured targets; None if it was not measured."""
        return fmean(self.target_hd95.values()) if self.target_hd95 else None

    @property
    def source_mean(self) -> float | None:
        """Unweighted mean accuracy over the sources' held-out parts; None if no source has one."""
        return fmean(self.source_accuracy.values()) if self.source_accuracy else None

    def numbers(self) -> dict[str, float]:
        """Every number of the record by its path, such as ``target_accuracy/D0`` or ``bytes/up/weights``.

        Example:
            >>> record = RoundRecord(round=1, target_accuracy={"a": 70.0}, losses={"b": 0.5}, seconds=2, mini_batches=3)
            >>> record.numbers()
            {'round': 1, 'target_accuracy/a': 70.0, 'losses/b': 0.5, 'seconds': 2.0, 'mini_batches': 3}
        """
        return dict(_numbers("", self.model_dump()))

    def score(self, both: bool) -> float | None:
        """The target mean; with ``both`` its harmonic mean with the source mean. None if one is missing."""
        at_target, at_source = self.target_mean, self.source_mean
        if not both or at_target is None:
            return at_target
        return None if at_source is None else harmonic_mean(at_source, at_target)


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        parts = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
        return
    for name, part in parts:
        yield from _numbers(f"{path}/{name}" if path else name, part)


class SelectedRound(_Record, Sparing):
    """The round that a selection rule chose, and what was measured in it."""

    later: ClassVar[tuple[str, ...]] = ("common", "hd95")

    round: Count
    accuracy: NotNegative = Field(description="the run's metric, mean over the measured targets")
    source_accuracy: NotNegative | None = Field(default=None, description="mean over the sources' held-out parts")
    sites: dict[str, NotNegative] = Field(
        default_factory=dict, description="each target and each source that was measured"
    )
    per_class: list[Percent | None] = Field(default_factory=list)
    hausdorff: Pixels | None = Field(default=None, description="of earlier versions: mean over the measured targets")
    hd95: Pixels | None = Field(default=None, description="for segmentation: mean over the measured targets")
    common: dict[str, NotNegative] = Field(default_factory=dict, description="each common test set, if there are any")


class SiteMetrics(_Record):
    """What was measured at one site with the model of the last round (see `SiteMetric` for the units).

    A deployed site leaves out what would show fewer samples than its smallest group.
    """

    site: str
    part: Part = Field(description="the target's measured samples, a source's held-out ones, or a common test set")
    samples: Count
    support: list[Count | None] = Field(
        description="samples of each class; None where a site does not say; empty if labels are no classes"
    )
    values: dict[SiteMetric, Number] = Field(description="metric → value; without those that cannot be measured here")
    intervals: dict[SiteMetric, tuple[Number, Number]] = Field(
        default_factory=dict, description="metric → 95 % interval over samples (bootstrap), at targets"
    )
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="score from which a sample is positive: at a source its choice, at a target the one used",
    )
    reliability: list[tuple[Percent, Percent, Count]] = Field(
        default_factory=list, description="mean score, share that is right, and samples of each bin of scores"
    )

    baseline: NotNegative | None = Field(
        default=None,
        description="what a model without inputs reaches: for regression the error of always saying the mean of the "
        "sources, for time to event 50 by chance, for several labels always saying the more frequent answer",
    )
    events: Count | None = Field(
        default=None, description="time to event: samples that had it; None elsewhere, and where a site does not say"
    )

    @model_validator(mode="after")
    def _shares_are_percent(self) -> SiteMetrics:
        bounds = ((metric, bound) for metric, pair in self.intervals.items() for bound in pair)
        for metric, value in (*self.values.items(), *bounds):
            ENTRIES[metric].check(value)
        return self

    @property
    def majority(self) -> float | None:
        """Share of the most frequent class in percent; None where a site does not say it."""
        if not self.support or self.baseline is not None:
            return None
        known = [count for count in self.support if count is not None]
        largest = max(known, default=0)
        return 100.0 * largest / self.samples if largest >= self.samples - sum(known) else None

    @property
    def informative(self) -> int | None:
        """How many samples tell a model that knows something from one that does not; None where a record does not say.

        With classes those outside the most frequent one, for time to event those that had it, for quantities all.
        """
        if self.events is not None:
            return self.events
        if "rmse" in self.values:
            return self.samples
        share = self.majority
        return None if share is None else round(self.samples * (1 - share / 100.0))


class SitePrivacy(_Record):
    """What differential privacy a run gave the training samples of a site."""

    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    unit: Literal["sample", "group"] = Field(description="what is protected: a sample, or all samples of a group")
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sample_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Count


class WithoutLabels(_Record, Sparing):
    """Samples without labels at a target: the model's answers for them are among the run's predictions."""

    later: ClassVar[tuple[str, ...]] = ("doubt",)

    samples: Count
    unlike: str | None = Field(default=None, description="how the samples are too unlike those of the sources")
    unusual: str | None = Field(default=None, description="how they are unlike them at all")
    doubt: float = Field(default=0.0, ge=0, le=1, description="share of samples for which answers may be anything")
    at_site: bool = Field(default=False, description="whether their site keeps its predictions and its estimate")


class RunResult(_Record, Sparing):
    """The content of `result.json`: one finished run, that is one (method, target, seed)."""

    later: ClassVar[tuple[str, ...]] = ("without_labels",)

    method: str = Field(description="the method's label in the experiment")
    setting: str = Field(
        default="", description="the method's named setting and what differs from it; empty in old records"
    )
    target: str = Field(description="the target domain, or the name of a pair")
    labelled: list[str] = Field(default_factory=list, description="labelled sites, where both sides are measured")
    unlabelled: list[str] = Field(default_factory=list, description="unlabelled sites, likewise")
    without_labels: dict[str, WithoutLabels] = Field(
        default_factory=dict, description="targets that lack labels, where the model answered and was not measured"
    )
    seed: int
    metric: Metric = Field(default="accuracy", description="what the fields called accuracy hold")
    headline: Literal["last"] = Field(default="last", description="the selection rule of the reported number")
    selected: dict[Selection, SelectedRound | None] = Field(description="the round per rule; None if unavailable")
    sites: list[SiteMetrics] = Field(
        default_factory=list, description="further metrics of the last round by site; empty in old records"
    )
    classes: list[str]
    rounds: Count
    seconds: Seconds = Field(description="wall-clock seconds of the whole run")
    processor_seconds: Seconds | None = Field(
        default=None, description="processor seconds of the run's process, without workers; None if it was resumed"
    )
    memory: Count | None = Field(
        default=None, description="most bytes that this process had in memory during the run; None also if not known"
    )
    mini_batches: Count = Field(description="local mini-batches per site, CSAC's acquisition included")
    bytes_up: dict[str, Count] = Field(default_factory=dict, description="bytes that left the sites, per kind")
    bytes_down: dict[str, Count] = Field(default_factory=dict, description="bytes that reached the sites, per kind")
    bytes_by_site: SiteBytes | None = Field(
        default=None, description="the same of each site, or its range over very many; None in old records"
    )
    versions: dict[str, str] = Field(default_factory=dict)
    threads: Count
    device: str
    warnings: list[str] = Field(default_factory=list)
    privacy: dict[str, SitePrivacy] = Field(
        default_factory=dict, description="what the run cost each site, an upper bound; empty without training.privacy"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the experiment with every default written out")
    data: dict[str, Any] = Field(default_factory=dict, description="data set: name, hashes, split, site sizes")

    @model_validator(mode="after")
    def _has_a_headline(self) -> RunResult:
        if self.selected.get(self.headline) is None and not self.without_labels:
            raise ValueError("selected: the last round is missing")
        for item in self.selected.values():
            if item is not None:
                ENTRIES[self.metric].check(item.accuracy)
        return self

    @property
    def is_measured(self) -> bool:
        """Whether the target has labels that the model was measured by."""
        return self.selected.get(self.headline) is not None

    @property
    def less_is_better(self) -> bool:
        """Whether the fields called accuracy hold an error."""
        return self.metric in ERRORS

    @property
    def guarantee(self) -> str | None:
        """The privacy of the site that paid most, such as "ε ≤ 8.0 at δ = 1e-05"; None: not private."""
        if not self.privacy:
            return None
        most = max(self.privacy.values(), key=lambda spent: spent.epsilon)
        return f"ε ≤ {math.ceil(most.epsilon * 10 - 1e-9) / 10:.1f} at δ = {most.delta:g}"

    def accuracy(self, select: Selection = "last") -> float | None:
        """The run's metric at the target(s) in the selected round; None if the rule selected none."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.accuracy

    def source_accuracy(self, select: Selection = "last") -> float | None:
        """The same on the sources' held-out parts; None if not measured."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.source_accuracy

    def score(self, select: Selection = "last") -> float | None:
        """The number that methods are compared by; None if not measured.

        It is the run's metric; where labelled and unlabelled sites are both measured, the harmonic mean of the two.
        """
        at_target, at_source = self.accuracy(select), self.source_accuracy(select)
        if not self.labelled or at_target is None:
            return at_target
        return None if at_source is None else harmonic_mean(at_source, at_target)

    def hausdorff(self, select: Selection = "last") -> float | None:
        """Hausdorff distance in the selected round, in pixels; None if not measured, as since HD95 is."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.hausdorff

    def hd95(self, select: Selection = "last") -> float | None:
        """HD95 in the selected round, in pixels; None if not measured."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.hd95

    @property
    def targets(self) -> list[SiteMetrics]:
        """What was measured at the target(s) in the last round; empty in old records."""
        return [site for site in self.sites if site.part == "target"]

    def site_metric(self, metric: SiteMetric, select: Selection = "last") -> float | None:
        """Mean over the target(s); None unless each has it. Only the last round is measured so."""
        values = [site.values.get(metric) for site in self.targets] if select == "last" else []
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None
