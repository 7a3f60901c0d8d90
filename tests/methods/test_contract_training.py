"""What every method must keep to, beside `test_contract`: what it may see, and as much work as all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from every_method import every_method_in_time, method_of
from tiny import CLASSES, CNN, data_set, domains, images, network_for, start_of, step_on, training

from fedshift.data.domain import DataSet, Domain
from fedshift.experiment import budgets
from fedshift.experiment import plan as plan_module
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.index import Protocol
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site_runner import Setting
from fedshift.methods import registry
from fedshift.methods.rounds import start_run
from fedshift.models import registry as models


class Untouchable(Domain):
    """A domain of which nothing may be read."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        if name in ("inputs", "labels", "groups", "train_rows", "test_rows", "name"):
            raise AssertionError(f"'{name}' of the unseen site was read")
        return super().__getattribute__(name)


@every_method_in_time
def test_the_unseen_site_is_never_touched(name: str) -> None:
    method = method_of(name)
    if method.traits.needs_target:
        pytest.skip("the target takes part")
    data = data_set([images("hidden", 12), *domains()])
    split = LeaveOneOut(test_fraction=0).split_of(data, "hidden", 0)
    poisoned = DataSet(
        data.name, {**data.domains, "hidden": Untouchable()}, data.classes, data.preprocessing, data.manifest
    )
    with pytest.raises(AssertionError, match="of the unseen site was read"):
        _ = poisoned.domains["hidden"].inputs
    plans = plan_module.site_plans(method, poisoned, split)
    network = network_for(method, CNN, (1, 12, 12))
    whole = Setting(method, training(), network, data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
    names = [plan.name for plan in plans]
    assert "hidden" not in names
    where = LocalFederation(plans, whole, budget=dict.fromkeys(names, 20), rounds=1)
    state = step_on(method, where, start_run(method, where, start_of(method)))
    assert state.round == 1
    assert {entry.site for entry in where.ledger.entries} <= set(names)


@every_method_in_time
def test_the_labels_of_a_target_that_takes_part_change_nothing(name: str) -> None:
    method = method_of(name)
    if method.traits.target in ("unseen", "labelled"):
        pytest.skip("no target, or one with labels")
    data = data_set([images("hidden", 20), *domains()])
    split = AdaptToOne().split_of(data, "hidden", 0)
    assert not set(split.unlabelled["hidden"]) & set(split.measured["hidden"])
    states = []
    for shift in (0, 1):
        other = replace(data.domains["hidden"], labels=(data.domains["hidden"].labels + shift) % CLASSES)
        shown = replace(data, domains={**data.domains, "hidden": other})
        plans = plan_module.site_plans(method, shown, split)
        whole = Setting(method, training(), models.parse(CNN), data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
        where = LocalFederation(plans, whole, budget=dict.fromkeys([plan.name for plan in plans], 32), rounds=2)
        states.append(step_on(method, where, start_run(method, where, start_of(method))))
    assert states[0].weights == states[1].weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LeaveOneOut(test_fraction=0), AdaptToOne()])
def test_all_methods_train_on_the_same_number_of_mini_batches(kind: Protocol) -> None:
    """What comes before the first round and what the target trains included; a pool may do the work of all sites."""
    data = data_set([*domains(sizes={"large": 25, "small": 5, "one": 1}), images("hidden", 12)])
    split = kind.split_of(data, "hidden", 0)
    methods = [method_of(name) for name in registry.names() if name != "zero_shot"]  # which trains nowhere
    methods = [method for method in methods if isinstance(kind, AdaptToOne) or not method.traits.needs_target]
    totals = []
    for method in methods:
        shared = budgets.budgets(method, methods, training(rounds=1), split)
        assert shared["large"] > 5  # acquisition costs something
        plans = plan_module.site_plans(method, data, split)
        allowed = budgets.site_budget(shared, plans)
        rounds = budgets.rounds_needed(method, training(rounds=1), split, shared)
        network = network_for(method, CNN, (1, 12, 12))
        whole = Setting(method, training(), network, data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
        where = LocalFederation(plans, whole, budget=allowed, rounds=rounds)
        state = start_run(method, where, start_of(method))
        while not where.is_exhausted():
            state = step_on(method, where, state)
        for site, used in where.progress.used.items():  # a pool trains on a mini-batch of every domain at a time
            assert 0 <= used - where.budget[site] < (len(data.domains) if method.traits.pooled else 1), method.name
        assert state.round == rounds, method.name
        totals.append(sum(where.progress.used.values()))
    # Shares of the total are rounded up, site by site.
    assert max(totals) - min(totals) <= len(data.domains), dict(zip([m.name for m in methods], totals, strict=True))
