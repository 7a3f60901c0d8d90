"""The section ``engine`` of an experiment file: its fields and the checks of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fedshift.errors import nearest
from fedshift.federation.federation import OnRefusal
from fedshift.federation.messages import known_kinds
from fedshift.section import Section


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
        le=1024,
        description="threads of each process; none: OMP_NUM_THREADS if set, else the cores divided by the processes",
    )
    refuse: Kinds = Field((), description="kinds of content that all sites refuse to send")
    on_refusal: OnRefusal = Field(
        "stop",
        description="if a site refuses a kind that the method sends: stop ends the run at once; leave_out leaves the "
        "site out of that exchange, as long as engine.quorum allows it",
    )
    quorum: PositiveInt | None = Field(
        None, description="sites that must answer an exchange for the run to continue without the others; none: all"
    )

    aggregation: Literal["plain", "secure"] = Field(
        "plain",
        description="secure: the server reads sums of the sites' models; docs/privacy.md says from whom "
        "these hide a model; for methods of which it reads sums only",
    )

    routing: Literal["plain", "sealed"] = Field(
        "plain",
        description="sealed: models that the server hands on or keeps and does not read itself (kd3a, fada, shot, "
        "copa) are sealed for the sites that do, and the coordinator cannot read them (docs/sealed_models.md); a "
        "simulation has the same bits",
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

    def thread_count(self, cores: int | None = None) -> int:
        """Threads per process, which share ``cores``; None: those that this process may use."""
        if cores is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return self.threads or (int(asked) if asked.isdecimal() else 0) or max(1, cores // self.processes)


class LocalEngine(EngineSection):
    """All sites on this machine."""

    name: Literal["local"] = Field("local", description="the engine")
    workers: PositiveInt = Field(1, description="worker processes that run the sites of one run")
    parallel_runs: PositiveInt = Field(1, description="runs (method, target, seed) that train at the same time")
    sites: Literal["one_by_one", "side_by_side", "auto"] = Field(
        "one_by_one",
        description="side_by_side: the sites of a network without BatchNorm train at once in one process; auto: where "
        "that is faster; results differ by rounding",
    )
    refuse_at: dict[str, Kinds] = Field(
        default_factory=dict,
        description="site → kinds of content that this site refuses to send (a deployed site has them in SITE.yaml)",
    )

    @model_validator(mode="after")
    def _in_one_process(self) -> Self:
        if self.sites != "one_by_one" and self.workers > 1:
            raise ValueError(f"sites: {self.sites} trains all sites of a run in one process: leave out workers")
        return self

    @property
    def identity(self) -> dict[str, str]:
        return super().identity | ({"sites": self.sites} if self.sites != "one_by_one" else {})

    @property
    def processes(self) -> int:
        return self.workers * self.parallel_runs


class RayEngine(EngineSection):
    """The nodes and cards of a cluster of Ray, which share a folder."""

    name: Literal["ray"] = Field("ray", description="the engine")
    address: str = Field(
        "local", min_length=1, description="of the cluster's head, host:port or auto; local: this machine alone"
    )
    parallel_runs: NonNegativeInt = Field(
        0, description="runs (method, target, seed) that train at the same time; 0: as many as have room"
    )
    workers: PositiveInt = Field(
        1, description="processes of the cluster that share the sites of one run; runs then follow one another"
    )
    cards: NonNegativeFloat = Field(0, description="cards of each process: a number, or a share of one below 1")
    wait: PositiveFloat = Field(3600.0, description="seconds without any answer of the cluster after which a run fails")
    refuse_at: dict[str, Kinds] = Field(
        default_factory=dict, description="site → kinds of content that this site refuses to send"
    )
    sites: ClassVar[Literal["one_by_one"]] = "one_by_one"

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.workers > 1 and self.parallel_runs:
            raise ValueError("workers share the sites of one run, parallel_runs the runs: leave one of them out")
        if self.cards > 1 and self.cards != int(self.cards):
            raise ValueError("cards: more than one card is a whole number")
        return self

    def thread_count(self, cores: int | None = None) -> int:
        """Threads per process: one where nothing is said, since other machines have other numbers of cores."""
        return self.threads or 1

    @property
    def processes(self) -> int:
        return max(2, self.workers * (self.parallel_runs or 1))


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


Engine = LocalEngine | RayEngine | FlareEngine
ENGINES: dict[str, type[Engine]] = {  # by `name`
    "local": LocalEngine,
    "ray": RayEngine,
    "flare": FlareEngine,
}
