"""Plug-ins with pooled methods: which go, what they do there, and what refuses the others."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_method import method_of, mostly_slow
from pooled_step import assert_same, deepall_step, mixed_batch, pool, step
from pydantic import ValidationError
from tiny import CNN, NORMED_CNN, domains, run

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch, with_labelled
from fedshift.methods import registry
from fedshift.methods.composition.local import PLUG_INS
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.recipe import SHAPES
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.pooled.fact import FACT

POOLED = [name for name in registry.names() if registry.method_class(name).traits.pooled]
OPTIONS: dict[str, dict[str, Any]] = {
    "augment": {"by": {"shear": 0.3, "shift": 0.1}},
    "cutmix": {"probability": 1.0},
    "mixstyle": {"probability": 1.0},
    "jigsaw": {"ordered": 0.0},
}
ON_IMAGES = [name for name in PLUG_INS if name != "stochastic_depth"]
"""All but the one that needs a network with residual blocks."""
SIZES = {"north": 12, "south": 9, "west": 10}


def option_of(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {}), **more}


@functools.cache
def goes_with(name: str) -> list[str]:
    """The plug-ins that the method does not refuse."""
    fitting = []
    for plug_in in ON_IMAGES:
        with contextlib.suppress(ValidationError):
            method_of(name, local=[option_of(plug_in)])
            fitting.append(plug_in)
    return fitting


def trained(method: Any, budget: int = 8) -> tuple[Any, LocalFederation]:
    network = NORMED_CNN if method.name == "dsbn" else CNN
    state, where = run(method, domains(network, SIZES), network, rounds=1, budget=budget)
    assert isinstance(where, LocalFederation)
    return state, where


def test_most_methods_take_some() -> None:
    assert sum(bool(goes_with(name)) for name in POOLED) > 0.8 * len(POOLED)
    assert goes_with("deepall") == ON_IMAGES


@pytest.mark.parametrize("name", mostly_slow(name for name in POOLED if goes_with(name)))
def test_those_that_go_change_the_result_and_nothing_else(name: str) -> None:
    plain, where = trained(method_of(name))
    sent = where.ledger.settle()[1]
    others = []
    for plug_in in goes_with(name):
        state, plugged = trained(method_of(name, local=[option_of(plug_in)]))
        assert all(tensor.isfinite().all() for tensor in state.weights.values())
        assert state.weights != plain.weights, plug_in
        assert set(state.weights) == set(plain.weights)
        assert plugged.ledger.settle()[1] == sent
        assert plugged.progress.used == where.progress.used
        site = plugged._runners["pool"].site
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in site.network.modules())
        assert (plug_in in site.memory) == (plug_in in ("jigsaw", "triplets"))
        others.append(state.weights)
    assert all(one not in others[:number] for number, one in enumerate(others))


@pytest.mark.parametrize("name", mostly_slow(POOLED))
def test_the_others_are_refused_with_the_reason(name: str) -> None:
    for plug_in in (one for one in ON_IMAGES if one not in goes_with(name)):
        with pytest.raises(ValidationError) as refused:
            method_of(name, local=[option_of(plug_in)])
        said = refused.value.errors()[0]["msg"]
        assert "\n" not in said
        assert name in said
        assert "leave it out" in said
        if registry.method_class(name).traits.takes_plug_ins:
            assert f"local: {plug_in} does not go with {name}, wh" in said
    assert set(registry.method_class(name).traits.unfit_plug_ins) <= set(PLUG_INS)


@pytest.mark.parametrize(
    "local",
    [[{"name": "augment", "by": SHAPES.model_dump()}, "mixup", "label_smoothing"], ON_IMAGES[::2], ON_IMAGES[1::2]],
    ids=["recipe", "one half", "other half"],
)
def test_deepall_of_one_domain_is_fedavg_at_one_site(local: list[Any]) -> None:
    """Bit for bit, with the plug-ins' heads and their memory over two rounds."""
    chosen = [option_of(one) if isinstance(one, str) else one for one in local]
    options: Any = {"found": domains(CNN, {"pool": 21}), "rounds": 2, "budget": 6}
    here, there = (run(kind(local=chosen), **options)[0].weights for kind in (DeepAll, FedAvg))
    assert here == there
    assert here != run(DeepAll(), **options)[0].weights


@pytest.mark.parametrize(
    "option",
    [
        {"name": "mixup", "probability": 0.0},
        {"name": "cutmix", "probability": 0.0},
        {"name": "mixstyle", "probability": 0.0},
        {"name": "dropout", "rate": 0.0},
        {"name": "amplitude_mix", "share": 0.0},
        {"name": "label_gradient", "share": 0.0},
        {"name": "label_smoothing", "smoothing": 0.0},
        {"name": "jigsaw", "weight": 0.0},
    ],
    ids=lambda option: option["name"],
)
def test_a_plug_in_of_no_strength_is_none(option: dict[str, Any]) -> None:
    plain, found = trained(DeepAll())[0].weights, trained(DeepAll(local=[option]))[0].weights
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)


def test_mixup_mixes_the_samples_of_all_domains_by_hand() -> None:
    method = DeepAll(local=[{"name": "mixup", "alpha": 1.0}])
    site, weights, model = pool(method)
    batch = mixed_batch(site)
    assert len(batch.domains.unique()) > 1
    draws = site.generator_for("mixup")
    torch.rand((), generator=draws)
    order = torch.randperm(len(batch.inputs), generator=draws)
    logs = torch.rand(2, 4, generator=draws, dtype=torch.float64).log()  # Beta(1, 1), as Jöhnk draws it
    total = torch.logaddexp(logs[0], logs[1])
    share = float((logs[0] - total).exp()[total <= 0][0])
    said = model(share * batch.inputs + (1 - share) * batch.inputs[order])
    soft = share * F.one_hot(batch.targets, 3) + (1 - share) * F.one_hot(batch.targets[order], 3)
    expected = deepall_step(site, weights, F.cross_entropy(said, soft), model)
    site.plug_ins = method.calls.plug_ins(site)
    assert_same(step(method, site, weights).weights, expected)


def test_what_a_step_draws_is_changed_where_it_has_labels() -> None:
    """Every source's batch, in a method's own tuples; not the target's, nor what is no batch."""
    site, _, _ = pool(method_of("mdan"))
    (first, *_), target = drawn = next(site.domain_batches(1))
    assert target is not None
    asked: list[Batch] = []

    def noted(batch: Batch) -> Batch:
        asked.append(batch)
        return first

    phase, (sources, other) = with_labelled(("A", drawn), noted)
    assert (phase, sources, len(asked)) == ("A", (first, first, first), 3)
    assert other is target
    assert with_labelled(None, noted) is None
    assert with_labelled(first, noted) is first


def test_fact_s_teacher_follows_once_a_step_however_often_the_loss_is_asked() -> None:
    method = FACT(local=[{"name": "mixup", "alpha": 1.0}, "sharpness"])
    site, weights, _ = pool(method)
    site.plug_ins = method.calls.plug_ins(site)
    step(method, site, weights, steps=3)
    assert int(site.memory.weights("parts")["steps"]) == 3


def test_plug_ins_go_with_batches_of_domains_in_deepall() -> None:
    """Mixup then mixes domains, of which each has its part."""
    plain, mixed = (trained(DeepAll(domain_batches="split", local=local))[0].weights for local in ([], ["mixup"]))
    assert plain != mixed
