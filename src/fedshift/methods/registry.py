"""Names of the methods and the classes behind them; a module is imported only when its method is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedshift.class_registry import ClassRegistry
from fedshift.methods.base import Method
from fedshift.methods.catalogue import ENTRIES

METHODS: Mapping[str, str] = {name: entry.place for name, entry in ENTRIES.items()}
_CLASSES: ClassRegistry[Method] = ClassRegistry("method", Method, METHODS, own=True)


def names() -> tuple[str, ...]:
    """Every method that comes with fedshift."""
    return _CLASSES.names()


def method_class(name: str, folder: Path | None = None) -> type[Method]:
    """The class of a method.

    Args:
        name: A known name, ``package.module:Class``, or ``file.py:Class``.
        folder: Where a relative file is looked up first; then the working directory.

    Raises:
        UserError: There is no such method; the message has the nearest known name.
    """
    return _CLASSES.find(name, folder=folder)


def parse(
    options: Mapping[str, Any], folder: Path | None = None, permit: Callable[[str], None] | None = None
) -> Method:
    """The method of one entry of ``methods:``.

    Args:
        options: Its name, and its options beside it.
        folder: Where a person's own file is looked up first.
        permit: Called with every name, also of a method in a wrapper, before anything is imported; refuses by
            raising.

    Raises:
        UserError: There is no such method.
        ValidationError: An option is wrong.
    """
    fields = dict(options)
    kind = _CLASSES.find(_CLASSES.name_in(fields, "methods"), folder=folder, permit=permit)
    fields.pop("name")
    return kind.model_validate(fields, context={"folder": folder, "permit": permit})
