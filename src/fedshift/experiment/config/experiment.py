"""Reads and checks the experiment file. Every mistake is an error of one line, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, SerializeAsAny, ValidationError

from fedshift.data import registry as data_registry
from fedshift.data.checks import names_alike
from fedshift.data.domain import DataSource
from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import SiteMetric
from fedshift.experiment.config.data_section import data_name, data_source, own_file_record
from fedshift.experiment.config.engine_section import ENGINES, Engine, EngineSection, FlareEngine, LocalEngine
from fedshift.experiment.config.error_messages import check_booleans, describe
from fedshift.experiment.config.experiment_file import NAME, read, with_name
from fedshift.experiment.config.search_section import Search
from fedshift.experiment.protocols.base import ProtocolSection
from fedshift.experiment.protocols.index import PROTOCOLS, Protocol
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.federation.local.cards import Device
from fedshift.federation.training import Training
from fedshift.methods import registry as method_registry
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.methods.symbols import with_names
from fedshift.models import registry as model_registry
from fedshift.models.network_options import NetworkOptions
from fedshift.models.networks.frozen import Frozen
from fedshift.models.own import own_network
from fedshift.section import Section


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


class Experiment(Section):
    """The content of an experiment file."""

    name: str = Field(description="names the folder of the runs")
    data: SerializeAsAny[DataSource] = Field(description="the data set: its name and its options")
    protocol: Protocol = Field(
        default_factory=LeaveOneOut, discriminator="kind", description="targets, seeds, and what is held out"
    )
    model: SerializeAsAny[NetworkOptions] = Field(description="the network: its name and its options")
    training: Training = Field(default_factory=Training, description="how long and how sites train")
    methods: tuple[SerializeAsAny[Method], ...] = Field(description="the methods to compare, each with its options")
    engine: Engine = Field(
        default_factory=LocalEngine, discriminator="name", description="what runs the sites, and how they exchange"
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="what is measured and kept")
    search: Search | None = Field(None, description="what fedshift search draws, and who chooses")
    device: Device = Field(
        "auto", description="auto, cpu, cuda, cuda:1, mps …; all: every CUDA card; or a list: [cuda:0, cuda:1]"
    )

    def dump(self) -> dict[str, Any]:
        """The experiment as plain data, with every default written out."""
        out = self.model_dump(mode="json")
        out["data"]["name"] = data_name(self.data)
        if self.search is None:
            del out["search"]
        out["methods"] = [{"name": method_name(method), **method.model_dump(mode="json")} for method in self.methods]
        return out


def method_name(method: Method) -> str:
    """The name by which the registry finds the method's class on this machine."""
    known = method_registry.METHODS.get(method.name)
    class_path: str = method.calls.recipe()["class"]
    return method.name if known == class_path else class_path


def method_record(method: Method) -> dict[str, Any]:
    """The method's options, for results and model files.

    They hold no path of this machine. A user's own file is named by its file name and checksum. How the method trains
    is in the run's training section.
    """
    return {
        **own_file_record(method_name(method), type(method)),
        **method.model_dump(mode="json", exclude={"training"}),
    }


def data_record(source: DataSource) -> dict[str, Any]:
    """The fields of a data source, for results. A user's own file is named by its file name and checksum."""
    record = source.model_dump(mode="json")
    if not data_registry.is_own(source):
        return record
    kept = {name: value for name, value in record.items() if name not in source.paths()}
    return {**kept, **own_file_record(data_name(source), type(source))}


def parse(options: Mapping[str, Any], folder: Path | None = None) -> Experiment:
    """The experiment of a mapping with the fields of `Experiment`.

    ``folder``: relative paths are relative to this folder; by default the working directory. UserError if the
    experiment cannot run. The message is one line with the path of the field.
    """
    if not isinstance(options, Mapping):
        raise UserError("an experiment is a mapping of name, data, protocol, model, training, methods, engine, device")
    fields: dict[str, Any] = {"name": "experiment", **options}
    _check_fields(fields)
    for section, parsed in _SECTIONS.items():
        if section in fields:
            fields[section] = parsed(fields[section], folder or Path())
    try:
        experiment = Experiment(**fields)
    except ValidationError as error:
        raise UserError(describe(error, "", Experiment)) from None
    for method in experiment.methods:
        experiment.protocol.check_method(method)
    _check_engine(experiment)
    check_training(experiment)
    return experiment


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise UserError where a field is not known or missing, or the name cannot name a folder."""
    for name in fields:
        if name not in Experiment.model_fields:
            raise UserError(f"{name}: there is no such field; {nearest(str(name), Experiment.model_fields)}")
    for name in ("data", "model", "methods"):
        if name not in fields:
            raise UserError(f"{name}: this section is missing from the experiment")
    name = fields["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"name: '{name}' cannot name a folder: use letters, digits, '-', '_' and '.' only")


def _check_engine(experiment: Experiment) -> None:
    """Raise UserError where fields of the engine contradict each other, or what it has to run."""
    if experiment.engine.on_refusal == "leave_out" and experiment.engine.quorum is None:
        raise UserError(
            "engine.on_refusal: leave_out needs engine.quorum, the fewest sites that must answer an exchange"
        )
    engine = experiment.engine
    if isinstance(engine, FlareEngine) and engine.grace is not None and engine.quorum is None:
        raise UserError("engine.grace: it begins when those of engine.quorum have answered; set engine.quorum, too")
    if isinstance(engine, FlareEngine) and experiment.protocol.cuts_sources:
        raise UserError("protocol.sites_each, pool: a deployed site keeps its samples together; leave both out")
    if own_network.is_given(experiment.model) and (engine.processes > 1 or isinstance(engine, FlareEngine)):
        raise UserError(
            "model: it was given as an object, which other processes cannot make; name it file.py:Class, or leave out "
            "engine.workers and engine.parallel_runs"
        )


def check_training(experiment: Experiment) -> None:
    """Check that the training sections, the experiment's and those of its methods, agree in themselves and with the
    network.

    UserError if they do not.
    """
    _check_one_training(experiment, experiment.training, "training")
    for number, method in enumerate(experiment.methods):
        if method.training is not None:
            path = f"methods[{number}] ({method.name}).training"
            try:
                training = training_of(method, experiment.training)
            except ValidationError as error:
                raise UserError(describe(error, path, Training)) from None
            _check_one_training(experiment, training, path)


def _check_one_training(experiment: Experiment, training: Training, path: str) -> None:
    if isinstance(experiment.model, Frozen) and not training.augmentation.is_identity:
        raise UserError(
            f"{path}.augmentation: a frozen backbone processes every image once, so images cannot be augmented; "
            "leave it out"
        )
    if training.optimizer == "sgd" and training.nesterov and training.momentum == 0:
        raise UserError(f"{path}.nesterov: needs {path}.momentum above 0")


def _plain_section(kind: type[BaseModel], path: str) -> Callable[[Any, Path], BaseModel | None]:
    def read_section(value: Any, folder: Path) -> BaseModel | None:
        whole = isinstance(value, kind) or (value is None and path == "search")
        return value if whole else _section(kind, value, path)

    return read_section


def _section(kind: type[BaseModel], value: Any, path: str) -> BaseModel:
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping of fields, not {value!r}; {nearest('', kind.model_fields)}")
    check_booleans(value, path, kind)
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise UserError(describe(error, path, kind)) from None
    except UserError as error:  # an unknown name inside the section
        raise UserError(f"{path}: {error}") from None


def _protocol(value: Any, folder: Path) -> BaseModel:
    if isinstance(value, ProtocolSection):
        return value
    kind = value.get("kind", "leave_one_out") if isinstance(value, Mapping) else "leave_one_out"
    if not isinstance(kind, str) or kind not in PROTOCOLS:
        raise UserError(f"protocol.kind: there is no protocol '{kind}'; {nearest(str(kind), PROTOCOLS)}")
    return _section(PROTOCOLS[kind], value, "protocol")


def _engine(value: Any, folder: Path) -> BaseModel:
    if isinstance(value, EngineSection):
        return value
    name = value.get("name", "local") if isinstance(value, Mapping) else "local"
    if not isinstance(name, str) or name not in ENGINES:
        raise UserError(f"engine.name: there is no engine '{name}'; {nearest(str(name), ENGINES)}")
    return _section(ENGINES[name], value, "engine")


def _model(value: Any, folder: Path) -> NetworkOptions:
    if isinstance(value, NetworkOptions):
        return value
    if own_network.is_object(value):
        return own_network.network_of_object(value)
    return model_registry.parse(with_name(value, "model"), folder, model_registry.any_code)


def _methods(value: Any, folder: Path) -> tuple[Method, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError("methods: must be a list of at least one method, such as [{name: fedavg}]")
    methods = tuple(_method(item, f"methods[{number}]", folder) for number, item in enumerate(value))
    labels = [method.display for method in methods]
    for label in labels:
        if not re.fullmatch(r"[\w.+-]+", label) or label.startswith("."):
            raise UserError(
                f"methods: '{label}' cannot name a folder: set label, with letters, digits, '-', '_', '+' and '.' only"
            )
        if labels.count(label) > 1:
            raise UserError(f"methods: '{label}' occurs twice: give each its own label")
    alike = names_alike(labels)
    if alike is not None:
        raise UserError(
            f"methods: '{alike[0]}' and '{alike[1]}' differ in capitals or Unicode form only, and their folders may "
            "collide: give one another label"
        )
    return methods


def _method(value: Any, path: str, folder: Path) -> Method:
    if isinstance(value, Method):
        return value
    fields = with_name(value, path)
    try:
        method = method_registry.parse(fields, folder)
        check_booleans(with_names(type(method), fields), f"{path} ({method.name})", type(method))
        return method
    except ValidationError as error:
        kind = method_registry.method_class(str(fields["name"]), folder)
        raise UserError(describe(error, f"{path} ({kind.name})", kind)) from None
    except (ValueError, TypeError, SyntaxError) as error:  # raised by the import of a user's own file
        raise UserError(f"{path}: method '{fields['name']}' cannot be imported: {error}") from error


_SECTIONS: Mapping[str, Callable[[Any, Path], Any]] = {
    "data": data_source,
    "model": _model,
    "methods": _methods,
    "protocol": _protocol,
    "training": _plain_section(Training, "training"),
    "evaluation": _plain_section(Evaluation, "evaluation"),
    "engine": _engine,
    "search": _plain_section(Search, "search"),
}
"""How each section is read, in the order of the messages; relative paths are relative to the folder."""


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file.

    ``overrides``: fields to set, as ``key.path=value``. UserError if the file cannot be read, or as in `parse`.
    """
    return parse(read(path, overrides), path.parent)
