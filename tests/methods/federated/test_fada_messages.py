"""FADA: what crosses the wire, in every mini-batch both ways; a source that takes no part in a round."""

from __future__ import annotations

from typing import Any

import pytest
from test_fada import ROLES, begun, short, site_of
from tiny import LINEAR, step_on

from fedshift.errors import TrainingDiverged, UserError
from fedshift.federation.site import Site
from fedshift.methods.federated.fada import FADA
from fedshift.weights import Weights

# What crosses the wire ------------------------------------------------------------------------------------------------


def test_features_cross_in_every_mini_batch_both_ways() -> None:
    method, steps, width = short(steps_per_round=4), 4, 6
    where, state = begun(method)
    step_on(method, where, state)
    entries = [entry for entry in where.ledger.entries if entry.kind == "features" and entry.bytes]
    for direction in ("up", "down"):
        for site in ROLES:
            sizes = [entry.bytes for entry in entries if (entry.site, entry.direction) == (site, direction)]
            assert sizes == [4 * 8 * width] * steps, (site, direction)
    assert set(where.progress.used.values()) == {steps}


def test_samples_do_not_leave_as_features() -> None:
    """A network of one layer has nothing before its classifier: its features are the samples."""
    for variant in ("I", "III"):
        method = short(variant=variant)
        where, state = begun(method, network=LINEAR)
        with pytest.raises(UserError, match="samples would leave as they are"):
            step_on(method, where, state)
        with pytest.raises(UserError, match="samples would leave as they are"):
            method.check(site_of(where, "a").network)


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
