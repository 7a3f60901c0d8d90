"""Frozen models of plain values that another process sent or wrote. They are parsed once, where the bytes arrive."""

from __future__ import annotations

import math
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedshift.errors import FedshiftError, in_words
from fedshift.text import one_line

M = TypeVar("M", bound=BaseModel)


class Unreadable(FedshiftError):
    """Plain values that do not fit their model."""


class Frozen(BaseModel):
    """Plain values: no number is taken for a truth value or a text, and none is infinite.

    Fields that this version does not know are ignored, so that a later one may send more.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        """``allow_inf_nan`` says nothing of values of any type, which other classes parse later."""
        for name, value in self:
            if not _is_finite(value):
                raise ValueError(f"{name} has a number that is not finite")
        return self


class Closed(Frozen):
    """As `Frozen`, but a field that this version does not know is refused: it could change what the others mean."""

    model_config = ConfigDict(extra="forbid")


def parse_json(kind: type[M], text: str | bytes, what: str) -> M:
    """Parse JSON. ``text``: JSON. Raises Unreadable: it does not fit; one line that says where.

    Example:
        >>> class Point(Closed):
        ...     x: int
        >>> parse_json(Point, '{"x": 3}', "a point").x
        3
        >>> parse_json(Point, '{"x": "3"}', "a point")
        Traceback (most recent call last):
        fedshift.federation.plain_values.Unreadable: a point cannot be read: x: input should be a valid integer
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Unreadable(f"{what} cannot be read: {fault_of(error)}") from None
    except ValueError:  # halves of characters
        raise Unreadable(f"{what} cannot be read") from None


def _is_finite(value: Any) -> bool:
    """Whether all numbers of a plain value are; models inside it have seen to their own."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def fault_of(error: ValidationError) -> str:
    """Where the first fault of an error is, and what it is, in one line without the value."""
    fault = error.errors(include_url=False, include_input=False)[0]
    path, what = ".".join(map(str, fault["loc"])), _MEANT.get(fault["type"]) or in_words(fault)
    return one_line(f"{path}: {what}" if path else what)


_MEANT = {"missing": "this field is missing", "extra_forbidden": "there is no such field"}
