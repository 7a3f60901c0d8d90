"""Parameters of a test that tries inputs which once went wrong, or some of their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def case(kind: str, tried: str, *values: Any, id: str | None = None) -> Any:
    """The ``values`` of one run of a test, with the mark of `list_cases`.

    Args:
        kind: of the input.
        tried: what is tried; both are literals, as `list_cases` reads them.
        values: of the test's parameters.
        id: of the test's name.
    """
    return pytest.param(*values, marks=pytest.mark.case(kind, tried), id=id)


def cases(kind: str, names: str, rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """A test's parameters, where all are of one kind.

    Args:
        kind: of the inputs.
        names: of the parameters, with spaces between them.
        rows: what is tried, and the value of the parameter, or a tuple with those of many; the first are literals.
    """
    several = " " in names
    each = [case(kind, tried, *(values if several else (values,))) for tried, values in rows.items()]
    return pytest.mark.parametrize(names.split() if several else names, each)


def slow(*values: Any) -> Any:
    """The ``values`` of one run of a test that is left to whoever runs the slow ones too."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_after(quick: int, values: Iterable[Any]) -> list[Any]:
    """The values of a test's parameters, of which all but the first ones are tried where slow tests are."""
    params = [value if isinstance(value, ParameterSet) else pytest.param(*_parts(value)) for value in values]
    return [
        param._replace(marks=[*param.marks, pytest.mark.slow]) if number >= quick else param
        for number, param in enumerate(params)
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
