"""Schedules: worked numbers and the ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.functional import schedules


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.8, 0.95, {0: 0.8, 1: 0.80375, 10: 0.8375, 20: 0.875, 39: 0.94625}),
        (0.9, 0.95, {0: 0.9, 1: 0.90125, 10: 0.9125, 20: 0.925, 39: 0.94875}),
    ],
)
def test_gate(start: float, end: float, expected: dict[int, float]) -> None:
    for epoch, value in expected.items():
        assert schedules.linear(epoch / 40, start, end) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.05, 0.001, (0.05, 0.0499245, 0.0428241, 0.0255, 0.0081759, 0.0010755, 0.001)),
        (0.005, 0.0001, (0.005, 0.0049924, 0.0042824, 0.00255, 0.0008176, 0.0001076, 0.0001)),
        (0.05, 0.0, (0.05, 0.0499229, 0.0426777, 0.025, 0.0073223, 0.0000771, 0.0)),
    ],
)
def test_cosine(start: float, end: float, expected: tuple[float, ...]) -> None:
    for step, value in zip((0, 1, 10, 20, 30, 39, 40), expected, strict=True):
        assert schedules.cosine(step / 40, start, end) == pytest.approx(value, abs=5.1e-8)


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


def test_ramp() -> None:
    for progress, value in ((0, 0.0), (0.1, 0.462117), (0.2, 0.761594), (0.5, 0.986614), (1, 0.999909)):
        assert schedules.ramp(progress) == pytest.approx(value, abs=1e-6)
    assert schedules.ramp(0) == 0
    assert schedules.ramp(0.7, 0.0) == 0


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 100))
def test_ramp_rises_as_the_formula_says(first: float, second: float, gamma: float) -> None:
    early, late = sorted((first, second))
    assert schedules.ramp(early, gamma) == pytest.approx(2 / (1 + math.exp(-gamma * early)) - 1, abs=1e-12)
    assert 0 <= schedules.ramp(early, gamma) <= schedules.ramp(late, gamma) <= 1


@given(st.floats(0, 1), st.floats(0, 1))
def test_learning_rates_fall_between_their_ends(first: float, second: float) -> None:
    early, late = sorted((first, second))
    for schedule in (schedules.cosine, schedules.inverse_power):
        assert 0.1 >= schedule(early, 0.1) >= schedule(late, 0.1) >= 0


def test_progress_beyond_the_ends_stays_there() -> None:
    assert schedules.cosine(1.5, 0.1, 0.01) == pytest.approx(0.01)
    assert schedules.linear(-1, 0.1, 0.2) == 0.1
    assert schedules.inverse_power(2, 1.0) == schedules.inverse_power(1, 1.0)
    assert schedules.ramp(-1) == 0
    assert schedules.ramp(7) == schedules.ramp(1)
