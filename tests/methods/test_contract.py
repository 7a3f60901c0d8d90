"""What every method must keep to. Run over the registry: a new method is held to all of it by being registered."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_method import every_method, method_of
from tiny import (
    CLASSES,
    CNN,
    bytes_of,
    data_set,
    domains,
    evaluated,
    federation,
    images,
    normed_for,
    run,
    setting,
    start_of,
    step_on,
    training,
)

from fedshift.data.domain import DataSet, Domain
from fedshift.data.site_data import SiteData
from fedshift.experiment import plan as plan_module
from fedshift.experiment import protocol
from fedshift.experiment.config.sections import AdaptToOne, LeaveOneOut, Protocol
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.federation import known_kinds
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.setting_json import setting_from, setting_recipe
from fedshift.federation.site_runner import Setting
from fedshift.methods import registry
from fedshift.methods.base import State
from fedshift.models import registry as models
from fedshift.weights import Weights


@functools.cache
def played(name: str, normed: bool = False) -> tuple[State, LocalFederation, int]:
    """Two rounds at sites that refuse what the method does not declare, and how many samples were drawn to train on.

    Tests read it and change nothing.
    """
    method = method_of(name)
    drawn, batch = 0, SiteData.batch

    def counted(self: SiteData, rows: torch.Tensor, generator: torch.Generator | None = None) -> Any:
        nonlocal drawn
        drawn += 0 if generator is None else len(rows)  # without one: not for training
        return batch(self, rows, generator)

    refused = sorted(set(known_kinds()) - set(method.shares))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteData, "batch", counted)
        state, where = run(method, network=normed_for(method) if normed else CNN, refuse=refused)
    assert isinstance(where, LocalFederation)
    return state, where, drawn


def assert_close(first: Weights, second: Weights) -> None:
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, atol=1e-6, rtol=1e-5)


# What a method says of itself -----------------------------------------------------------------------------------------


@every_method
def test_it_says_what_it_is(name: str) -> None:
    kind = registry.method_class(name)
    assert kind.name == name
    for text in (kind.citation, kind.scenario, inspect.getdoc(kind)):
        assert text
        assert text.strip()
    assert any(character.isdigit() for character in kind.citation), "a citation has a year"
    assert kind.round.__qualname__.split(".")[0] != "Method"
    assert {"weights", "numbers"} <= set(kind().shares) <= set(known_kinds())
    assert kind.pooled == ("raw_data" in kind().shares)


@every_method
def test_its_file_reads_like_its_paper(name: str) -> None:
    text = sys.modules[registry.method_class(name).__module__].__doc__ or ""
    for part in ("Setting", "ire:", "Where", "Should reproduce"):
        assert part in text, f"the module's docstring lacks '{part}'"


@every_method
def test_every_option_is_described_and_has_a_default(name: str) -> None:
    kind = registry.method_class(name)
    for field_name, field in kind.model_fields.items():
        assert field.description, f"{name}.{field_name} has no description"
        assert not field.is_required(), f"{name}.{field_name} has no default"
    method = kind()
    with pytest.raises(ValueError, match="frozen"):
        method.label = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        method_of(name, no_such_option=1)
    assert method.display == name
    assert method_of(name, label="mine").display == "mine"


@every_method
def test_another_process_can_make_its_equal(name: str) -> None:
    whole = setting(method_of(name, label="mine"), domains(), CNN, 5, refuse=["features"], lr=0.3, augmentation="ccst")
    again = setting_from(json.loads(json.dumps(setting_recipe(whole))))
    assert again == whole
    assert type(again.method) is type(whole.method)
    first, second = again.build_network().state_dict(), whole.build_network().state_dict()
    assert Weights(first) == Weights(second)


# What a run gives -----------------------------------------------------------------------------------------------------


@every_method
def test_same_seed_same_weights_another_seed_others(name: str) -> None:
    method = method_of(name)
    state, *_ = played(name)
    torch.rand(3)  # what the caller drew before does not matter
    again, _ = run(method)
    assert again.weights == state.weights
    assert again.report == state.report
    other, _ = run(method, seed=4)
    assert other.weights != state.weights


@every_method
def test_it_trains(name: str) -> None:
    """Less loss on the labelled samples than equal probabilities have, on separable classes."""
    method = method_of(name)
    budget = 240 if method.pooled and method.needs_target else 60  # a step of theirs takes a batch of all four domains
    network = normed_for(method)
    state, where = run(method, network=network, rounds=6, lr=0.1, momentum=0.9, budget=budget)
    assert isinstance(where, LocalFederation)
    assert state.round == 6
    model = evaluated(method, state.weights, network=network)
    total, samples = 0.0, 0
    for site in (runner.site for runner in where._runners.values() if runner.site.role == "source"):
        with torch.no_grad():
            for batch in site.all_batches():
                scores = model(batch.inputs)
                assert scores.shape == (len(batch.inputs), CLASSES)
                total += torch.nn.functional.cross_entropy(scores, batch.targets, reduction="sum").item()
                samples += len(batch.inputs)
    assert total < 0.85 * samples * np.log(CLASSES)


@every_method
def test_the_order_of_sites_does_not_matter(name: str) -> None:
    method = method_of(name)
    if method.pooled or method.supervised_target:
        pytest.skip("one site")
    first, _ = run(method, rounds=1)
    second, _ = run(method, [domains()[index] for index in (2, 0, 1)], rounds=1)
    assert_close(first.weights, second.weights)


@every_method
def test_weights_keep_names_shapes_and_types(name: str) -> None:
    method = method_of(name)
    normed = normed_for(method)
    state, *_ = played(name, normed=True)
    start = setting(method, domains(normed), normed, 8).build_network()
    network = method.evaluated_network(start, len(domains(normed)))
    state.weights.check_like(network.state_dict(), "the model after a run")


@every_method
def test_a_method_changes_nothing_it_was_given(name: str) -> None:
    method, start = method_of(name), start_of(method_of(name))
    where = federation(method)
    state = method.start(where, start)
    kept = state.weights.clone()
    step_on(method, where, state)
    assert start == start_of(method)
    assert state.weights == kept


# What it may see and send ---------------------------------------------------------------------------------------------


class Untouchable(Domain):
    """A domain of which nothing may be read."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        if name in ("inputs", "labels", "groups", "train_rows", "test_rows", "name"):
            raise AssertionError(f"'{name}' of the unseen site was read")
        return super().__getattribute__(name)


@every_method
def test_the_unseen_site_is_never_touched(name: str) -> None:
    method = method_of(name)
    if method.needs_target:
        pytest.skip("the target takes part")
    data = data_set([images("hidden", 12), *domains()])
    split = protocol.split_of(LeaveOneOut(test_fraction=0), data, "hidden", 0)
    poisoned = DataSet(
        data.name, {**data.domains, "hidden": Untouchable()}, data.classes, data.preprocessing, data.manifest
    )
    with pytest.raises(AssertionError, match="of the unseen site was read"):
        _ = poisoned.domains["hidden"].inputs
    plans = plan_module.site_plans(method, poisoned, split)
    whole = Setting(method, training(), models.parse(CNN), data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
    names = [plan.name for plan in plans]
    assert "hidden" not in names
    where = LocalFederation(plans, whole, budget=dict.fromkeys(names, 100), rounds=1)
    state = step_on(method, where, method.start(where, start_of(method)))
    assert state.round == 1
    assert {entry.site for entry in where.ledger.entries} <= set(names)


@every_method
def test_the_labels_of_a_target_that_takes_part_change_nothing(name: str) -> None:
    method = method_of(name)
    if not method.needs_target or method.supervised_target:
        pytest.skip("no target, or one with labels")
    data = data_set([images("hidden", 20), *domains()])
    split = protocol.split_of(AdaptToOne(), data, "hidden", 0)
    assert not set(split.unlabelled["hidden"]) & set(split.measured["hidden"])
    states = []
    for shift in (0, 1):
        other = replace(data.domains["hidden"], labels=(data.domains["hidden"].labels + shift) % CLASSES)
        shown = replace(data, domains={**data.domains, "hidden": other})
        plans = plan_module.site_plans(method, shown, split)
        whole = Setting(method, training(), models.parse(CNN), data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
        where = LocalFederation(plans, whole, budget=dict.fromkeys([plan.name for plan in plans], 100), rounds=2)
        states.append(step_on(method, where, method.start(where, start_of(method))))
    assert states[0].weights == states[1].weights


@every_method
def test_only_declared_kinds_leave_and_no_others_are_needed(name: str) -> None:
    _, where, _ = played(name)
    assert where.ledger.total["up"]
    assert set(where.ledger.total["up"]) <= set(method_of(name).shares)


@every_method
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "batch_norm"])
def test_the_bytes_of_a_run_are_foretold(name: str, normed: bool) -> None:
    """By a dry run of two samples a site, and by what the method adds to it."""
    method = method_of(name)
    network = normed_for(method) if normed else CNN
    _, where, drawn = played(name, normed)
    foretold = bytes_of(method, where, network, rounds=2, trained=drawn)
    assert sum(where.ledger.total["up"].values()) == foretold.up
    assert sum(where.ledger.total["down"].values()) == foretold.down


@every_method
def test_memory_is_declared_and_state_survives_a_file(name: str, tmp_path: Path) -> None:
    """Saved after the start and each round, each time loaded into fresh sites: the run ends with the same bits."""
    method = method_of(name)
    options: dict[str, Any] = {"reset_optimizer_each_round": False, "momentum": 0.9, "rounds": 2}
    whole, one = run(method, **options)
    folder = RunFolder(tmp_path, {"name": name})
    where = federation(method, **options)
    state = method.start(where, start_of(method))
    for _ in range(2):
        where.settle()
        header = {"exchange": where.progress.exchange, "used": where.progress.used}
        folder.save_checkpoint(state, where.save_memory(folder.memory), header)
        found = folder.load_checkpoint()
        assert found is not None
        loaded, header = found
        assert (loaded.weights, loaded.round, dict(loaded.numbers)) == (state.weights, state.round, dict(state.numbers))
        assert dict(loaded.parts) == dict(state.parts)
        where = federation(method, **options)
        where.progress.exchange, where.progress.used = header["exchange"], header["used"]
        where.load_memory(folder.memory, header["memory"])
        state = step_on(method, where, loaded)
    assert state.weights == whole.weights
    assert where.progress == one.progress
    assert isinstance(where, LocalFederation)
    for runner in where._runners.values():
        assert set(runner.site.memory) <= set(method.memory_names)


# How much it may train ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LeaveOneOut(test_fraction=0), AdaptToOne()])
def test_all_methods_train_on_the_same_number_of_mini_batches(kind: Protocol) -> None:
    """What comes before the first round and what the target trains included; a pool may do the work of all sites."""
    data = data_set([*domains(), images("hidden", 12)])
    split = protocol.split_of(kind, data, "hidden", 0)
    methods = [method_of(name) for name in registry.names()]
    methods = [method for method in methods if isinstance(kind, AdaptToOne) or not method.needs_target]
    totals = []
    for method in methods:
        budget = plan_module.budgets(method, methods, training(), split)
        assert budget["large"] > 2 * 5  # acquisition costs something
        plans = plan_module.site_plans(method, data, split)
        allowed = plan_module.site_budget(budget, plans)
        rounds = plan_module.rounds_needed(method, training(), split, budget)
        whole = Setting(method, training(), models.parse(CNN), data.preprocessing, (1, 12, 12), CLASSES, 3, 0, "cpu")
        where = LocalFederation(plans, whole, budget=allowed, rounds=rounds)
        state = method.start(where, start_of(method))
        while not where.exhausted():
            state = step_on(method, where, state)
        for site, used in where.progress.used.items():  # a pool trains on a mini-batch of every domain at a time
            assert 0 <= used - where.budget[site] < (len(data.domains) if method.pooled else 1), method.name
        assert state.round == rounds, method.name
        totals.append(sum(where.progress.used.values()))
    # Shares of the total are rounded up, site by site.
    assert max(totals) - min(totals) <= len(data.domains), dict(zip([m.name for m in methods], totals, strict=True))


@every_method
def test_mini_batches_are_as_announced(name: str) -> None:
    method = method_of(name)
    if method.pooled or method.supervised_target:
        pytest.skip("one site trains its share of what the others need")
    _, where, _ = played(name)
    for site, per_epoch in (("large", 5), ("small", 1), ("one", 1)):
        assert where.progress.used[site] == method.mini_batches(per_epoch, 2)
