"""Which rows of a table were trained otherwise than others: ``training`` of a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedshift.evaluation.records import RunResult
from fedshift.federation.training import SAME_BITS
from fedshift.report.note import Note
from fedshift.text import yaml_value

_OF_THE_RUN = "mini_batches"
"""A record has the budget of every site in the place of this field."""
_NOT_WRITTEN: Mapping[str, Any] = {"steps": None, "accumulate": 1, "compile": False}
"""Fields that records have where they are not these."""


def otherwise(result: RunResult, other: RunResult) -> dict[str, Any]:
    """The fields of the training section in which a run differs from another, with its own values.

    Example:
        >>> made = RunResult.model_construct
        >>> fast, slow = (made(options={"training": {"lr": rate, "rounds": 3}}) for rate in (0.5, 0.1))
        >>> otherwise(fast, slow)
        {'lr': 0.5}
    """
    section, others = _training(result), _training(other)
    return {
        name: value
        for name, value in section.items()
        if name not in (_OF_THE_RUN, *SAME_BITS) and name in others and _differ(value, others[name])
    }


def _differ(value: object, other: object) -> bool:
    """Whether two values differ, but for parts that a record of an earlier version has not."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return any(value[part] != other[part] for part in value if part in other)
    return value != other


def trained_note(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[Note]:
    """Which rows were trained with which values, for the fields in which rows differ."""
    first = {result.method: result for result in reversed(results) if result.method in methods}
    rows = [first[name] for name in methods if name in first]
    parts = []
    for name in dict.fromkeys(name for row in rows for name in otherwise(row, rows[0])):
        values: dict[str, list[str]] = {}
        for row in rows:
            values.setdefault(yaml_value(_training(row).get(name)), []).append(row.method)
        parts.append(f"{name} " + ", ".join(f"{value} ({', '.join(those)})" for value, those in values.items()))
    if parts:
        yield Note("trained", f"Rows were trained with settings of their own: {'; '.join(parts)}.")


def _training(result: RunResult) -> Mapping[str, Any]:
    section = result.options.get("training")
    return {**_NOT_WRITTEN, **section} if isinstance(section, Mapping) else {}
