"""Whether two runs are the same run: the settings that must be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from fedshift.data import registry as data_registry
from fedshift.errors import UserError
from fedshift.experiment.protocols.index import EXTENT, PROTOCOLS
from fedshift.federation.training import SAME_BITS, Training
from fedshift.methods import registry as method_registry
from fedshift.models import registry as model_registry

_NOT_IDENTITY = ("engine", "device", "versions")
_PATHS = ("root", "sites", "file", "tokenizer")
"""Paths of the data. The data themselves are compared by their fingerprint."""


def comparable(settings: Any) -> dict[str, Any]:
    """The settings that must be equal for two runs to be the same run.

    Missing fields get their defaults. A field that a later version adds has as its default what the code did before. So
    runs of an earlier version can be read and resumed.
    """
    identity = {key: value for key, value in dict(settings or {}).items() if key not in _NOT_IDENTITY}
    if isinstance(identity.get("method"), Mapping):
        identity["method"] = _as_today(identity["method"])
    for section, kind in _kinds(identity):
        given = identity[section]
        identity[section] = {**_defaults(kind), **given, **_inner(kind, given)}
    if isinstance(identity.get("method"), Mapping):  # its options are compared, so its name need not be
        identity["method"] = {key: value for key, value in identity["method"].items() if key != "setting"}
    if isinstance(identity.get("training"), Mapping):
        identity["training"] = {key: value for key, value in identity["training"].items() if key not in SAME_BITS}
    if isinstance(identity.get("data"), Mapping):
        identity["data"] = {key: value for key, value in identity["data"].items() if key not in _PATHS}
    return identity


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """``(path, old value, new value)`` of the first setting that differs; None if all are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            below = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            if below is not None:
                return below
        return None
    same = old == new or (path == "data.fingerprint" and _same_data(str(old), str(new)))
    return None if same else (path, old, new)


def _same_data(old: str, new: str) -> bool:
    """Whether two checksums are of the same data. An old one lacks the digits for groups and splits after a dash."""
    pairs = zip(old.split("+"), new.split("+"), strict=False)  # a deployment has one for each site
    return old.count("+") == new.count("+") and all(then in (now, now.partition("-")[0]) for then, now in pairs)


def _as_today(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """A method's options as they are written today: ``styles`` was around another method before ``prepare`` there was.

    Only known names are read: a file in a run's folder must not decide which code is imported.
    """
    inner = method.get("method")
    if (
        method.get("name") != "styles"
        or not isinstance(inner, Mapping)
        or inner.get("name") not in method_registry.METHODS
    ):
        return method
    with suppress(UserError, ValidationError):
        parsed_method = method_registry.parse(method)
        return {"name": parsed_method.name, **parsed_method.model_dump(mode="json", exclude={"training"})}
    return method


def _kinds(identity: Mapping[str, Any]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of ``identity`` and the class of each. A method from a user's file is left out."""
    finders: Mapping[str, Any] = {
        # Only known names: a file in a run's folder must not decide which code is imported.
        "data": lambda section: _known_source(section["name"]),
        "protocol": lambda section: PROTOCOLS[section["kind"]],
        "model": lambda section: model_registry.options_class(section["name"]),
        "training": lambda section: Training,
        "method": lambda section: method_registry.method_class(method_registry.METHODS[section["name"]]),
    }
    for name, find in finders.items():
        if isinstance(identity.get(name), Mapping):
            try:
                yield name, find(identity[name])
            except (UserError, KeyError):
                continue


def _inner(kind: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a section that have fields of their own, with all of these. What cannot be read stays as it is."""
    whole: dict[str, Any] = {}
    for name in kind.model_fields:
        if name not in _PATHS and isinstance(given.get(name), Mapping | list | tuple):
            with suppress(UserError, ValidationError):
                adapter = _adapter(kind, name)
                whole[name] = adapter.dump_python(adapter.validate_python(given[name]), mode="json")
    return whole


@cache
def _adapter(kind: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = kind.model_fields[name]
    option: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(option)


def _known_source(name: str) -> type[BaseModel]:
    if name not in data_registry.names():
        raise KeyError(name)
    return data_registry.source_class(name)


def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in kind.model_fields.items()
        if not field.is_required() and name not in (*_PATHS, *EXTENT)
    }
