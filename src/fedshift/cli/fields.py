"""``fedshift fields`` and ``fedshift models``, and the table of options that other commands print too."""

from __future__ import annotations

from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from fedshift.cli.console import escape, safe_console
from fedshift.errors import UserError, nearest
from fedshift.text import printable, yaml_value


def options_table(kind: type[BaseModel], title: str = "options", without: Collection[str] = ()) -> Table:
    """A table of the fields of ``kind``: default, and meaning with the allowed values if these are a list."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("field", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for field, info in kind.model_fields.items():
        if field not in without:
            default = "required" if info.is_required() else yaml_value(info.get_default(call_default_factory=True))
            meaning, values = Text(printable(info.description or "")), ", ".join(_values(info.annotation))
            if values:
                also = "also" if _takes_others(info.annotation) else "one of"
                meaning.append(f"{'; ' if meaning else ''}{also} {printable(values)}", style="dim")
            table.add_row(field, escape(default), meaning)
    return table


def show_fields(section: str | None) -> None:
    """Print the fields of an experiment's sections of one kind, and of options of a method."""
    from fedshift.data.transforms import Augmentation
    from fedshift.experiment.config.engine_section import ENGINES
    from fedshift.experiment.config.experiment import Evaluation
    from fedshift.experiment.config.search_section import Search, Space
    from fedshift.experiment.protocols.index import PROTOCOLS
    from fedshift.federation.training import Privacy, Training
    from fedshift.methods.composition.averages import AVERAGES
    from fedshift.methods.composition.local import PLUG_INS
    from fedshift.methods.composition.prepare import PREPARATIONS
    from fedshift.methods.robust import RULES
    from fedshift.methods.server import OPTIMIZERS
    from fedshift.models.adapters import Adapters

    sections: dict[str, dict[str, type[BaseModel]]] = {
        "protocol": {f"protocol, kind: {name}": kind for name, kind in PROTOCOLS.items()},
        "training": {
            "training": Training,
            "training.augmentation": Augmentation,
            "training.privacy": Privacy,
            "training.adapters": Adapters,
        },
        "engine": {f"engine, name: {name}": kind for name, kind in ENGINES.items()},
        "evaluation": {"evaluation": Evaluation},
        "search": {"search": Search, "search.spaces, of each field": Space},
        "server": {f"server of a method, optimizer: {name}": kind for name, kind in OPTIMIZERS.items()},
        "average": {f"average of a method, kind: {name}": kind for name, kind in AVERAGES.items()},
        "local": {f"local of a method, name: {name}": kind for name, kind in PLUG_INS.items()},
        "prepare": {f"prepare of a method, name: {name}": kind for name, kind in PREPARATIONS.items()},
        "robust": {f"robust of a method, rule: {name}": kind for name, kind in RULES.items()},
    }
    elsewhere = {"methods": "methods", "data": "datasets", "model": "models"}
    if section in elsewhere:
        raise UserError(f"the fields of {section} depend on its name: call fedshift {elsewhere[section]} NAME")
    if section is not None and section not in sections:
        raise UserError(f"there is no section '{section}'; {nearest(section, sections)}")
    console = safe_console()
    for name, kinds in sections.items():
        for title, kind in kinds.items():
            if section in (None, name):
                console.print(
                    options_table(
                        kind, title, without=("kind", "name", "rule", "optimizer") if name != "training" else ()
                    )
                )
                console.print()


def show_models(name: str | None) -> None:
    """List all networks, or print one network's description and options."""
    from fedshift.models import registry

    console = safe_console()
    if name is None:
        table = Table(box=None, pad_edge=False)
        for column in ("name", "network"):
            table.add_column(column, overflow="fold")
        for known in registry.names():
            table.add_row(known, escape(_summary(registry.options_class(known))))
        console.print(table)
        return
    kind = registry.options_class(name)
    console.print(_summary(kind), markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(options_table(kind, without=("name",)))


def _summary(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _values(annotation: Any) -> list[str]:
    """The allowed values of a field, if its type lists them."""
    if get_origin(annotation) is Literal:
        return [yaml_value(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        return [value for part in get_args(annotation) for value in _values(part)]
    return ["true", "false"] if annotation is bool else []


def _takes_others(annotation: Any) -> bool:
    """Whether a field takes other values beside those that its type lists."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return any(part is not NoneType and not _values(part) for part in parts)
