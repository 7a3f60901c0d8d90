"""Schedules: worked numbers and the ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.functional import schedules


def test_cosine_against_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.001)
    for step in range(41):
        assert schedules.cosine(step / 40, 0.05, 0.001) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


def test_warm_up_against_torch() -> None:
    """A warm-up of a tenth of 200 steps, which torch counts by itself."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=20)
    for step in range(30):
        assert schedules.warm_up(step / 200, 0.1) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


def test_inverse_power() -> None:
    for progress, factor in ((0, 1.0), (0.1, 0.594604), (0.5, 0.260847), (1, 0.165560)):
        assert schedules.inverse_power(progress, 2.0) == pytest.approx(2 * factor, abs=2e-6)


def test_inverse_power_of_the_number_of_a_round() -> None:
    for number, rate in {1: 0.00165560, 2: 0.00101938, 5: 0.00052399, 10: 0.00031388, 50: 0.00009443}.items():
        assert schedules.inverse_power(number, 0.01, clamp=False) == pytest.approx(rate, abs=6e-9)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 100))
def test_ramp_rises_as_the_formula_says(first: float, second: float, gamma: float) -> None:
    early, late = sorted((first, second))
    assert schedules.ramp(early, gamma) == pytest.approx(2 / (1 + math.exp(-gamma * early)) - 1, abs=1e-12)
    assert 0 <= schedules.ramp(early, gamma) <= schedules.ramp(late, gamma) <= 1


def test_progress_beyond_the_ends_stays_there() -> None:
    assert schedules.cosine(1.5, 0.1, 0.01) == pytest.approx(0.01)
    assert schedules.linear(-1, 0.1, 0.2) == 0.1
    assert schedules.inverse_power(2, 1.0) == schedules.inverse_power(1, 1.0)
    assert schedules.ramp(-1) == 0
    assert schedules.ramp(7) == schedules.ramp(1)
