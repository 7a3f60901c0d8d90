"""KD3A: two rounds of it are those of Algorithm 1 written out; schedules; what it is for."""

from __future__ import annotations

import pytest
import torch
from every_method import mostly_slow
from kd3a_setting import SITES, kd3a, rounds_of, warm_start
from kd3a_written import EQUATIONS, Algorithm
from tiny import MLP, NORMED, run

from fedshift.federation.federation import Federation
from fedshift.methods.federated.kd3a import KD3A


def check_rounds(method: KD3A, batch_norm: bool = True) -> None:
    """Two rounds of the method beside two of `Algorithm`."""
    states, where = rounds_of(method, batch_norm=batch_norm)
    with torch.random.fork_rng():
        written, weights = Algorithm(method, NORMED if batch_norm else MLP), warm_start(batch_norm)
        for state in states:
            weights = written.round(weights)
            assert state.report["aggregation_weights"] == pytest.approx(written.shares, abs=2e-5)
            assert sum(state.report["aggregation_weights"].values()) == pytest.approx(1, abs=1e-12)
            assert state.report["confident"] == pytest.approx(written.confident, abs=1e-12)
            assert dict(state.numbers) == state.report["aggregation_weights"]
            for key, tensor in weights.items():
                torch.testing.assert_close(state.weights[key], tensor, atol=2e-5, rtol=1e-4)
            weights = state.weights  # so that rounding does not add up
    assert where.progress.used == written.used


@pytest.mark.parametrize("case", mostly_slow(EQUATIONS, ("paper", "code", "statistics in the loss", "heads at home")))
def test_two_rounds_are_those_of_the_equations(case: str) -> None:
    check_rounds(kd3a(**EQUATIONS[case]))


@pytest.mark.parametrize("case", ["paper", "code", "heads at home"])
def test_two_rounds_without_batch_norm(case: str) -> None:
    """As the paper's network for Amazon Review is."""
    check_rounds(kd3a(**EQUATIONS[case]), batch_norm=False)


def test_the_warm_start_puts_the_equations_to_the_test() -> None:
    """Some samples have no confident teacher, shares are not those of the samples, and statistics differ."""
    states, where = rounds_of(kd3a())
    assert any(0 < state.report["confident"] < 1 for state in states), [state.report for state in states]
    shares = states[0].report["aggregation_weights"]
    whole = sum(SITES.values()) + 14
    assert max(abs(shares[name] - number / whole) for name, number in SITES.items()) > 0.05
    assert shares["east"] < 0.5 * SITES["east"] / whole
    updates = where.ask(kd3a_of(where).fit, to=where.sources, weights=states[0].weights)
    means = [update.weights["features.hidden1.1.running_mean"] for update in updates]
    assert float((means[0] - means[1]).abs().max()) > 0.05


def kd3a_of(where: Federation) -> KD3A:
    assert isinstance(where.method, KD3A)
    return where.method


def test_momentum_begins_in_the_second_round() -> None:
    (first, second), _ = rounds_of(kd3a(share_momentum=0.9))
    (one, two), _ = rounds_of(kd3a())
    assert first.weights == one.weights
    assert first.report == one.report
    old, new = first.report["aggregation_weights"], two.report["aggregation_weights"]
    expected = {name: 0.9 * old[name] + 0.1 * new[name] for name in old}
    assert second.report["aggregation_weights"] == pytest.approx(expected, abs=1e-12)  # of the same models


@pytest.mark.parametrize(
    ("exchanges", "used"),
    [
        (1.0, {"large": 5, "small": 1, "one": 1, "target": 2}),
        (0.5, {"large": 10, "small": 2, "one": 2, "target": 2}),
        (0.2, {"large": 25, "small": 5, "one": 5, "target": 2}),
        (2.0, {"large": 2, "small": 1, "one": 1, "target": 1}),
        (10.0, {"large": 1, "small": 1, "one": 1, "target": 1}),
    ],
)
def test_aggregations_per_epoch(exchanges: float, used: dict[str, int]) -> None:
    method = kd3a(aggregations_per_epoch=exchanges)
    _, where = run(method, rounds=2)
    assert where.progress.used == {name: 2 * number for name, number in used.items()}
    assert where.progress.exchange == 4  # one up and one down in each round, however long it is
    for name, per_epoch in (("large", 5), ("small", 1), ("one", 1)):
        assert method.mini_batches(per_epoch, 2) == 2 * used[name]
    assert method.target_mini_batches(2, 2) == 2 * used["target"]
