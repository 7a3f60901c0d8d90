"""FADA's exchanges in a round, and a source that takes no part in one."""

from __future__ import annotations

from typing import Any

from test_fada import begun, short
from tiny import step_on

from fedshift.errors import TrainingDiverged
from fedshift.federation.site import Site
from fedshift.methods.federated.fada import FADA
from fedshift.weights import Weights


def test_a_round_has_one_exchange_for_each_step_and_two_more() -> None:
    """Features of the first mini-batch, two steps, the sources' last one, and the target's with the aggregation."""
    method = short(steps_per_round=3)
    where, state = begun(method)
    before = where.progress.exchange
    step_on(method, where, state)
    assert where.progress.exchange - before == 5


def test_a_source_that_sends_no_features_loses_the_rounds_work_and_keeps_its_identifier() -> None:
    class Fails(FADA):
        def begin(self, site: Site, weights: Weights) -> Any:
            if site.name == "b" and site.envelope.round == 2:
                raise TrainingDiverged("no number")
            return super().begin(site, weights)

    method = Fails(steps_per_round=3, identifier_width=5)
    where, state = begun(method)
    where.quorum = 1
    first = step_on(method, where, state)
    second = step_on(method, where, first)
    assert where.progress.used == {"a": 6, "b": 6, "t": 6}
    assert set(second.report["aggregation_weights"]) == {"a"}
    before: Any = first.parts["identifiers"]
    after: Any = second.parts["identifiers"]
    assert after["b"] == before["b"]
    assert after["a"] != before["a"]
    third = step_on(method, where, second)
    assert set(third.report["aggregation_weights"]) == {"a", "b"}
