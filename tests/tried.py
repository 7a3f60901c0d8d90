"""One parameter of a test that tries an input which once went wrong, or one of its kind."""

from __future__ import annotations

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
