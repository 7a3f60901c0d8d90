"""The methods by name. A method's module is imported only when the method is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedshift.class_registry import ClassRegistry
from fedshift.methods.base import Method
from fedshift.methods.index import ENTRIES

METHODS: Mapping[str, str] = {name: entry.place for name, entry in ENTRIES.items()}


def _as_option(name: str) -> str:
    """How a method is written that is an option of others here, such as FedAdam, Mixup or a median; else ""."""
    from fedshift.methods.composition.averaging import AVERAGES
    from fedshift.methods.composition.local import PLUG_INS
    from fedshift.methods.robust import RULES
    from fedshift.methods.server import OPTIMIZERS

    plain = name.lower().removeprefix("fed").strip("_-")
    for option, kinds in {"server": OPTIMIZERS, "robust": RULES, "average": AVERAGES}.items():
        if plain in kinds:
            return f"write {{name: fedavg, {option}: {plain}}}; "
    return f"write {{name: fedavg, local: [{plain}]}}; " if plain in PLUG_INS else ""


_CLASSES: ClassRegistry[Method] = ClassRegistry("method", Method, METHODS, elsewhere=_as_option, own=True)


def names() -> tuple[str, ...]:
    """Every method that comes with fedshift."""
    return _CLASSES.names()


def method_class(name: str, folder: Path | None = None) -> type[Method]:
    """The class of a method.

    Args:
        name: a known name, ``package.module:Class``, or ``file.py:Class``.
        folder: where a relative file is looked up first. The working directory is next.

    Raises:
        UserError: there is no such method; the message has the nearest known name.
    """
    return _CLASSES.find(name, folder=folder)


def parse(
    options: Mapping[str, Any], folder: Path | None = None, permit: Callable[[str], None] | None = None
) -> Method:
    """The method of one entry of ``methods:``.

    Args:
        options: the method's name and options.
        folder: where a user's own file is looked up first.
        permit: called with every name, also that of an inner method, before anything is imported. It raises to refuse.

    Raises:
        UserError: there is no such method.
        ValidationError: an option is wrong.
    """
    fields = dict(options)
    kind = _CLASSES.find(_CLASSES.name_in(fields, "methods"), folder=folder, permit=permit)
    fields.pop("name")
    return kind.model_validate(fields, context={"folder": folder, "permit": permit})
