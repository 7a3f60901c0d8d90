"""KD3A's r-strategy: the table of the specification and what cannot be split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.errors import UserError
from fedshift.functional.communication import communication_plan


@pytest.mark.parametrize(
    ("samples", "batch_size", "r", "expected"),
    [
        (25_000, 100, 0.2, (250, 8)),
        (25_000, 100, 0.5, (250, 20)),
        (25_000, 100, 1, (250, 40)),
        (25_000, 100, 2, (125, 80)),
        (25_000, 100, 10, (25, 400)),
        (25_000, 100, 100, (2, 4000)),
        (30_000, 50, 10, (60, 400)),
        (30_000, 50, 100, (6, 4000)),
        (25_000, 128, 1, (195, 40)),
        (2_000, 32, 1, (62, 40)),
        (2_000, 50, 1 / 3, (40, 13)),
    ],
)
def test_worked_numbers(samples: int, batch_size: int, r: float, expected: tuple[int, int]) -> None:
    assert communication_plan(samples, batch_size, 40, r) == expected


@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 20), st.integers(1, 64))
@settings(max_examples=25)
def test_what_divides_is_kept(batches: int, epochs: int, r: int, batch_size: int) -> None:
    assert communication_plan(batches * r * batch_size, batch_size, epochs, r) == (batches, epochs * r)
    assert communication_plan(batches * batch_size, batch_size, epochs * r, 1 / r) == (batches, epochs)


@pytest.mark.parametrize("r", [0, -1, 0.3, 0.7, float("nan"), float("inf")])
def test_impossible_numbers_of_exchanges(r: float) -> None:
    with pytest.raises(UserError, match="exchanges per epoch must be"):
        communication_plan(100, 10, 40, r)


def test_what_leaves_nothing() -> None:
    with pytest.raises(UserError, match="no batch of 10"):
        communication_plan(100, 10, 40, 100)
    with pytest.raises(UserError, match="less than one"):
        communication_plan(100, 10, 2, 0.2)
    for numbers in ((0, 10, 40), (100, 0, 40), (100, 10, 0)):
        with pytest.raises(UserError, match="at least 1"):
            communication_plan(*numbers, 1)
