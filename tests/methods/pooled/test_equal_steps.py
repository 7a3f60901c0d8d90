"""Optimiser steps of the pooled methods: counted, foretold, and equal where the setting says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_method import method_of, mostly_slow
from pooled_step import assert_same, deepall_step, domain_batches, pool, step
from pydantic import ValidationError
from tiny import CNN, NORMED_CNN, domains, federation, run, start_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedshift.errors import UserError
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.federation.site_base import parts_of
from fedshift.methods import registry
from fedshift.methods.pooled.adaptation import PooledAdaptation
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.pooled.equal_steps import steps_of_run
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network

POOLED = [name for name in registry.names() if registry.method_class(name).traits.pooled]
APART = [
    name
    for name in POOLED
    if issubclass(kind := registry.method_class(name), DomainTraining) and not kind.traits.needs_target
]
"""Those that need the domains of the sources apart."""
ADAPTING = [name for name in POOLED if issubclass(registry.method_class(name), PooledAdaptation)]
SIZES = {"north": 30, "south": 20, "west": 25}
BUDGET = 24
"""Mini-batches of a run: steps of 3 domains and of 4 come out even, in each of 2 rounds."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, site: Site) -> Iterator[list[int]]:
    """An entry for each step of an optimiser that moves the published network: mini-batches drawn so far."""
    models: list[Network] = []
    made = Site.model

    def noted(self: Site, weights: Any = None) -> Network:
        models.append(made(self, weights))
        return models[-1]

    def moves(optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = {id(parameter) for model in models for parameter in model.parameters()}
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if any(id(parameter) in own for parameter in trained):
            steps.append(site.mini_batches)

    steps: list[int] = []
    handle = register_optimizer_step_pre_hook(moves)
    monkeypatch.setattr(Site, "model", noted)
    try:
        yield steps
    finally:
        handle.remove()
        monkeypatch.undo()


def measured(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, int, float]:
    """Steps of the published network, mini-batches that were used, and steps foretold."""
    method = method_of(name, **options)
    network: Mapping[str, object] = NORMED_CNN if name == "dsbn" else CNN
    found = domains(network, SIZES)
    where = federation(method, found, network, budget=BUDGET)
    assert isinstance(where, LocalFederation)
    with counted(monkeypatch, where._runners["pool"].site) as steps:
        state = method.start(where, start_of(method, found, network))
        for where.round in (1, 2):
            state = method.round(where, state)
            where.settle()
    sources = dict.fromkeys(SIZES, BUDGET // 3)
    target = {"target": 0} if not method.traits.needs_target else {"target": 1}
    foretold = steps_of_run(method, {**sources, "north": BUDGET // 3 - sum(target.values()), **target})
    assert foretold is not None
    return len(steps), where.progress.used["pool"], foretold


@pytest.mark.parametrize("name", mostly_slow(POOLED))
def test_of_one_mini_batch_each_every_method_makes_as_many_steps_as_deepall(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But M3SDA, whose A, B and C are steps of their own on the same samples, Fish, which steps on every part, and
    SagNet, whose turns of content and adversary do."""
    options = {"domain_batches": "split"} if name in (*APART, *ADAPTING) else {}
    steps, used, foretold = measured(name, monkeypatch, **options)
    of_deepall, its_samples, _ = measured("deepall", monkeypatch)
    times = {"m3sda": 3, "fish": 3, "sagnet": 2}.get(name, 1)  # A, B and, in the tests' setting, one C
    assert (used, steps) == (its_samples, times * of_deepall) == (BUDGET, times * BUDGET)
    assert foretold == steps


@pytest.mark.parametrize("name", mostly_slow(POOLED))
def test_of_a_mini_batch_of_each_domain_every_method_makes_a_part_of_the_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third with three domains, a quarter with the target. In MetaReg's stage 1 and in Fish each domain makes one."""
    steps, used, foretold = measured(name, monkeypatch, domain_batches="full")
    domain = 4 if name in ADAPTING else 3
    others = {"m3sda": 3 * BUDGET // 4, "metareg": BUDGET, "fish": BUDGET, "sagnet": 2 * BUDGET // 3}
    wanted = others.get(name, BUDGET // domain)
    assert (used, steps) == (BUDGET, wanted)
    if name == "metareg":  # here all of it is in rounds that begin in stage 1
        assert foretold == 0.75 * BUDGET + 0.25 * BUDGET / 3
    else:
        assert foretold == steps


def test_metareg_s_second_stage_draws_as_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for how, steps in (("full", BUDGET // 2 + BUDGET // 2 // 3), ("split", BUDGET)):
        assert measured("metareg", monkeypatch, meta_share=0.5, domain_batches=how) == (steps, BUDGET, steps)


def test_full_is_the_way_of_the_committed_results_and_mixed_batches_are_deepall_s() -> None:
    for name in POOLED:
        found = registry.method_class(name)().model_dump()["domain_batches"]
        assert found == ("full" if name in (*APART, *ADAPTING) else None)


@pytest.mark.parametrize(("how", "counts"), [("full", 3), ("split", 1)])
def test_deepall_on_domain_batches_by_hand(how: str, counts: int) -> None:
    site, weights, model = pool(DeepAll(domain_batches=how), batch_size=8)
    sources = domain_batches(site) if how == "full" else next(site.domain_batches(1, split=True))[0]
    site.mini_batches = 0
    assert [len(batch.inputs) for batch in sources] == ([8, 8, 8] if how == "full" else [3, 3, 2])
    inputs, labels = (torch.cat(list(part)) for part in zip(*((b.inputs, b.targets) for b in sources), strict=True))
    expected = deepall_step(site, weights, F.cross_entropy(model(inputs), labels), model)
    assert_same(step(DeepAll(domain_batches=how), site, weights, mini_batches=counts).weights, expected)


def test_a_step_has_as_many_samples_as_a_mini_batch_and_equally_many_of_each_domain() -> None:
    site, _, _ = pool(DeepAll(domain_batches="split"), batch_size=6)
    batches = list(DeepAll(domain_batches="split").of_all(site, 12))
    assert [len(batch.inputs) for batch in batches] == [6] * 12
    assert site.mini_batches == 12
    assert torch.cat([batch.domains for batch in batches]).bincount().tolist() == [24, 24, 24]
    rows = torch.cat([batch.rows[batch.domains == 1] for batch in batches])  # of 8 samples: three passes
    assert sorted(rows.tolist()) == sorted([*range(16, 24)] * 3)


@pytest.mark.parametrize(("size", "number", "parts"), [(64, 5, [13, 13, 13, 13, 12]), (8, 4, [2, 2, 2, 2])])
def test_parts_of_a_mini_batch(size: int, number: int, parts: list[int]) -> None:
    assert parts_of(size, number) == parts


def test_a_mini_batch_too_small_for_its_domains_is_refused_before_training() -> None:
    with pytest.raises(UserError, match="batch_size") as refused:
        run(DeepAll(domain_batches="split"), domains(CNN, SIZES), batch_size=5)
    assert "\n" not in str(refused.value)
    run(DeepAll(domain_batches="split"), domains(CNN, SIZES), batch_size=6)


def test_the_domain_of_a_mini_batch_that_another_option_draws_is_refused() -> None:
    with pytest.raises(ValidationError, match="cross_domain"):
        method_of("mixstyle", partners="cross_domain", domain_batches="split")
    with pytest.raises(ValidationError, match="domain_batches"):
        method_of("masf", domain_batches=None)


def test_fact_s_epochs_are_passes_over_the_samples_however_a_step_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for how, epochs in ((None, [0, 0, 1, 1]), ("full", [0, 1, 2, 3])):  # an epoch: 2 of 48 samples at 24
        method: Any = method_of("fact", domain_batches=how)
        site, weights, _ = pool(method, batch_size=24 if how is None else 16)
        seen: list[int] = []

        def loss(self: Any, model: Network, teacher: Any, batch: Any, mixed: Any, epoch: int) -> torch.Tensor:
            seen.append(epoch)  # noqa: B023
            return F.cross_entropy(model(batch.inputs), batch.targets)

        monkeypatch.setattr(type(method), "loss", loss)
        method.fit(site, weights, steps=4 if how is None else 12)
        assert seen == epochs
