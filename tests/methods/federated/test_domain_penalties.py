"""The federated forms of V-REx, IRM and Fish: with one step on all samples of a site, a step of the pooled method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import MLP, NORMED, assert_close, domains, federation, run

from fedshift.methods.base import Method
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedfish import FederatedFish
from fedshift.methods.federated.fedgma import FedGMA, masked_by_agreement
from fedshift.methods.federated.fedirm import FederatedIRM
from fedshift.methods.federated.fedvrex import FederatedVREx
from fedshift.methods.pooled.fish import Fish
from fedshift.methods.pooled.irm import IRM
from fedshift.methods.pooled.vrex import VREx
from fedshift.weights import Weights

SIZES = {"a": 9, "b": 17, "c": 23}
PLAIN: dict[str, Any] = {"network": MLP, "batch_size": 64, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.3}


def after(method: Method, rounds: int) -> Weights:
    """The model after rounds of one step each on all samples of every site."""
    pooled = method.traits.pooled
    budget = rounds * (len(SIZES) if pooled else 1)
    return run(method, domains(MLP, SIZES), rounds=rounds, budget=budget, **PLAIN)[0].weights


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("federated", "pooled"),
    [
        (FederatedVREx(penalty_weight=40.0), VREx(penalty_start=0, penalty_weight=40.0, rescaled=False)),
        (FederatedVREx(penalty_weight=40.0, rescaled=True), VREx(penalty_start=0, penalty_weight=40.0)),
        (FederatedIRM(penalty_weight=3.0), IRM(penalty_start=0, penalty_weight=3.0, rescaled=False)),
        (
            FederatedIRM(penalty_weight=3.0, penalty_start=2, weight_before=1.0, rescaled=True),
            IRM(penalty_start=2, penalty_weight=3.0),
        ),
        (FederatedFish(order="fixed"), Fish(order="fixed")),
    ],
)
def test_one_step_of_every_site_is_a_pooled_step(federated: Method, pooled: Method, rounds: int) -> None:
    plain = after(FedAvg(weighting="uniform"), rounds)
    found = after(federated, rounds)
    assert_close(found, after(pooled, rounds))
    assert max((found[name] - value).abs().max() for name, value in plain.items()) > 1e-3


def test_the_penalty_begins_in_the_round_of_the_pooled_one() -> None:
    federated = FederatedVREx(penalty_weight=40.0, penalty_start=2, weight_before=1.0, rescaled=True)
    assert_close(after(federated, 3), after(VREx(penalty_start=2, penalty_weight=40.0), 3))


def test_fish_s_whole_way_is_training_at_one_site_after_the_other() -> None:
    """Each alone from where the one before it ended: momentum and draws are a site's own."""
    wanted = start = run(FedAvg(), domains(MLP, SIZES), rounds=1, budget=0, **PLAIN)[0].weights
    method = FederatedFish(meta_rate=1.0, order="fixed")
    where = federation(method, domains(MLP, SIZES), rounds=1, budget=1, **PLAIN)
    for site in SIZES:
        (update,) = where.ask(method.fit, to=(site,), weights=wanted)
        wanted = update.weights
    half = run(FederatedFish(order="fixed"), domains(MLP, SIZES), rounds=1, budget=1, **PLAIN)[0].weights
    assert_close(run(method, domains(MLP, SIZES), rounds=1, budget=1, **PLAIN)[0].weights, wanted)
    assert_close(half, Weights({name: (value + wanted[name]) / 2 for name, value in start.items()}))


def visits(rounds: int, seed: int, order: Any) -> list[list[str]]:
    """The sites of each round in the order of their visits."""
    where = run(FederatedFish(order=order), domains(MLP, SIZES), rounds=rounds, budget=rounds, seed=seed, **PLAIN)[1]
    sites = [entry.site for entry in where.ledger.entries if entry.direction == "down"]
    return [sites[start : start + len(SIZES)] for start in range(0, len(sites), len(SIZES))]


def test_fish_visits_every_site_once_in_an_order_drawn_anew() -> None:
    drawn = visits(6, 1, "drawn")
    assert [sorted(names) for names in drawn] == [sorted(SIZES)] * 6
    assert len({tuple(names) for names in drawn}) > 2
    assert drawn == visits(6, 1, "drawn") != visits(6, 2, "drawn")
    assert visits(2, 1, "fixed") == [sorted(SIZES)] * 2


def test_fish_s_counters_are_those_of_the_last_site() -> None:
    budget: dict[str, Any] = {"rounds": 1, "budget": 1, **PLAIN, "network": NORMED}
    weights = run(FederatedFish(), domains(NORMED, SIZES), **budget)[0].weights
    counters = {int(value) for name, value in weights.items() if name.endswith("num_batches_tracked")}
    assert counters == {len(SIZES)}


def test_fedgma_s_round_by_hand() -> None:
    method = FedGMA(agreement=0.7, weighting="uniform")
    budgets = {"budget": 9, "rounds": 1}
    models = [
        run(FedAvg(), domains(MLP, {site: size}), **{**PLAIN, **budgets})[0].weights for site, size in SIZES.items()
    ]
    start = run(FedAvg(), domains(MLP, SIZES), **{**PLAIN, "budget": 0, "rounds": 1})[0].weights
    found = run(method, domains(MLP, SIZES), **{**PLAIN, **budgets})[0].weights
    for name, old in start.items():
        changes = torch.stack([model[name] - old for model in models])
        agreed = changes.sign().mean(0).abs()
        wanted = old + changes.mean(0) * torch.where(agreed >= 0.7, 1.0, agreed)
        torch.testing.assert_close(found[name], wanted)
        torch.testing.assert_close(masked_by_agreement(changes.mean(0), changes.sign().mean(0), 0.7), wanted - old)


def test_a_weight_below_one_divides_nothing() -> None:
    risk = FederatedVREx(penalty_weight=0.1, rescaled=True).towards(lambda _: torch.tensor(2.0), 0.5, 1)
    assert risk(None).item() == pytest.approx(2.0 + 0.1 * 1.5**2)  # type: ignore[arg-type]
