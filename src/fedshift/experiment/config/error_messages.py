"""A pydantic error as one line: the field's path, what is wrong, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedshift.errors import UserError, in_words, nearest
from fedshift.methods.symbols import symbols_in_words


def describe(error: ValidationError, prefix: str, model: type[BaseModel]) -> str:
    """The message for the first fault of an error. ``prefix``: the path of the section in the experiment file."""
    faults = error.errors()
    fault = faults[0]
    location, inside = _path_to(fault, model)
    parts = location or list(fault["loc"])
    path = prefix
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    more = f" ({len(faults) - 1} more)" if len({tuple(f["loc"][:1]) for f in faults}) > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = [name for name in inside.model_fields if name != "name"]
        name = str(fault["loc"][-1])
        hint = f"{_deeper(name, inside)}{nearest(name, known)}{symbols_in_words(inside)}"
        return f"{path}: there is no such field; {hint}{more}"
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


def check_booleans(fields: Mapping[str, Any], prefix: str, model: type[BaseModel]) -> None:
    """Refuse true and false where a field takes neither. Python counts them as 1 and 0, so ``rounds: yes`` would be 1.

    ``prefix``: the path of the section in the experiment file. UserError if a field is true or false, or a list with
    one of them.
    """
    for name, value in fields.items():
        field, held = model.model_fields.get(str(name)), value if isinstance(value, list | tuple) else [value]
        if field is not None and any(isinstance(item, bool) for item in held) and not _takes_boolean(field.annotation):
            raise UserError(
                f"{prefix}.{name}: input should not be true or false, as YAML reads yes, no, on and off, got {value}"
            )


def _takes_boolean(annotation: Any) -> bool:
    if isinstance(annotation, bool) or annotation in (bool, Any, object):
        return True
    return any(map(_takes_boolean, get_args(annotation)))


def _path_to(fault: ErrorDetails, model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel]]:
    """The fields and numbers on the way to a fault, and the class of the innermost section.

    The way also has names that pydantic gives to the types of a union. They are left out.
    """
    parts: list[int | str] = []
    inside, is_key = model, False
    for number, part in enumerate(fault["loc"]):
        if is_key:
            parts.append(part)
            is_key = False
            continue
        last = number == len(fault["loc"]) - 1
        unknown = last and (number == 0 or (inside is not model and fault["type"] == "extra_forbidden"))
        if isinstance(part, int) or part in inside.model_fields or unknown:
            parts.append(part)
        if part in inside.model_fields:
            is_key = get_origin(inside.model_fields[str(part)].annotation) in (dict, Mapping)
            inside = section_in(inside.model_fields[str(part)].annotation) or inside
    return parts, inside


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it can be only one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = {section for part in get_args(annotation) if (section := section_in(part)) is not None}
    return sections.pop() if len(sections) == 1 else None


def _deeper(name: str, section: type[BaseModel]) -> str:
    """Where a section inside this one has a field of that name, as a hint; else ""."""
    for field, info in section.model_fields.items():
        inner = section_in(info.annotation)
        if inner is not None and name in inner.model_fields:
            return f"write {field}: {{{name}: …}}; "
    return ""


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"
