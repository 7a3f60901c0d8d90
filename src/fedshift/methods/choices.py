"""An option that is one of several kinds, each with options of its own, such as ``robust`` and ``server``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fedshift.errors import in_words, nearest
from fedshift.methods.symbols import symbols_in_words, with_names


def read_choice(value: Any, by: str, kinds: Mapping[str, type[BaseModel]], what: str) -> Any:
    """The kind that a value names, with its options; a name alone stands for the kind's defaults.

    ``value``: as in an experiment file: a name, or a mapping with the name under ``by``. Others are returned unchanged.
    Raises ValueError: there is no such kind, or an option is wrong. One line.
    """
    options = {by: value} if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        return options
    if by not in options:
        raise ValueError(f"the {what} is not named; {_naming_hint(options, by, kinds)}")
    name = str(options[by])
    if name not in kinds:
        raise ValueError(f"there is no {what} '{name}'; {nearest(name, kinds)}")
    kind = kinds[name]
    try:
        return kind.model_validate(with_names(kind, options))
    except ValidationError as error:
        faults = error.errors()
        fault, option = faults[0], str(faults[0]["loc"][0])
        if fault["type"] == "extra_forbidden":
            raise ValueError(
                f"{name} has no option '{option}'; {nearest(option, kind.model_fields)}{symbols_in_words(kind)}"
            ) from None
        reason = " or ".join(in_words(other) for other in faults if other["loc"][0] == option)
        if fault["type"] == "missing":
            reason = "is missing"
        raise ValueError(f"{name}.{option}: {reason}") from None


def _naming_hint(options: Mapping[Any, Any], by: str, kinds: Mapping[str, type[BaseModel]]) -> str:
    """How to name a kind in options that do not: the kind that is a key of them, or all that there are."""
    given = next((str(key) for key in options if str(key) in kinds), None)
    if given is None:
        return f"add {by}: one of {', '.join(sorted(kinds))}"
    inner = options[given]
    more = "".join(f", {key}: {value}" for key, value in inner.items()) if isinstance(inner, Mapping) else ""
    return f"write {{{by}: {given}{more}}}"
