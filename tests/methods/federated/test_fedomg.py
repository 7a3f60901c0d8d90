"""FedOMG: a round by hand."""

from __future__ import annotations

import pytest
import torch
from tiny import NORMED, assert_close, domains, federation, run, start_of

from fedshift.functional.averaging import parameters_of
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedomg import FedOMG, matching_shares
from fedshift.weights import Weights

SIZES = {"large": 41, "small": 5, "other": 16}


def flat(weights: Weights, names: list[str]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in names]).double()


@pytest.mark.parametrize(("setting", "rate"), [("paper", 0.5), ("released", 0.5 / (1 + 0.8**2) / len(SIZES))])
def test_a_round_by_hand(setting: str, rate: float) -> None:
    method, found = FedOMG(kappa=0.8, server_rate=0.5, setting=setting), domains(NORMED, SIZES)
    state, _ = run(method, found, NORMED, rounds=1)
    where, start = federation(method, found, NORMED), start_of(method, found, NORMED)
    models = {site: reply.weights for site, reply in where.ask(method.fit, to=where.sources, weights=start).items()}
    names = list(parameters_of(start))
    drifts = torch.stack([flat(model, names) - flat(start, names) for model in models.values()])
    shares = matching_shares(drifts @ drifts.T, 0.8)
    expected = flat(start, names) + rate * (shares @ drifts)
    torch.testing.assert_close(flat(state.weights, names), expected, atol=1e-5, rtol=1e-4)
    assert list(state.report["aggregation_weights"].values()) == pytest.approx(shares.tolist(), rel=1e-3)
    statistics = {name: tensor for name, tensor in state.weights.items() if name not in names}
    mean = run(FedAvg(weighting="uniform"), found, NORMED, rounds=1)[0].weights
    assert_close(Weights(statistics), mean)
    assert statistics
