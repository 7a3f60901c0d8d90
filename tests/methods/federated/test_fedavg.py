"""FedAvg: the worked mean, one site alone, and its options."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import CNN, MLP, NORMED, domains, federation, run, start_of, step_on, vectors

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Replies
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Update
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights


def replies(*updates: tuple[float, int]) -> Replies[Update]:
    found = [
        (str(number), Update(Weights({"w": torch.tensor([value]), "n": torch.tensor(number)}), samples, value))
        for number, (value, samples) in enumerate(updates)
    ]
    return Replies([site for site, _ in found], (pair for pair in found))


def test_worked_mean() -> None:
    """Models 1 and 5 of sites with 100 and 300 samples: (100·1 + 300·5) / 400 = 4."""
    weights, shares, losses = trained_mean(replies((1.0, 100), (5.0, 300)))
    assert weights["w"].tolist() == [4.0]
    assert weights["n"].tolist() == 1  # counters take the maximum
    assert shares == {"0": 0.25, "1": 0.75}
    assert losses == {"0": 1.0, "1": 5.0}
    weights, shares, _ = trained_mean(replies((1.0, 100), (5.0, 300)), by="uniform")
    assert weights["w"].tolist() == [3.0]
    assert shares == {"0": 0.5, "1": 0.5}


def test_nobody_answered() -> None:
    with pytest.raises(FedshiftError, match="no site answered"):
        trained_mean(replies())


@pytest.mark.parametrize("network", [MLP, NORMED], ids=["plain", "batch_norm"])
def test_one_site_alone_is_plain_training(network: dict[str, object]) -> None:
    """Written out with PyTorch: each round a new optimiser, E epochs over the same batches."""
    method, found = FedAvg(local_epochs=2), [vectors("alone", 21)]
    state, where = run(method, found, network, rounds=3, momentum=0.9, weight_decay=0.001)
    assert isinstance(where, LocalFederation)
    site = where._runners["alone"].site
    model = copy.deepcopy(site.network).train()
    for exchange in (1, 2, 3):
        site.begin(type(site.envelope)(exchange, exchange, 0.0, 1000))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.001, fused=True)
        for batch in site.batches(2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
    assert state.weights == Weights(model.state_dict())
    assert state.report["aggregation_weights"] == {"alone": 1.0}


def test_a_round_is_the_mean_of_what_the_sites_trained() -> None:
    method = FedAvg(local_epochs=1)
    state, _ = run(method, rounds=1)
    where, start = federation(method, rounds=1), start_of(method)
    updates = list(where.ask(method.fit, to=where.sources, weights=start))
    total = sum(update.samples for update in updates)
    assert [update.samples for update in updates] == [41, 5, 1]
    for name, tensor in state.weights.items():
        expected = sum(update.samples / total * update.weights[name].double() for update in updates)
        torch.testing.assert_close(tensor, expected.float(), atol=1e-7, rtol=1e-6)
    assert state.report["aggregation_weights"] == pytest.approx({"large": 41 / 47, "small": 5 / 47, "one": 1 / 47})
    assert state.report["losses"] == {site: update.loss for site, update in zip(where.sources, updates, strict=True)}


def test_options() -> None:
    default, _ = run(FedAvg())
    assert run(FedAvg(weighting="uniform"))[0].weights != default.weights
    assert run(FedAvg(local_epochs=2))[0].weights != default.weights
    stepped, where = run(FedAvg(steps_per_round=3))
    assert stepped.weights != default.weights
    assert where.progress.used == {"large": 6, "small": 6, "one": 6}
    assert FedAvg(steps_per_round=3).mini_batches(100, 7) == 21
    assert FedAvg(local_epochs=4).mini_batches(100, 7) == 2800


def test_a_site_without_budget_returns_what_it_got() -> None:
    method = FedAvg(weighting="uniform")
    found = domains(CNN, {"a": 9, "b": 9})
    where = federation(method, found, budget={"a": 1, "b": 0})
    start = start_of(method, found)
    updates = dict(where.ask(method.fit, to=where.sources, weights=start).items())
    assert updates["b"].weights == start
    assert updates["a"].weights != start
    assert where.is_exhausted()
    assert step_on(method, where, State(start)).weights == start
