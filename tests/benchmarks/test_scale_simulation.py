"""The simulation of large federations against formulas, a case by hand, and the numbers that Bell et al. publish."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from fedshift.federation.secure import integer_sums
from scale_simulation import (
    CASES,
    HOSPITALS,
    PHONES,
    RESULT,
    Federation,
    binomial_below,
    neighbours,
    row,
    simulate,
    threshold,
)  # fmt: skip

CALM = Federation("calm", 40, 40, 0, 0, 10, 0.0, 0.0, 0.0, 1.0, 5.0, 1e9)
"""40 sites whose models of 10 bytes take 10 seconds down and 10 up, and a coordinator that reads one in 2 seconds."""


def test_a_coordinator_without_losses_by_hand() -> None:
    found = simulate(CALM, 0)
    assert found.seconds == pytest.approx(20 + 40 * 2)
    assert (found.answered, found.counted, found.root_bytes, found.coordinators) == (40, 40, 400, 1)


def test_a_tree_by_hand() -> None:
    """Four groups of ten, each read in 20 s; a sum takes 2 s; two coordinators read two each, the root two."""
    found = simulate(replace(CALM, group=10, fanout=2), 0)
    assert found.seconds == pytest.approx(20 + 10 * 2 + 2 * 2 + 2 * 2)
    assert (found.groups, found.root_bytes, found.coordinators) == (4, 20, 4 + 2 + 1)


def test_losses_are_those_of_a_binomial_distribution() -> None:
    share = row(replace(PHONES, drawn=20_000, deadline=1e9), rounds=4)["answered_share"]
    assert share == pytest.approx(0.9, abs=5 * math.sqrt(0.9 * 0.1 / 80_000))


def test_groups_are_lost_as_often_as_a_formula_says() -> None:
    found = row(replace(PHONES, drawn=30_000, group=30, fanout=100, lost=0.4, deadline=1e9), rounds=4)
    expected = 1000 * binomial_below(30, 0.6, 16)
    assert found["expected_groups_lost"] == pytest.approx(expected)
    assert found["groups_lost"] == pytest.approx(expected, abs=5 * math.sqrt(expected / 4))


def test_the_tail_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n, p, least in ((30, 0.6, 16), (100, 0.98, 51), (1000, 0.6, 501)):
        assert binomial_below(n, p, least) == pytest.approx(stats.binom.cdf(least - 1, n, p), rel=1e-6)


def test_the_threshold_is_that_of_secure_sums() -> None:
    assert [threshold(number) for number in range(3, 200)] == [
        integer_sums.threshold(number) for number in range(3, 200)
    ]


@pytest.mark.slow
def test_a_billion_clients_cost_less_than_a_thousand_neighbours() -> None:
    """Bell et al. (CCS 2020), abstract: a billion clients at the cost of a complete graph of a thousand."""
    assert neighbours(1_000_000_000, 1 / 3, 1 / 3)[0] < 1000
    few, many = neighbours(10_000, 0.05, 0.05)[0], neighbours(100_000_000, 0.05, 0.05)[0]
    assert few < many < 2 * few  # they grow with the logarithm of the clients


def test_what_is_committed_is_what_it_computes() -> None:
    stored = json.loads(RESULT.read_text())
    assert [one["federation"]["name"] for one in stored["rounds"]] == [case.name for case in CASES]
    small = next(
        one for one in stored["rounds"] if one["federation"]["drawn"] == 500 and not one["federation"]["group"]
    )
    again = row(replace(HOSPITALS, name=small["federation"]["name"], drawn=500))
    for key in ("seconds", "answered_share", "root_bytes", "least_seconds_of_one_coordinator"):
        assert again[key] == pytest.approx(small[key], rel=1e-5)
