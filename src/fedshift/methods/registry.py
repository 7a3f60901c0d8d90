"""Names of the methods and the classes behind them; a module is imported only when its method is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedshift.errors import UserError, nearest
from fedshift.import_paths import import_file
from fedshift.methods.base import Method
from fedshift.methods.catalogue import ENTRIES

METHODS: Mapping[str, str] = {name: entry.place for name, entry in ENTRIES.items()}


def names() -> tuple[str, ...]:
    """Every method that comes with fedshift."""
    return tuple(METHODS)


def method_class(name: str, folder: Path | None = None) -> type[Method]:
    """The class of a method: a known name, ``package.module:Class``, or ``file.py:Class`` (relative to ``folder``).

    Raises UserError, with the nearest known name, when there is no such method.
    """
    place = METHODS.get(name, name)
    module_name, colon, attribute = place.partition(":")
    if not colon:
        raise UserError(f"unknown method '{name}'; {nearest(name, METHODS)}; your own: file.py:Class")
    try:
        module = _own_file(module_name, folder) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"method '{name}' cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        kinds = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
        own = [key for key in kinds if vars(module)[key].__module__ == module.__name__]
        raise UserError(
            f"{module_name} has no method '{attribute}' (a class derived from Method); {nearest(attribute, own)}"
        )
    return found


def parse(
    options: Mapping[str, Any], folder: Path | None = None, permit: Callable[[str], None] | None = None
) -> Method:
    """The method of one entry of ``methods:``. Raises UserError for an unknown name, ValidationError for its fields.

    permit: asked for every name, also of a method behind another one, before anything of it is imported.
    """
    fields = dict(options)
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"a method has no name; {nearest('', METHODS)}")
    if permit is not None:
        permit(name)
    return method_class(name, folder).model_validate(fields, context={"folder": folder, "permit": permit})


def _own_file(path: str, folder: Path | None) -> ModuleType:
    """A person's method file, relative to the experiment file or else to the working directory."""
    beside = (folder or Path()) / path
    return import_file(str(beside if beside.exists() else path))
