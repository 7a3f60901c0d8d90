"""Generalization adjustment: FedAvg at d = 0, gaps and weights by hand, a missing site."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from lost import lose, site_of
from tiny import MLP, NORMED, domains, federation, start_of, step_on

from fedshift.functional.averaging import weighted_average
from fedshift.methods.base import State
from fedshift.methods.federated.feddg_ga import GeneralizationAdjustment, adjusted_shares, loss_of
from fedshift.weights import Weights

SITES = ("large", "small", "one")


def states_of(method: GeneralizationAdjustment, rounds: int) -> list[State]:
    found = domains(NORMED)
    where = federation(method, found, NORMED, rounds=rounds, budget=200)
    states = [method.start(where, start_of(method, found, NORMED))]
    for _ in range(rounds):
        states.append(step_on(method, where, states[-1]))
    return states


def test_gaps_are_the_common_model_s_loss_minus_the_site_s_own() -> None:
    """Losses in evaluation, over all samples: of the mean model that came, and of the model sent the round before."""
    method, found = GeneralizationAdjustment(), domains(NORMED)
    where, start = federation(method, found, NORMED), start_of(method, found, NORMED)
    own = {site: reply.weights for site, reply in where.ask(method.train, to=SITES, weights=start).items()}
    mean = weighted_average(list(own.values()), [1.0] * 3)

    def loss(site: str, weights: Weights) -> float:
        (batch,) = site_of(where, site).all_batches()
        with torch.no_grad():
            return F.cross_entropy(site_of(where, site).model(weights).eval()(batch.inputs), batch.targets).item()

    for site, reply in where.ask(method.train, to=SITES, weights=mean).items():
        assert reply.common_loss == pytest.approx(loss(site, mean), rel=1e-5)
        assert reply.own_loss == pytest.approx(loss(site, own[site]), rel=1e-5)


@pytest.mark.parametrize(("setting", "part", "late"), [("paper", 1, 0), ("released", 3, 2)])
def test_weights_follow_the_gaps_by_a_step_that_shrinks(setting: str, part: int, late: int) -> None:
    """No gap is known in the first of four rounds; then d · 3/4, d · 2/4, d · 1/4. The released code divides by K, and
    begins with d · 5/4."""
    states = states_of(GeneralizationAdjustment(setting=setting, step=0.3), rounds=4)
    assert states[1].report["gaps"] == dict.fromkeys(SITES, 0.0)
    shares = [1 / 3] * 3
    for state in states[1:]:
        gaps = list(state.report["gaps"].values())
        if state.round > 1:
            step = 0.3 * (1 - (state.round - 1 - late) / 4) / part
            shares = adjusted_shares(shares, gaps, step, centred=setting == "paper")
        assert list(state.report["aggregation_weights"].values()) == pytest.approx(shares)
        assert [state.numbers[site] for site in SITES] == pytest.approx(shares)
    assert len(set(shares)) == 3


def test_a_gap_is_positive_where_the_common_model_is_worse() -> None:
    method, found = GeneralizationAdjustment(), domains(NORMED)
    where = federation(method, found, NORMED)
    first = step_on(method, where, method.start(where, start_of(method, found, NORMED)))
    own = {site: cast(float, site_of(where, site).memory["own_loss"]) for site in SITES}
    gaps = {site: loss_of(site_of(where, site), first.weights) - own[site] for site in SITES}
    assert max(map(abs, gaps.values())) > 0.01
    assert step_on(method, where, first).report["gaps"] == pytest.approx(gaps)


def test_losses_are_means_over_samples_and_not_over_batches() -> None:
    method, found = GeneralizationAdjustment(), domains(MLP, {"a": 300})
    site, start = site_of(federation(method, found, MLP), "a"), start_of(method, found, MLP)
    batches = list(site.all_batches())
    assert len(batches) == 2
    said = site.model(start)(torch.cat([batch.inputs for batch in batches]))
    expected = F.cross_entropy(said, torch.cat([batch.targets for batch in batches]))
    assert loss_of(site, start) == pytest.approx(expected.item(), rel=1e-5)


def test_a_missing_site_keeps_its_weight() -> None:
    method, found = GeneralizationAdjustment(step=0.5), domains(MLP)
    known = {"large": 0.5, "small": 0.3, "one": 0.2}
    where = federation(method, found, MLP, rounds=2)
    begun = step_on(method, where, method.start(where, start_of(method, found, MLP)))
    lose(where, "one")
    state = step_on(method, where, State(begun.weights, round=1, numbers=known))
    numbers = {site: cast(float, value) for site, value in state.numbers.items()}
    assert numbers["one"] == 0.2
    assert sum(numbers.values()) == pytest.approx(1)
    used = state.report["aggregation_weights"]
    assert used == pytest.approx({site: numbers[site] / 0.8 for site in ("large", "small")})
    assert used["large"] != pytest.approx(0.5 / 0.8)


def test_sites_whose_weights_are_all_zero_share_equally() -> None:
    method, found = GeneralizationAdjustment(step=0.0), domains(MLP)
    where = federation(method, found, MLP)
    lose(where, "one")
    state = step_on(
        method, where, State(start_of(method, found, MLP), numbers={"large": 0.0, "small": 0.0, "one": 1.0})
    )
    assert state.report["aggregation_weights"] == {"large": 0.5, "small": 0.5}
    assert dict(state.numbers) == {"large": 0.0, "small": 0.0, "one": 1.0}
