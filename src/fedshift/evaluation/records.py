"""The records of a run: one `RoundRecord` per line of `rounds.jsonl`, one `RunResult` as `result.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedshift.evaluation.metrics import harmonic_mean

Selection = Literal["last", "source", "oracle"]
Metric = Literal["accuracy", "dice"]
"""What the fields called accuracy hold, in percent: accuracy, or for segmentation the Dice coefficient."""
SiteMetric = Literal[
    "accuracy", "balanced_accuracy", "auroc", "auprc", "sensitivity", "specificity", "brier", "calibration_error"
]
"""What is computed once, from the scores of the last round's model (see `site_metrics`)."""
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Pixels = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    # A loss may be infinite. It is written as legal JSON that reads back as the same number.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def _no_bytes() -> dict[Literal["up", "down"], dict[str, Count]]:
    return {"up": {}, "down": {}}


class RoundRecord(_Record):
    """One line of `rounds.jsonl`, written after the round was evaluated."""

    round: Count = Field(description="number of rounds done when this was measured")
    target_accuracy: dict[str, Percent] = Field(
        description="accuracy at each measured target or unseen domain, percent"
    )
    source_accuracy: dict[str, Percent] = Field(
        default_factory=dict, description="accuracy on the held-out part of each source that has one, percent"
    )
    per_class: list[Percent | None] = Field(
        default_factory=list, description="accuracy per class at the target(s), percent; None where a class is absent"
    )
    target_hausdorff: dict[str, Pixels] = Field(
        default_factory=dict, description="for segmentation: Hausdorff distance at each target, in pixels"
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

    @property
    def target_mean(self) -> float | None:
        """Unweighted mean accuracy over the measured targets; None if the round was not measured."""
        return fmean(self.target_accuracy.values()) if self.target_accuracy else None

    @property
    def hausdorff_mean(self) -> float | None:
        """Unweighted mean Hausdorff distance over the measured targets; None if it was not measured."""
        return fmean(self.target_hausdorff.values()) if self.target_hausdorff else None

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
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
        return
    for name, part in parts:
        yield from _numbers(f"{path}/{name}" if path else name, part)


class SelectedRound(_Record):
    """The round that a selection rule chose, and what was measured in it."""

    round: Count
    accuracy: Percent = Field(description="mean over the measured targets, percent")
    source_accuracy: Percent | None = Field(default=None, description="mean over the sources' held-out parts, percent")
    sites: dict[str, Percent] = Field(default_factory=dict, description="each target and each source that was measured")
    per_class: list[Percent | None] = Field(default_factory=list)
    hausdorff: Pixels | None = Field(default=None, description="for segmentation: mean over the measured targets")


class SiteMetrics(_Record):
    """What was measured at one site with the model of the last round. All metrics are in percent.

    A deployed site leaves out what would show fewer samples than its smallest group.
    """

    site: str
    part: Literal["target", "held_out"] = Field(
        description="the target's measured samples, or a source's held-out ones"
    )
    samples: Count
    support: list[Count | None] = Field(description="samples of each class; None where a site does not say")
    values: dict[SiteMetric, Percent] = Field(description="metric → value; without those that cannot be measured here")
    intervals: dict[SiteMetric, tuple[Percent, Percent]] = Field(
        default_factory=dict, description="metric → 95 % interval over samples (bootstrap), at targets"
    )
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="score from which a sample is positive: at a source its choice, at a target the one used",
    )
    reliability: list[tuple[Percent, Percent, Count]] = Field(
        default_factory=list, description="mean score, share that is right, and samples of each bin of scores"
    )

    @property
    def majority(self) -> float | None:
        """Share of the most frequent class in percent; None where a site does not say it."""
        known = [count for count in self.support if count is not None]
        largest = max(known, default=0)
        return 100.0 * largest / self.samples if largest >= self.samples - sum(known) else None


class SitePrivacy(_Record):
    """What differential privacy a run gave the training samples of a site."""

    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    unit: Literal["sample", "group"] = Field(description="what is protected: a sample, or all samples of a group")
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sample_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Count


class RunResult(_Record):
    """The content of `result.json`: one finished run, that is one (method, target, seed)."""

    method: str = Field(description="the method's label in the experiment")
    setting: str = Field(
        default="", description="the method's named setting and what differs from it; empty in old records"
    )
    target: str = Field(description="the target domain, or the name of a pair")
    labelled: list[str] = Field(default_factory=list, description="labelled sites, where both sides are measured")
    unlabelled: list[str] = Field(default_factory=list, description="unlabelled sites, likewise")
    seed: int
    metric: Metric = Field(default="accuracy", description="what the fields called accuracy hold, in percent")
    headline: Literal["last"] = Field(default="last", description="the selection rule of the reported number")
    selected: dict[Selection, SelectedRound | None] = Field(description="the round per rule; None if unavailable")
    sites: list[SiteMetrics] = Field(
        default_factory=list, description="further metrics of the last round by site; empty in old records"
    )
    classes: list[str]
    rounds: Count
    seconds: Seconds = Field(description="wall-clock seconds of the whole run")
    mini_batches: Count = Field(description="local mini-batches per site, CSAC's acquisition included")
    bytes_up: dict[str, Count] = Field(default_factory=dict, description="bytes that left the sites, per kind")
    bytes_down: dict[str, Count] = Field(default_factory=dict, description="bytes that reached the sites, per kind")
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
        if self.selected.get(self.headline) is None:
            raise ValueError("selected: the last round is missing")
        return self

    @property
    def guarantee(self) -> str | None:
        """The privacy of the site that paid most, such as "ε ≤ 8.0 at δ = 1e-05"; None: not private."""
        if not self.privacy:
            return None
        most = max(self.privacy.values(), key=lambda one: one.epsilon)
        return f"ε ≤ {math.ceil(most.epsilon * 10 - 1e-9) / 10:.1f} at δ = {most.delta:g}"

    def accuracy(self, select: Selection = "last") -> float | None:
        """Accuracy at the target(s) in the selected round, in percent; None if the rule selected none."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.accuracy

    def source_accuracy(self, select: Selection = "last") -> float | None:
        """Accuracy on the sources' held-out parts in the selected round, in percent; None if not measured."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.source_accuracy

    def score(self, select: Selection = "last") -> float | None:
        """The number that methods are compared by; None if not measured.

        It is the accuracy. Where labelled and unlabelled sites are both measured, it is the harmonic mean of the two.
        """
        at_target, at_source = self.accuracy(select), self.source_accuracy(select)
        if not self.labelled or at_target is None:
            return at_target
        return None if at_source is None else harmonic_mean(at_source, at_target)

    def hausdorff(self, select: Selection = "last") -> float | None:
        """Hausdorff distance in the selected round, in pixels; None if not measured."""
        chosen = self.selected.get(select)
        return None if chosen is None else chosen.hausdorff

    @property
    def targets(self) -> list[SiteMetrics]:
        """What was measured at the target(s) in the last round; empty in old records."""
        return [site for site in self.sites if site.part == "target"]

    def site_metric(self, metric: SiteMetric, select: Selection = "last") -> float | None:
        """Mean over the target(s) in percent; None unless each has it. Only the last round is measured so."""
        values = [site.values.get(metric) for site in self.targets] if select == "last" else []
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None
