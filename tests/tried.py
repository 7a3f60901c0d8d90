"""Parameters of a test that tries inputs which once went wrong, or some of their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


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
