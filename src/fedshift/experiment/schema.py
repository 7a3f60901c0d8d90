"""The experiment file: what a person may write, checked before anything runs, with errors of one line."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    field_validator,
)

from fedshift.data import registry as data_registry
from fedshift.data.domain import DataSource
from fedshift.errors import UserError, nearest
from fedshift.experiment.describe import describe, suggest_field
from fedshift.federation.federation import OnRefusal, known_kinds
from fedshift.federation.training import Training
from fedshift.methods import registry as method_registry
from fedshift.methods.base import Method
from fedshift.models import registry as model_registry
from fedshift.models.frozen import Frozen
from fedshift.models.options import NetworkOptions


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _OneTarget(_Section):
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


class SourceTarget(_Section):
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
PROTOCOLS: dict[str, type[Protocol]] = {
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


Kinds = Annotated[tuple[str, ...], AfterValidator(_known_kinds)]


class _Engine(_Section):
    """What all engines have."""

    threads: PositiveInt | None = Field(
        None, description="threads of each process; none = the cores divided by the processes"
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
        return self.threads or max(1, cores // self.processes)


class LocalEngine(_Engine):
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


class FlareEngine(_Engine):
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
ENGINES: dict[str, type[Engine]] = {"local": LocalEngine, "flare": FlareEngine}


class Experiment(_Section):
    """Everything an experiment is: one file, checked as a whole."""

    name: str = Field(description="names the folder of the runs")
    data: SerializeAsAny[DataSource]
    protocol: Protocol = Field(default_factory=LeaveOneOut, discriminator="kind")
    model: SerializeAsAny[NetworkOptions]
    training: Training = Field(default_factory=Training)
    methods: tuple[SerializeAsAny[Method], ...]
    engine: Engine = Field(default_factory=LocalEngine, discriminator="name")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps …")

    def dump(self) -> dict[str, Any]:
        """As plain data with every default written out."""
        out = self.model_dump(mode="json")
        out["methods"] = [{"name": method_name(method), **method.model_dump(mode="json")} for method in self.methods]
        return out


_PARTS: dict[str, type[BaseModel]] = {"training": Training}


def method_name(method: Method) -> str:
    """The name under which the registry finds the method's class again, on this machine."""
    known = method_registry.METHODS.get(method.name)
    place: str = method.recipe()["class"]
    return method.name if known == place else place


def method_record(method: Method) -> dict[str, Any]:
    """A method as results and model files name it: no path of this machine, an own file by its name and checksum."""
    name = method_name(method)
    file, _, kind = name.rpartition(":")
    if not file.endswith(".py"):
        return {"name": name, **method.model_dump(mode="json")}
    module = sys.modules[type(method).__module__]
    checksum = getattr(module, "__sha256__", None) or hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {"name": f"{Path(file).name}:{kind}", "sha256": checksum, **method.model_dump(mode="json")}


def parse(options: Mapping[str, Any], folder: Path | None = None) -> Experiment:
    """The experiment that ``options`` describe; relative paths are below ``folder``.

    Raises UserError, one line with the path of the field, for anything that cannot be run.
    """
    if not isinstance(options, Mapping):
        raise UserError("an experiment is a mapping of name, data, protocol, model, training, methods, engine, device")
    fields = dict(options)
    for name in fields:
        if name not in Experiment.model_fields:
            raise UserError(f"{name}: there is no such field; {nearest(str(name), Experiment.model_fields)}")
    for name in ("data", "model", "methods"):
        if name not in fields:
            raise UserError(f"{name}: is missing from the experiment")
    name = fields.get("name", "experiment")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise UserError(f"name: '{name}' names a folder: letters, digits, '-', '_' and '.' only")
    fields["name"] = name
    fields["data"] = data_source(fields["data"], folder or Path())
    fields["model"] = _model(fields["model"])
    fields["methods"] = _methods(fields["methods"], folder or Path())
    if "protocol" in fields and not isinstance(fields["protocol"], Protocol):
        fields["protocol"] = _protocol(fields["protocol"])
    for part, kind in _PARTS.items():
        if part in fields and not isinstance(fields[part], kind):
            fields[part] = _section(kind, fields[part], part)
    if "engine" in fields and not isinstance(fields["engine"], _Engine):
        fields["engine"] = _engine(fields["engine"])
    try:
        experiment = Experiment(**fields)
    except ValidationError as error:
        raise UserError(describe(error, "", Experiment)) from None
    for method in experiment.methods:
        if method.needs_target and isinstance(experiment.protocol, LeaveOneOut):
            raise UserError(
                f"methods: {method.display} adapts to a target that takes part without labels; write protocol: "
                "{kind: adapt_to_one, …} or source_target"
            )
        pairs = experiment.protocol.pairs if isinstance(experiment.protocol, SourceTarget) else "all"
        if method.one_target and pairs != "all" and any(len(unlabelled) > 1 for _, unlabelled in pairs):
            raise UserError(
                f"methods: {method.display} adapts to one target; protocol.pairs has a pair with several unlabelled "
                "sites, which only methods for several can train on, such as mdfnet"
            )
    if experiment.engine.on_refusal == "leave_out" and experiment.engine.quorum is None:
        raise UserError(
            "engine.on_refusal: leave_out needs engine.quorum, the fewest sites that must answer an exchange"
        )
    training = experiment.training
    if isinstance(experiment.model, Frozen) and not training.augmentation.is_identity:
        raise UserError(
            "training.augmentation: a frozen backbone sees every image once, so images cannot change; leave it out"
        )
    if training.optimizer == "sgd" and training.nesterov and training.momentum == 0:
        raise UserError("training.nesterov: needs training.momentum above 0")
    return experiment


def _section(kind: type[BaseModel], value: Any, path: str) -> BaseModel:
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping of fields, not {value!r}; {nearest('', kind.model_fields)}")
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise UserError(describe(error, path, kind)) from None
    except UserError as error:  # a name inside the section that is not known
        raise UserError(f"{path}: {error}") from None


def _protocol(value: Any) -> BaseModel:
    kind = value.get("kind", "leave_one_out") if isinstance(value, Mapping) else "leave_one_out"
    if not isinstance(kind, str) or kind not in PROTOCOLS:
        raise UserError(f"protocol.kind: there is no protocol '{kind}'; {nearest(str(kind), PROTOCOLS)}")
    return _section(PROTOCOLS[kind], value, "protocol")


def _engine(value: Any) -> BaseModel:
    name = value.get("name", "local") if isinstance(value, Mapping) else "local"
    if not isinstance(name, str) or name not in ENGINES:
        raise UserError(f"engine.name: there is no engine '{name}'; {nearest(str(name), ENGINES)}")
    return _section(ENGINES[name], value, "engine")


def _named(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping with a name, not {value!r}")
    return dict(value)


def data_source(value: Any, folder: Path) -> DataSource:
    """The builder of a ``data:`` section; relative paths are below ``folder``. Raises UserError as `parse`."""
    if isinstance(value, DataSource):
        return value
    fields = _named(value, "data")
    for name in ("root", "sites"):
        if name in fields:
            fields[name] = _below(fields[name], folder)
    if isinstance(fields.get("unseen"), Mapping):  # the coordinator's own set, beside data at sites
        own = dict(fields["unseen"])
        fields["unseen"] = own | {name: _below(own[name], folder) for name in ("root", "sites") if name in own}
    try:
        return data_registry.parse(fields)
    except ValidationError as error:
        raise UserError(describe(error, "data", data_registry.source_class(str(fields.get("name"))))) from None


def _below(value: Any, folder: Path) -> Any:
    """Paths of an experiment file are relative to that file."""
    if isinstance(value, Mapping):
        return {key: _below(item, folder) for key, item in value.items()}
    if not isinstance(value, str | Path):
        return value
    path = Path(value).expanduser()
    beside = folder / path
    return str(beside if path.is_absolute() or beside.exists() or not path.exists() else path)


def _model(value: Any) -> NetworkOptions:
    if isinstance(value, NetworkOptions):
        return value
    return model_registry.parse(_named(value, "model"))


def _methods(value: Any, folder: Path) -> tuple[Method, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError("methods: must be a list of at least one method, such as [{name: fedavg}]")
    methods = tuple(_method(item, f"methods[{number}]", folder) for number, item in enumerate(value))
    labels = [method.display for method in methods]
    for label in labels:
        if not re.fullmatch(r"[\w.+-]+", label) or label.startswith("."):
            raise UserError(
                f"methods: '{label}' names a folder: letters, digits, '-', '_', '+' and '.' only; set label"
            )
        if labels.count(label) > 1:
            raise UserError(f"methods: '{label}' stands twice: give each its own label")
    return methods


def _method(value: Any, path: str, folder: Path) -> Method:
    if isinstance(value, Method):
        return value
    fields = _named(value, path)
    try:
        return method_registry.parse(fields, folder)
    except ValidationError as error:
        kind = method_registry.method_class(str(fields["name"]), folder)
        raise UserError(describe(error, f"{path} ({kind.name})", kind)) from None
    except (ValueError, TypeError, SyntaxError) as error:  # from importing what the name says
        raise UserError(f"{path}: method '{fields['name']}' cannot be imported: {error}") from error


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file with ``key.path=value`` overrides applied. Raises UserError as `parse` does."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UserError(f"cannot read the experiment file {path}: {reason}") from None
    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where} is not YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from None
    if not isinstance(options, dict):
        raise UserError(f"{path}: an experiment file is a mapping of name, data, protocol, model, training, methods …")
    for override in overrides:
        override_field(options, override)
    options.setdefault("name", path.stem)
    return parse(options, path.parent)


def override_field(options: dict[str, Any], override: str) -> None:
    """Apply ``key.path=value`` to raw options in place. The value is YAML; a list takes a number, methods also a label.

    Raises UserError for a malformed override or an unknown path.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"override '{override}' is not of the form key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override '{override}': the value is not YAML") from None
    keys = path.split(".")
    if keys[0] not in Experiment.model_fields:
        raise UserError(f"override '{path}': there is no such field; {nearest(keys[0], Experiment.model_fields)}")
    place: Any = options
    for number, key in enumerate(keys):
        last = number == len(keys) - 1
        where = ".".join(keys[: number + 1])
        if isinstance(place, list):
            index = _index(place, key, where)
            if last:
                place[index] = value
            else:
                place[index] = _named(place[index], where)
                place = place[index]
        elif last:
            place[key] = value
        else:
            if isinstance(place.get(key), str) and key in ("data", "model"):
                place[key] = {"name": place[key]}
            if place.setdefault(key, {}) is None:
                place[key] = {}
            place = place[key]
            if not isinstance(place, dict | list):
                raise UserError(f"override '{path}': {where} is not a mapping; {suggest_field(path)}")


def _index(items: list[Any], key: str, where: str) -> int:
    if key.isdecimal():
        if int(key) < len(items):
            return int(key)
        raise UserError(f"override '{where}': the list has {len(items)} entries")
    labels = [str(item.get("label") or item.get("name")) if isinstance(item, dict) else str(item) for item in items]
    if key not in labels:
        raise UserError(f"override '{where}': no entry is called '{key}'; {nearest(key, labels)}")
    return labels.index(key)
