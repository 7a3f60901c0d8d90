"""Named settings of a method: the paper's values, those of its released code, and what measurement recommends.

A method declares them in its class attribute ``settings``: name → the options in which the setting differs from the
paper's, which are the fields' defaults. An experiment chooses one with ``setting: released``; its other options take
precedence. How much a method trains (epochs, mini-batches, rounds) belongs to an experiment, never to a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from fedshift.errors import nearest
from fedshift.text import yaml_value

PAPER = "paper"
"""The setting that every method has: the defaults of its fields."""

Settings = Mapping[str, Mapping[str, Any]]

_NO_OPTIONS = ("name", "label", "setting", "sha256", "method", "training")
"""Fields that a setting never has. ``method`` is an inner method."""


def with_setting(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options``, with those of their setting added. Options that are given take precedence.

    Raises ValueError: there is no such setting.

    Example:
        >>> with_setting({"released": {"mixup": 2.0, "vote": "top1"}}, {"setting": "released", "vote": "rows"})
        {'mixup': 2.0, 'vote': 'rows', 'setting': 'released'}
    """
    name = options.get("setting", PAPER)
    known = (PAPER, *settings)
    if name not in known:
        raise ValueError(f"there is no setting '{name}'; {nearest(str(name), known)}")
    return {**settings.get(name, {}), **options}


def setting_name(kind: type[BaseModel], settings: Settings, options: Mapping[str, Any]) -> str:
    """The name of the setting that ``options`` belong to: ``paper``, ``released``, ``paper with mixup 0``.

    It is found by comparison, so that records from before settings had names get one, too. If no setting fits exactly,
    it is the one with the fewest differences.

    ``options``: every option of a run, as in its record.
    """
    best: list[str] | None = None
    name = PAPER
    for candidate in (PAPER, *settings):
        differences = _differences(_values(kind, settings.get(candidate, {})), options)
        if best is None or len(differences) < len(best):
            best, name = differences, candidate
    return f"{name} with {', '.join(best)}" if best else name


def _values(kind: type[BaseModel], changed: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        field: info.get_default(call_default_factory=True)
        for field, info in kind.model_fields.items()
        if field not in _NO_OPTIONS and not info.is_required()
    }
    plain: dict[str, Any] = to_jsonable_python({**defaults, **changed})
    return plain


def _differences(setting: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The options that have another value than in ``setting``, as ``field value``."""
    return [
        f"{field} {yaml_value(options[field])}"
        for field, value in setting.items()
        if field in options and options[field] != value
    ]
