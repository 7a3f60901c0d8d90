"""The sections ``protocol`` and ``engine`` of an experiment file: what may stand in them, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

from fedshift.errors import nearest
from fedshift.federation.federation import OnRefusal, known_kinds


class Section(BaseModel):
    """A part of an experiment file: it cannot be changed, and knows no other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _OneTarget(Section):
    """What protocols share in which each domain takes its turn as the target."""

    kind: str = Field(description="the protocol")
    targets: Literal["all"] | tuple[str, ...] = Field("all", description="which domains take their turn as the target")
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] = Field(
        (0, 1, 2), description="one run for each"
    )
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.3, description="share of every source that is held out; 0 trains on everything and cannot select by source"
    )
    split: Literal["auto", "random", "official"] = Field(
        "auto", description="auto: the data set's own train/test parts where it has them, else random and stratified"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: object) -> object:
        return (targets,) if isinstance(targets, str) and targets != "all" else targets

    @field_validator("seeds", mode="before")
    @classmethod
    def _one_seed(cls, seeds: object) -> object:
        return (seeds,) if isinstance(seeds, int) else seeds

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed stands twice")
        return seeds


class LeaveOneOut(_OneTarget):
    """Each chosen domain in turn is unseen, all others are sources: does it work at a new site?"""

    kind: Literal["leave_one_out"] = Field("leave_one_out", description="the protocol")
    base_images: Literal["disjoint", "shared"] = Field(
        "disjoint",
        description="for domains that show the same base samples: test the target only on base samples that no source "
        "trained on (disjoint), or on all of them (shared, as the literature seems to)",
    )


class AdaptToOne(_OneTarget):
    """Each chosen domain in turn gives its training part without labels and is measured on its test part, all others
    are labelled sources: does it work at a site without labels?

    The target's own labels measure it, and say which of its samples are held out: a share of every class, as in the
    literature. No method and no call sees them.
    """

    kind: Literal["adapt_to_one"] = Field("adapt_to_one", description="the protocol")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of every domain that is held out; the target is measured on its own"
    )
    drop: tuple[str, ...] = Field((), description="domains that take no part (domain drop)")
    wrong_labels: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="share of a source's training labels that is made wrong, by source"
    )
    wrong_labels_rule: Literal["uniform", "shift"] = Field(
        "uniform", description="a wrong label is drawn from the other classes, or is the next class (released code)"
    )

    @field_validator("drop", mode="before")
    @classmethod
    def _one_name(cls, drop: object) -> object:
        return (drop,) if isinstance(drop, str) else drop


Names = Annotated[tuple[str, ...], Field(min_length=1)]


class SourceTarget(Section):
    """Some sites have labels and some have not, and both are measured: labelled ones on the part of their samples that
    is held out, unlabelled ones on all their samples, which they train on without labels. Does everybody win?
    """

    kind: Literal["source_target"] = Field("source_target", description="the protocol")
    pairs: Literal["all"] | Annotated[tuple[tuple[Names, Names], ...], Field(min_length=1)] = Field(
        "all",
        description="[labelled, unlabelled] each, a site or a list of sites on either side; all: every ordered pair",
    )
    splits: PositiveInt = Field(10, description="how often the labelled sites' samples are parted; seeds 0, 1, …")
    labelled_test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of a labelled site's samples that is held out to measure it on (0.7: the 3:7 split)"
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
    """(labelled, unlabelled) site names. Raises ValueError when one side is empty or a site has no or two roles."""
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
        raise ValueError(f"site '{twice}' stands twice in a pair")
    return labelled, unlabelled


Protocol = LeaveOneOut | AdaptToOne | SourceTarget
PROTOCOLS: dict[str, type[Protocol]] = {  # by `kind`
    "leave_one_out": LeaveOneOut,
    "adapt_to_one": AdaptToOne,
    "source_target": SourceTarget,
}
EXTENT = ("targets", "seeds", "pairs", "splits")
"""Which runs an experiment has; not a property of one of its runs."""


def _known_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in known_kinds():
            raise ValueError(f"unknown kind '{kind}'; {nearest(kind, known_kinds())}")
    return kinds


# Kinds of content, such as weights.
Kinds = Annotated[tuple[str, ...], AfterValidator(_known_kinds)]


class EngineSection(Section):
    """What all engines have."""

    threads: PositiveInt | None = Field(
        None,
        description="threads of each process; none = OMP_NUM_THREADS where that is set, else the cores divided by the "
        "processes",
    )
    refuse: Kinds = Field((), description="kinds of content that no site lets out")
    on_refusal: OnRefusal = Field(
        "stop",
        description="where one site's policy refuses a kind that a method sends: end the run at once (stop), or leave "
        "the site out of that exchange as long as engine.quorum allows (leave_out)",
    )
    quorum: PositiveInt | None = Field(
        None, description="sites that must answer an exchange for the run to go on without the others; none = all"
    )

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
    workers: PositiveInt = Field(1, description="processes that the sites of one run are spread over")
    parallel_runs: PositiveInt = Field(1, description="runs (method, target, seed) that go on at the same time")
    refuse_at: dict[str, Kinds] = Field(
        default_factory=dict,
        description="kinds of content that single sites do not let out, by site (deployed sites say it in SITE.yaml)",
    )

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
    wire: Literal["float32", "bf16", "int8"] = Field(
        "float32", description="how weights cross: as they are, or rounded, with error feedback both ways"
    )
    tries: PositiveInt = Field(5, description="jobs that may die without finishing a round before the run is given up")
    workers: ClassVar[int] = 1
    parallel_runs: ClassVar[int] = 1
    refuse_at: ClassVar[Mapping[str, tuple[str, ...]]] = {}


Engine = LocalEngine | FlareEngine
ENGINES: dict[str, type[Engine]] = {  # by `name`
    "local": LocalEngine,
    "flare": FlareEngine,
}
