"""Refuses a field that there is not, before torch is imported: a slip costs a fraction of a second.

What fields there are stands in ``known_fields.json``, which ``python docs/list_methods.py`` makes from the classes.
Whatever this file does not know, such as a class of a user's own, is left to the whole check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedshift.errors import UserError, nearest

_FILE = Path(__file__).with_name("known_fields.json")
_DEFAULTS = {"protocol": ("kind", "leave_one_out"), "engine": ("name", "local")}
"""What says which class a section has, and what it is where nothing is said."""
Kind = Mapping[str, Any]


@cache
def known_fields() -> Mapping[str, Any]:
    """The content of the file."""
    content: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def experiment_fields() -> tuple[str, ...]:
    """The sections and fields of an experiment file."""
    return tuple(known_fields()["experiment"])


def check_known(options: Mapping[str, Any]) -> None:
    """Check the names of fields, and nothing else.

    UserError if there is no field of that name. The message has its path and the nearest name.
    """
    for name in options:
        if name not in experiment_fields():
            raise UserError(f"{name}: there is no such field; {nearest(str(name), experiment_fields())}")
    for path, kind, fields in _sections(options):
        _check(path, kind, fields)


def _sections(options: Mapping[str, Any]) -> Iterator[tuple[str, Kind, Mapping[Any, Any]]]:
    """The sections whose class is known: path, class, and what is written."""
    kinds: Sequence[Kind] = known_fields()["kinds"]
    for name, value in options.items():
        numbers = known_fields()["named"].get(name)
        if name == "methods":
            listed = value if isinstance(value, list) else []
            for number, entry in enumerate(listed):
                earlier = isinstance(entry, Mapping) and "method" in entry  # the registry brings it up to date
                called = entry.get("name") if isinstance(entry, Mapping) and not earlier else None
                if isinstance(called, str) and called in numbers:
                    yield f"methods[{number}] ({called})", kinds[numbers[called]], entry
        elif not isinstance(value, Mapping):
            continue
        elif numbers is not None:
            key, default = _DEFAULTS.get(name, ("name", None))
            called = value.get(key, default)
            if isinstance(called, str) and called in numbers:
                yield name, kinds[numbers[called]], value
        elif name in known_fields()["sections"]:
            yield name, kinds[known_fields()["sections"][name]], value


def _check(path: str, kind: Kind, written: Mapping[Any, Any]) -> None:
    fields: Mapping[str, int | None] = kind["fields"]
    allowed = {*fields, "name", *kind.get("symbols", ()), *kind.get("told_elsewhere", ())}
    for name, value in written.items():
        if isinstance(name, str) and name not in allowed:
            names = [field for field in fields if field != "name"]
            hint = f"{_deeper(name, fields)}{nearest(name, names)}{kind.get('in_words', '')}"
            raise UserError(f"{path}.{name}: there is no such field; {hint}")
        inner = fields.get(name)
        if inner is not None and isinstance(value, Mapping):
            _check(f"{path}.{name}", known_fields()["kinds"][inner], value)


def _deeper(name: str, fields: Mapping[str, int | None]) -> str:
    """Where a section inside this one has a field of that name, as a hint; else ""."""
    for field, number in fields.items():
        if number is not None and name in known_fields()["kinds"][number]["fields"]:
            return f"write {field}: {{{name}: …}}; "
    return ""
