"""A pydantic error as one line: the field's path, what is wrong, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fedshift.errors import in_words, nearest


def describe(error: ValidationError, prefix: str, model: type[BaseModel]) -> str:
    """The message for the first fault of an error.

    Args:
        error: pydantic's error.
        prefix: the path of the section in the experiment file.
        model: the class of the section.
    """
    faults = error.errors()
    fault = faults[0]
    location = [
        part for part in fault["loc"] if isinstance(part, int) or part in _all_fields(model) or len(fault["loc"]) == 1
    ]
    parts = location or list(fault["loc"])
    path = prefix
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    more = f" ({len(faults) - 1} more)" if len({tuple(f["loc"][:1]) for f in faults}) > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = [name for name in model.model_fields if name != "name"]
        return f"{path}: there is no such field; {nearest(str(fault['loc'][-1]), known)}{more}"
    if fault["type"] == "missing":
        return f"{path}: this field is missing{more}"
    message = in_words(fault)
    # A union reports one fault for each of its types; together they say what is allowed. A list may also be reported
    # as too short, because its wrong entries are not counted.
    same = [in_words(f) for f in faults if f["loc"][:1] == fault["loc"][:1] and f["type"] != "too_short"]
    if len(same) > 1 and fault["type"] != "value_error":
        message = " or ".join(dict.fromkeys(same))
    # If the fault is one of the whole section, do not repeat all of it.
    got = "" if not fault["loc"] and isinstance(fault["input"], Mapping) else f", got {_short(fault['input'])}"
    return f"{path}: {message}{got}{more}"


def suggest_field(path: str) -> str:
    """A hint that shows the form of an override."""
    return f"write it as in the experiment file, such as training.rounds=10 (got '{path}')"


def _all_fields(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"
