"""A round as a run plays it: whose numbers are wrong where a model is not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import domains, run

from fedshift.errors import TrainingDiverged
from fedshift.federation.federation import Federation
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights


class Divides(FedAvg):
    """A server that divides by nothing. Its sites train as they should."""

    traits = FedAvg.traits.derive(name="divides")

    def round(self, federation: Federation, state: State) -> State:
        new = super().round(federation, state)
        return replace(
            new, weights=Weights({name: tensor / tensor.new_zeros(()) for name, tensor in new.weights.items()})
        )


def test_numbers_that_the_server_spoils_are_laid_to_its_charge() -> None:
    """Found when the next round's sites got them, it was a site's learning rate that was to be lowered."""
    with pytest.raises(TrainingDiverged, match=r"^divides, round 1: tensor 'features") as raised:
        run(Divides(), domains(), rounds=2)
    assert "learning rate" not in str(raised.value)
    assert "divides's round" in str(raised.value)


def test_a_rate_of_the_servers_optimiser_that_is_too_high_is_named() -> None:
    method = FedAvg(server={"optimizer": "momentum", "beta": 0, "rate": 1e300})
    with pytest.raises(TrainingDiverged, match=r"^fedavg, round \d: tensor '.*server's optimiser"):
        run(method, domains(), rounds=2)
