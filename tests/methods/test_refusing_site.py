"""Every method with a source that does not let out one of the kinds it sends: it goes on, or says why it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_method import QUICK, method_of
from tiny import CNN, domains, plans, setting, start_of, step_on

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.federated.ccst import CCST
from fedshift.methods.federated.elcfs import ELCFS
from fedshift.methods.federated.shot import SHOT, members_by_name
from fedshift.methods.rounds import start_run

WITHOUT = {
    "shot": "its sources are asked once, see below",
    "oracle": "it trains at the target alone",
    "zero_shot": "nobody trains",
}


def left_out(method: Method, refuse: str) -> tuple[State, LocalFederation]:
    """A run of few mini-batches in which one source does not let a kind out."""
    found = domains(CNN, {"large": 20, "small": 12, "mid": 17})
    whole = replace(setting(method, found, CNN), on_refusal="leave_out")
    own = {"small": frozenset([refuse])}
    sites = [replace(plan, refuse=own.get(plan.name, plan.refuse)) for plan in plans(method, found)]
    budget = {plan.name: 6 for plan in sites}
    where = LocalFederation(sites, whole, budget=budget, rounds=2, quorum=2, on_refusal="leave_out")
    state = start_run(method, where, start_of(method, found, CNN))
    where.settle()
    for _ in range(6):
        if not others_are_done(where):
            state = step_on(method, where, state)
    return state, where


def others_are_done(where: LocalFederation) -> bool:
    """Whether the sites that refuse nothing have used their budgets. A run ends with its planned rounds."""
    used = where.progress.used
    return all(used[site] >= budget for site, budget in where.budget.items() if site != "small")


CASES = [
    pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
    for name in registry.names()
    if not registry.method_class(name).traits.pooled and name not in WITHOUT
    for kind in method_of(name).calls.shares
    if kind != "numbers"
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_others_go_on_to_the_end(name: str, kind: str) -> None:
    state, where = left_out(method_of(name), kind)
    assert others_are_done(where)
    assert set(where.refused) == {"small"}
    assert all(f"refuses to send {kind}" in reason for reason in where.refused["small"])
    state.weights.check_finite("the model")


def test_an_ensemble_answers_without_the_site_that_sends_no_model() -> None:
    method = SHOT()
    state, where = left_out(method, "weights")
    assert where.progress.used["target"] == where.budget["target"]
    assert set(where.refused) == {"small"}
    assert set(members_by_name(state.weights, where.sources)) == set(where.sources) - {"small"}
    found = domains(CNN)
    network = method.evaluated_network(setting(method, found, CNN).build_network(), len(where.sources)).eval()
    network.load_state_dict(dict(state.weights))
    inputs = torch.rand(5, *found[0].inputs.shape[1:])
    with torch.no_grad():
        scores = network(inputs)
        network.counted.fill_(1)
        assert not torch.allclose(scores, network(inputs))
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(5))


def test_a_site_that_gives_no_spectra_gets_those_of_the_others() -> None:
    _, where = left_out(ELCFS(), "spectra")
    banks = {name: set(runner.site.memory["bank"]) for name, runner in where._runners.items()}  # type: ignore[arg-type]
    assert banks == {"large": {"mid"}, "small": {"large", "mid"}, "mid": {"large"}}


@pytest.mark.parametrize("mode", ["overall", "single"])
def test_a_site_that_gives_no_style_keeps_its_own(mode: str) -> None:
    options: dict[str, Any] = {"style_mode": mode, "bank_size": 4, "level": 3}
    _, where = left_out(CCST(**options), "styles")
    banks = {
        name: set(runner.site.memory["styles"])  # type: ignore[arg-type]
        for name, runner in where._runners.items()
    }
    assert banks == {"large": {"large", "mid"}, "small": {"large", "mid", "small"}, "mid": {"large", "mid"}}
