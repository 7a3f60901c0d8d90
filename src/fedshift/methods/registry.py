"""The methods by name. A method's module is imported only when the method is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from fedshift.class_registry import ClassRegistry
from fedshift.errors import UserError
from fedshift.methods.base import Method
from fedshift.methods.index import ENTRIES
from fedshift.methods.settings import PAPER, with_setting
from fedshift.trust import own_module

METHODS: Mapping[str, str] = {name: entry.class_path for name, entry in ENTRIES.items()}


def _as_option(name: str) -> str:
    """How a method is written that is an option of others here, such as FedAdam, Mixup or a median; else ""."""
    from fedshift.methods.composition.averages import AVERAGES
    from fedshift.methods.composition.local import PLUG_INS
    from fedshift.methods.robust import RULES
    from fedshift.methods.server import OPTIMIZERS

    plain = name.lower().removeprefix("fed").strip("_-")
    for option, kinds in {"server": OPTIMIZERS, "robust": RULES, "average": AVERAGES}.items():
        if plain in kinds:
            return f"write {{name: fedavg, {option}: {plain}}}; "
    return f"write {{name: fedavg, local: [{plain}]}}; " if plain in PLUG_INS else ""


_CLASSES: ClassRegistry[Method] = ClassRegistry("method", Method, METHODS, elsewhere=_as_option, own_module=own_module)


def names() -> tuple[str, ...]:
    """Every method that comes with fedshift."""
    return _CLASSES.names()


def method_class(name: str, folder: Path | None = None) -> type[Method]:
    """The class of a method.

    ``name``: a known name, ``package.module:Class``, or ``file.py:Class``. ``folder``: where a relative file is looked
    up first. The working directory is next. Raises UserError: there is no such method; the message has the nearest
    known name.
    """
    return _CLASSES.find(name, folder=folder)


def parse(
    options: Mapping[str, Any], folder: Path | None = None, permit: Callable[[str], None] | None = None
) -> Method:
    """The method of one entry of ``methods:``.

    ``folder``: where a user's own file is looked up first. ``permit``: called with every name before anything is
    imported. It raises to refuse. Raises UserError: there is no such method. Raises ValidationError: an option is
    wrong.
    """
    if options.get("name") == "styles" and "method" in options:
        return _with_preparation(options, folder, permit)
    fields = dict(options)
    kind = _CLASSES.find(_CLASSES.name_in(fields, "methods"), folder=folder, permit=permit)
    fields.pop("name")
    return kind.model_validate(fields, context={"folder": folder, "permit": permit})


def _with_preparation(options: Mapping[str, Any], folder: Path | None, permit: Callable[[str], None] | None) -> Method:
    """Before ``prepare`` there was, ``styles`` was a method around another one: the other one, prepared.

    It keeps its name in tables and folders, so that results of that time still belong to it.
    """
    from fedshift.methods.composition.options import Composed, composition_of
    from fedshift.methods.composition.styles import SETTINGS, StyleOptions

    inner: Any = {"name": options["method"]} if isinstance(options["method"], str) else options["method"]
    if not isinstance(inner, Mapping):
        raise UserError("methods: styles.method: must be the name of a method, or a mapping with name and options")
    setting = options.get("setting", PAPER)
    styles = {name: options[name] for name in StyleOptions.model_fields if name in options}
    usual = {name: to_jsonable_python(field.get_default()) for name, field in Composed.model_fields.items()}
    beside = {
        name: value
        for name, value in options.items()
        if name not in ("name", "method", "label", "setting", *styles) and usual.get(name, ...) != value
    }
    prepare = {**with_setting(SETTINGS, {**styles, "setting": setting}), "name": "styles"}
    del prepare["setting"]
    method = parse({**inner, **beside, "prepare": prepare, "label": None}, folder, permit)
    display = "styles" if setting == PAPER else f"styles-{setting}"
    label = options.get("label") or "+".join((display, *composition_of(method)[1:]))
    return method.model_copy(update={"label": label})
