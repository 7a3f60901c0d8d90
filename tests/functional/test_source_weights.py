"""Weights of sources: worked numbers, the released code's rounding, invariants, values that cannot be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.methods.federated.fada import gain_weights, relative_gains
from fedshift.methods.federated.feddg_ga import adjusted_shares
from fedshift.methods.federated.kd3a import (
    distance_weights,
    domain_weights,
    released_domain_weights,
    sample_weights,
    smoothed_weights,
)

LEAVE_ONE_OUT = (0.91, 0.91, 0.02)
SHAPLEY = (1.233233, 0.763533, 0.803233)
FOCUS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("focus", "expected"),
    [
        (LEAVE_ONE_OUT, (0.195699, 0.391398, 0.012903)),
        (SHAPLEY, (0.143122, 0.177222, 0.279656)),
        ((0.0, 0.0, 0.0), (0.2, 0.2, 0.2)),
        ((-1.0, -2.0, 0.0), (0.2, 0.2, 0.2)),
        ((-5.0, 0.5, 0.0), (0, 0.6, 0)),
    ],
)
def test_worked_numbers_of_domain_weights(focus: tuple[float, ...], expected: tuple[float, ...]) -> None:
    for given_focus in (focus, torch.tensor(focus, dtype=torch.float64)):
        sources, target = domain_weights(given_focus, [100, 200, 300], 400)
        assert target == pytest.approx(0.4)
        assert sources == pytest.approx(expected, abs=1e-6)
        assert sum(sources) == pytest.approx(0.6)


@given(FOCUS, st.integers(0, 1000), st.floats(0, 1), st.data())
def test_shares_sum_to_one(focus: list[float], target_samples: int, fraction: float, data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(1, 10**6), min_size=len(focus), max_size=len(focus)))
    gaps = [abs(value) for value in focus]
    for sources, target in (
        domain_weights(focus, samples, target_samples),
        released_domain_weights(focus, fraction),
        (sample_weights(samples), 0.0),
        (distance_weights(samples, gaps), 0.0),
        (gain_weights(focus), 0.0),
    ):
        assert sum(sources) + target == pytest.approx(1)
        assert min(*sources, target) >= 0


def test_weights_they_are_compared_with() -> None:
    assert sample_weights([100, 200, 300]) == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    expected = (0.665241, 0.244728, 0.090031)
    assert distance_weights([7, 7, 7], [0, 1, 2]) == pytest.approx(expected, abs=1e-6)
    # Only differences of distances matter, however large.
    assert distance_weights([7, 7, 7], [5000, 5001, 5002]) == pytest.approx(expected, abs=1e-6)
    assert distance_weights([1, 3], [2.0, 2.0]) == pytest.approx([0.25, 0.75])
    assert gain_weights([0.5, 0.1, -0.2]) == pytest.approx([0.461488, 0.309344, 0.229168], abs=1e-6)
    assert gain_weights([0.3] * 4) == pytest.approx([0.25] * 4)


@given(st.floats(1e-3, 1e6), st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.floats(1e-3, 1e3))
@settings(max_examples=25)
def test_relative_gains_know_no_scale(before: float, after: list[float], scale: float) -> None:
    gains = relative_gains(before, after)
    assert gains == pytest.approx([1 - value / before for value in after])
    assert relative_gains(scale * before, [scale * value for value in after]) == pytest.approx(gains)
    assert relative_gains(0.0, after) == [0.0] * len(after)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0, 1))
@settings(max_examples=25)
def test_smoothing_keeps_the_sum(weights: list[float], momentum: float) -> None:
    new = weights[::-1]
    smoothed = smoothed_weights(weights, new, momentum)
    assert sum(smoothed) == pytest.approx(sum(weights))
    assert smoothed_weights(weights, new, 1.0) == weights
    assert smoothed_weights(weights, new, 0.0) == new


def test_worked_adjustment() -> None:
    """Gaps 0.5, 0.2, 0.2: from their mean 0.2, −0.1, −0.1; times 0.3/0.2. Shares 0.8, 0.15, 0.05, sum 1."""
    assert adjusted_shares([0.5, 0.3, 0.2], [0.5, 0.2, 0.2], 0.3) == pytest.approx([0.8, 0.15, 0.05])


def test_the_released_adjustment_does_not_centre() -> None:
    """0.5 + 0.3, 0.3 + 0.12, 0.2 + 0.12: divided by their sum 1.54."""
    found = adjusted_shares([0.5, 0.3, 0.2], [0.5, 0.2, 0.2], 0.3, centred=False)
    assert found == pytest.approx([0.8 / 1.54, 0.42 / 1.54, 0.32 / 1.54])


def test_adjusted_shares_are_cut() -> None:
    """1 + 0.5 becomes 1, and 0 − 0.5 becomes 0."""
    assert adjusted_shares([1.0, 0.0], [2.0, 1.0], 0.5) == [1.0, 0.0]


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(-5, 5)), min_size=1, max_size=6), st.floats(0, 0.5))
def test_adjusted_shares_stay_shares_and_follow_the_gaps(sites: list[tuple[float, float]], step: float) -> None:
    total = sum(share for share, _ in sites)
    shares, gaps = [share / total for share, _ in sites], [gap for _, gap in sites]
    found = adjusted_shares(shares, gaps, step)
    assert sum(found) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in found)
    # The largest gap does not lose against the smallest: cut or not, the one share is no less than it was, the other no
    # more, and both are divided by the same sum.
    large, small = gaps.index(max(gaps)), gaps.index(min(gaps))
    assert found[large] * shares[small] >= found[small] * shares[large] - 1e-9
    assert adjusted_shares(shares, [1.0] * len(shares), step) == shares
    assert adjusted_shares(shares, gaps, 0.0) == pytest.approx(shares)


def test_shares_are_cut_at_one_before_they_are_divided() -> None:
    """0.9 + 0.3 · 1/1.5 = 1.1 counts as 1, 0.1 + 0.3 · 0.5/1.5 = 0.2, and −0.3 as 0."""
    found = adjusted_shares([0.9, 0.1, 0.0], [1.0, 0.5, -1.5], step=0.3)
    assert found == pytest.approx([1 / 1.2, 0.2 / 1.2, 0.0])


def test_the_largest_gap_counts_whatever_its_sign() -> None:
    """Gaps 0.1, 0.2 and −0.6 are 0.2, 0.3 and −0.5 from their mean: the step of 0.1 belongs to the last."""
    found = adjusted_shares([0.4, 0.3, 0.3], [0.1, 0.2, -0.6], step=0.1)
    assert found == pytest.approx([0.44, 0.36, 0.2])
