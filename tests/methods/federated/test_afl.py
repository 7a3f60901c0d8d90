"""Agnostic federated learning: FedAvg at γ = 0, and the weights by a projection from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lost import lose
from scipy.optimize import minimize
from tiny import MLP, NORMED, assert_close, domains, federation, run, start_of, step_on

from fedshift.functional.source_weights import ascended_weights
from fedshift.methods.federated.afl import AgnosticFederated
from fedshift.methods.federated.fedavg import FedAvg

SITES = ("large", "small", "one")


def test_without_a_step_it_is_fedavg_with_equal_shares() -> None:
    plain, agnostic = (run(m, network=MLP)[0] for m in (FedAvg(weighting="uniform"), AgnosticFederated(weights_rate=0)))
    assert_close(plain.weights, agnostic.weights)
    assert agnostic.report["aggregation_weights"] == pytest.approx(dict.fromkeys(SITES, 1 / 3))


@pytest.mark.parametrize("rule", ["projected", "exponential"])
def test_weights_follow_the_losses_of_the_common_model(rule: str) -> None:
    method, found = AgnosticFederated(weights_rate=0.4, rule=rule), domains(NORMED)  # type: ignore[arg-type]
    where = federation(method, found, NORMED, rounds=2, budget=200)
    state = method.start(where, start_of(method, found, NORMED))
    weights = np.full(3, 1 / 3)
    for _ in range(2):
        other = federation(method, found, NORMED, rounds=2, budget=200)
        met = dict(other.ask(method.train, to=SITES, weights=state.weights).items())
        raised = 0.4 * np.array([met[site].common_loss for site in SITES])
        if rule == "exponential":
            weights = weights * np.exp(raised) / (weights * np.exp(raised)).sum()
        else:
            weights = projected(weights + raised)
        state = step_on(method, where, state)
        assert [state.numbers[site] for site in SITES] == pytest.approx(weights, abs=1e-5)


def projected(point: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex, by SciPy."""
    whole = {"type": "eq", "fun": lambda x: x.sum() - 1}
    start = np.full(len(point), 1 / len(point))
    bounds = [(0, 1)] * len(point)
    return minimize(lambda x: ((x - point) ** 2).sum(), start, bounds=bounds, constraints=whole, tol=1e-14).x


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    for seed in range(5):
        point = np.random.default_rng(seed).normal(size=6)
        found = ascended_weights(torch.zeros(6), torch.tensor(point), 1.0)
        assert found == pytest.approx(projected(point), abs=1e-6)


@pytest.mark.parametrize("rule", ["projected", "exponential"])
def test_a_site_that_is_missing_keeps_its_weight(rule: str) -> None:
    """The others share what is left, so all weights still sum to one."""
    method, found = AgnosticFederated(weights_rate=0.2, rule=rule), domains(MLP)  # type: ignore[arg-type]
    where = federation(method, found, MLP, rounds=3, budget=200)
    first = step_on(method, where, method.start(where, start_of(method, found, MLP)))
    lose(where, "small")
    second = step_on(method, where, first)
    assert second.numbers["small"] == pytest.approx(first.numbers["small"])
    assert sum(second.numbers[site] for site in SITES) == pytest.approx(1)
    assert sum(second.report["aggregation_weights"].values()) == pytest.approx(1)
