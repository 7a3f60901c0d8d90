"""The sections ``protocol`` and ``engine`` of an experiment file: their fields and the checks of these."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fedshift.errors import nearest
from fedshift.evaluation.records import SiteMetric
from fedshift.federation.federation import OnRefusal
from fedshift.federation.messages import known_kinds


class Section(BaseModel):
    """A section of an experiment file. It is immutable and accepts no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SitesPerRound = Annotated[int, Field(strict=True, ge=1)] | Annotated[float, Field(strict=True, gt=0, lt=1)]


class _Protocol(Section):
    """Base of the protocols."""

    kind: str = Field(description="the protocol")
    sites_per_round: SitesPerRound | None = Field(
        None,
        description="sources that are drawn for each round: a number, or a share below 1; none: all take part",
    )

    def drawn(self, sources: int) -> int | None:
        """How many of the ``sources`` of a run are drawn for each round; None: all take part."""
        asked = self.sites_per_round
        return asked if asked is None or isinstance(asked, int) else max(1, round(asked * sources))

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        if self.sites_per_round is None:  # private noise is drawn from the settings, which are those of earlier runs
            written.pop("sites_per_round", None)
        return written


class _OneTarget(_Protocol):
    """Base of the protocols in which each domain in turn is the target."""

    targets: Literal["all"] | tuple[str, ...] = Field("all", description="the domains that are the target in turn")
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] = Field(
        (0, 1, 2), description="one run for each"
    )
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.3, description="share of every source that is held out; 0 trains on everything and cannot select by source"
    )
    split: Literal["auto", "random", "official"] = Field(
        "auto",
        description="official: the data set's own train/test split; random: stratified; auto: official if it exists",
    )
    drop: tuple[str, ...] = Field((), description="domains that do not take part")
    sites_each: PositiveInt = Field(
        1, description="cut every source into so many sites, in a simulation with a single target; 1: not cut"
    )
    cut_by: Literal["chance", "labels"] = Field(
        "chance", description="how sources are cut: by chance, or so that the sites' classes differ"
    )
    label_skew: PositiveFloat = Field(
        0.5, description="cut_by: labels: the smaller, the more the sites' classes differ (Dirichlet)"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: object) -> object:
        return (targets,) if isinstance(targets, str) and targets != "all" else targets

    @field_validator("drop", mode="before")
    @classmethod
    def _one_name(cls, drop: object) -> object:
        return (drop,) if isinstance(drop, str) else drop

    @field_validator("seeds", mode="before")
    @classmethod
    def _one_seed(cls, seeds: object) -> object:
        return (seeds,) if isinstance(seeds, int) else seeds

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed occurs twice")
        return seeds


class LeaveOneOut(_OneTarget):
    """Each chosen domain in turn is unseen; all others are sources. This measures how a model does at a new site."""

    kind: Literal["leave_one_out"] = Field("leave_one_out", description="the protocol")
    base_images: Literal["disjoint", "shared"] = Field(
        "disjoint",
        description="for domains made from the same base samples: measure the target only on base samples that no "
        "source trained on (disjoint), or on all (shared, as the literature seems to do)",
    )


class AdaptToOne(_OneTarget):
    """Each chosen domain in turn trains without labels and is measured on its held-out samples; all others are sources.

    This measures how a model does at a site without labels. The target's labels are used to measure it and to choose
    its held-out samples, a share of every class, as in the literature. No method and no call sees them.
    """

    kind: Literal["adapt_to_one"] = Field("adapt_to_one", description="the protocol")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of every domain that is held out; the target is measured on its held-out samples"
    )
    wrong_labels: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="source → share of its training labels that is replaced by wrong ones"
    )
    wrong_labels_rule: Literal["uniform", "shift"] = Field(
        "uniform",
        description="uniform: wrong labels are drawn from the other classes; shift: the next class (released code)",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = super()._as_before(plain)
        if self.sites_each == 1:  # runs from before sources could be cut here keep their settings
            for name in ("sites_each", "cut_by", "label_skew"):
                written.pop(name, None)
        return written


Names = Annotated[tuple[str, ...], Field(min_length=1)]


class SourceTarget(_Protocol):
    """Labelled and unlabelled sites train together, and both are measured. This shows whether both sides gain.

    Labelled sites are measured on their held-out samples. Unlabelled sites are measured on all their samples, on which
    they train without labels.
    """

    kind: Literal["source_target"] = Field("source_target", description="the protocol")
    pairs: Literal["all"] | Annotated[tuple[tuple[Names, Names], ...], Field(min_length=1)] = Field(
        "all",
        description="pairs [labelled, unlabelled], each side a site or a list; all: every ordered pair of sites",
    )
    splits: PositiveInt = Field(
        10, description="number of random splits of the labelled sites' samples; their seeds are 0, 1, …"
    )
    labelled_test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of a labelled site's samples that is held out to measure it (0.7: the 3:7 split)"
    )

    @field_validator("pairs", mode="before")
    @classmethod
    def _two_sides(cls, pairs: object) -> object:
        if isinstance(pairs, str) or not isinstance(pairs, Sequence):
            return pairs
        return tuple(_pair(pair) for pair in pairs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each split."""
        return tuple(range(self.splits))


def _pair(pair: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labelled, unlabelled) site names.

    Raises:
        ValueError: it is not a pair, a side is empty, or a site occurs twice.
    """
    sides = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
    if len(sides) != 2:
        raise ValueError("a pair is [labelled, unlabelled], such as [a, b] or [[a, b], c]")
    labelled, unlabelled = ((side,) if isinstance(side, str) else tuple(side or ()) for side in sides)
    for names, role in ((labelled, "labelled"), (unlabelled, "unlabelled")):
        if not names:
            raise ValueError(f"a pair has no {role} site; [labelled, unlabelled] needs at least one of each")
    both = [*labelled, *unlabelled]
    twice = next((name for name in both if both.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"site '{twice}' occurs twice in a pair")
    return labelled, unlabelled


Protocol = LeaveOneOut | AdaptToOne | SourceTarget
PROTOCOLS: dict[str, type[Protocol]] = {  # by `kind`
    "leave_one_out": LeaveOneOut,
    "adapt_to_one": AdaptToOne,
    "source_target": SourceTarget,
}
EXTENT = ("targets", "seeds", "pairs", "splits")
"""Fields that say which runs an experiment has. They are not settings of a single run."""


class Evaluation(Section):
    """What is measured with the model of a run's last round, and what is kept of it."""

    headline: SiteMetric = Field(
        "accuracy", description="the measure of the first table and of the page; accuracy: that of the task"
    )
    predictions: bool = Field(
        True, description="keep the scores of every measured sample in each run's predictions.parquet"
    )
    resamples: Annotated[int, Field(ge=0, le=100_000)] = Field(
        1000, description="bootstrap samples of the intervals over samples; large sites use fewer; 0: no intervals"
    )


def _known_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in known_kinds():
            raise ValueError(f"unknown kind '{kind}'; {nearest(kind, known_kinds())}")
    return kinds


# Kinds of content, such as weights.
Kinds = Annotated[tuple[str, ...], AfterValidator(_known_kinds)]


class EngineSection(Section):
    """The fields of all engines."""

    threads: PositiveInt | None = Field(
        None,
        description="threads of each process; none: OMP_NUM_THREADS if set, else the cores divided by the processes",
    )
    refuse: Kinds = Field((), description="kinds of content that all sites refuse to send")
    on_refusal: OnRefusal = Field(
        "stop",
        description="if a site refuses a kind that the method sends: stop ends the run at once; leave_out leaves the "
        "site out of that exchange, as long as engine.quorum allows it",
    )
    quorum: PositiveInt | None = Field(
        None,
        description="sites that must answer an exchange for the run to continue without the others; none: all",
    )

    aggregation: Literal["plain", "secure"] = Field(
        "plain",
        description="secure: the server reads sums of the sites' models and nothing of a single one (docs/privacy.md); "
        "for methods of which it reads sums only",
    )

    routing: Literal["plain", "sealed"] = Field(
        "plain",
        description="sealed: models that the server hands on or keeps and does not read itself (kd3a, fada, shot, "
        "copa) are sealed for the sites that do, and the coordinator cannot read them (docs/privacy.md); a simulation "
        "has the same bits",
    )

    @property
    def sums_only(self) -> bool:
        """Whether the server reads the sites' models only as sums."""
        return self.aggregation == "secure"

    @property
    def identity(self) -> dict[str, str]:
        """The fields on which a run's bits depend, where they are not the default."""
        return {"aggregation": self.aggregation} if self.sums_only else {}

    @property
    def processes(self) -> int:
        """Processes on this machine that train at the same time."""
        return 1

    def thread_count(self) -> int:
        """Threads per process."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return self.threads or (int(asked) if asked.isdecimal() else 0) or max(1, cores // self.processes)


class LocalEngine(EngineSection):
    """All sites on this machine."""

    name: Literal["local"] = Field("local", description="the engine")
    workers: PositiveInt = Field(1, description="worker processes that run the sites of one run")
    parallel_runs: PositiveInt = Field(1, description="runs (method, target, seed) that train at the same time")
    sites: Literal["one_by_one", "side_by_side"] = Field(
        "one_by_one",
        description="side_by_side: all sites of a small mlp train at once in one process; results differ by rounding",
    )
    refuse_at: dict[str, Kinds] = Field(
        default_factory=dict,
        description="site → kinds of content that this site refuses to send (a deployed site has them in SITE.yaml)",
    )

    @model_validator(mode="after")
    def _in_one_process(self) -> Self:
        if self.sites == "side_by_side" and self.workers > 1:
            raise ValueError("sites: side_by_side trains all sites of a run in one process: leave out workers")
        return self

    @property
    def identity(self) -> dict[str, str]:
        return super().identity | ({"sites": self.sites} if self.sites == "side_by_side" else {})

    @property
    def processes(self) -> int:
        return self.workers * self.parallel_runs


class FlareEngine(EngineSection):
    """Sites on machines of their own, through NVIDIA FLARE (`fedshift deploy`)."""

    name: Literal["flare"] = Field("flare", description="the engine")
    deadline: PositiveFloat = Field(3600.0, description="seconds that a site has to answer an exchange")
    patience: PositiveFloat = Field(
        15.0, description="seconds that a site which was lost before has to fetch its next request"
    )
    grace: NonNegativeFloat | None = Field(
        None,
        description="seconds that the other sites are waited for once those of engine.quorum have answered; none: "
        "until the deadline",
    )
    wire: Literal["float32", "bf16", "int8"] = Field(
        "float32", description="how weights are sent: exactly, or rounded, with error feedback in both directions"
    )
    tries: PositiveInt = Field(
        5, description="jobs that may fail in a row without finishing a round before the run fails"
    )
    sites: ClassVar[Literal["one_by_one"]] = "one_by_one"
    workers: ClassVar[int] = 1
    parallel_runs: ClassVar[int] = 1
    refuse_at: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def identity(self) -> dict[str, str]:
        return super().identity | {"wire": self.wire}


Engine = LocalEngine | FlareEngine
ENGINES: dict[str, type[Engine]] = {  # by `name`
    "local": LocalEngine,
    "flare": FlareEngine,
}
