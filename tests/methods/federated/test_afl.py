"""Agnostic federated learning: FedAvg at γ = 0, and the weights by a projection from elsewhere."""

from __future__ import annotations

import pytest
from lost import lose
from tiny import MLP, domains, federation, start_of, step_on

from fedshift.methods.federated.afl import AgnosticFederated

SITES = ("large", "small", "one")


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
