"""Named settings of a method: the paper's values, those of its released code, and what measurement recommends.

A method declares them in its class attribute ``settings``: name → the options in which the setting differs from the
paper's, which are the fields' defaults. An experiment asks for one with ``setting: released``; options that stand
beside it win. How much a method trains (epochs, steps, rounds) belongs to an experiment, never to a setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from fedshift.errors import nearest

PAPER = "paper"
"""The setting that every method has: the defaults of its fields."""

Settings = Mapping[str, Mapping[str, Any]]

_NO_OPTIONS = ("name", "label", "setting", "sha256", "method")
"""What a setting never decides; ``method`` is the one that a wrapper such as styles wraps."""


def with_setting(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` completed by those of the setting that they name; what they say themselves stays.

    Raises:
        ValueError: there is no such setting.

    Example:
        >>> with_setting({"released": {"mixup": 2.0, "vote": "top1"}}, {"setting": "released", "vote": "rows"})
        {'mixup': 2.0, 'vote': 'rows', 'setting': 'released'}
    """
    name = options.get("setting", PAPER)
    known = (PAPER, *settings)
    if name not in known:
        raise ValueError(f"there is no setting '{name}'; {nearest(str(name), known)}")
    return {**settings.get(name, {}), **options}


def described(kind: type[BaseModel], settings: Settings, options: Mapping[str, Any]) -> str:
    """Which setting ``options`` are, in words: ``paper``, ``released``, ``paper with mixup 0``.

    It is found by comparison, so that records written before settings had names are named, too. Where no setting fits
    exactly, it is the one with the fewest differences.

    Args:
        kind: the method's class. settings: its named settings. options: every option of a run, as its record has them.
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
        f"{field} {_written(options[field])}"
        for field, value in setting.items()
        if field in options and options[field] != value
    ]


def _written(value: object) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, ensure_ascii=False)
