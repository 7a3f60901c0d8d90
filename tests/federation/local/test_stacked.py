"""Sites trained side by side, against the same sites one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CNN, LINEAR, MLP, NORMED, VECTOR, domains, images, plans, setting, start_of, step_on, training, vectors
from torch import nn

from fedshift.data.domain import Domain
from fedshift.errors import UserError
from fedshift.federation.federation import NOT_DRAWN
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.stacked import check_side_by_side, faster_side_by_side, minimise_together
from fedshift.federation.site import Envelope
from fedshift.methods.base import Method, State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddyn import FedDyn
from fedshift.methods.federated.fednova import FedNova
from fedshift.methods.federated.fedomg import FedOMG
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.federated.fedsam import FedSAM
from fedshift.methods.rounds import start_run
from fedshift.models import registry as models

FOUND = [vectors("small", 5), vectors("large", 41), vectors("one", 1), vectors("middle", 19)]
"""Fewer samples than a mini-batch, a last one that is short, a single sample."""
BUDGETS = {"small": 9, "large": 10, "one": 60, "middle": 4}
"""Of some sites the budget ends within a round."""

CASES: dict[str, tuple[Method, dict[str, object], dict[str, Any]]] = {
    "sgd": (FedAvg(local_epochs=2), MLP, {}),
    "plain sgd": (FedAvg(), LINEAR, {"momentum": 0.0, "weight_decay": 0.1}),
    "decay": (FedAvg(), MLP, {"momentum": 0.9, "weight_decay": 0.1, "reset_optimizer_each_round": False}),
    "nesterov": (FedAvg(local_epochs=2), MLP, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "clipped": (FedAvg(local_epochs=2), MLP, {"clip_norm": 0.3, "momentum": 0.9, "reset_optimizer_each_round": False}),
    "adam": (FedAvg(), MLP, {"optimizer": "adam", "reset_optimizer_each_round": False, "weight_decay": 0.01}),
    "rates": (
        FedAvg(steps_per_round=5),
        MLP,
        {
            "lr_schedule": "cosine",
            "lr_step": "mini_batch",
            "lr_warmup": 0.3,
            "layer_rates": {"features": 0.3},
            "lr": 0.2,
        },
    ),
    "convolutions": (FedAvg(), CNN, {"momentum": 0.9, "weight_decay": 0.1, "reset_optimizer_each_round": False}),
    "convolutions, nesterov, clipped": (FedAvg(), CNN, {"momentum": 0.9, "nesterov": True, "clip_norm": 0.3}),
    "convolutions, fedprox": (FedProx(proximal_weight=0.5), CNN, {"momentum": 0.9}),
    "fedprox": (FedProx(proximal_weight=0.5, weighting="uniform"), MLP, {"momentum": 0.9}),
}


def both(
    method: Method, network: dict[str, object], rounds: int = 3, found: Sequence[Domain] = FOUND, **options: Any
) -> list[tuple[State, LocalFederation]]:
    """So many rounds, one site after the other and side by side."""
    ends = []
    for side_by_side in (False, True):
        chosen = setting(method, found, network, rounds=rounds, **options)
        if found[0].labels.dtype.kind == "f":
            objective = {"task": "regression", "loss": "huber", "mean": 1.0, "std": 2.0}
            chosen = replace(chosen, preprocessing=VECTOR.model_copy(update={"objective": objective}))
        where = LocalFederation(
            plans(method, found), chosen, side_by_side=side_by_side, budget=BUDGETS, rounds=rounds, quorum=1
        )
        state = start_run(method, where, start_of(method, found, network))
        for _ in range(rounds):
            state = step_on(method, where, state)
        ends.append((state, where))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_differ_by_rounding_only(name: str) -> None:
    method, network, options = CASES[name]
    found = [images(domain.name, len(domain)) for domain in FOUND] if network is CNN else FOUND
    (alone, one), (together, other) = both(method, network, found=found, **options)
    start = start_of(method, found, network)
    for key, value in alone.weights.items():
        assert not torch.allclose(value, start[key], rtol=1e-3, atol=1e-3), "it trained"
        assert torch.allclose(together.weights[key], value, rtol=1e-5, atol=2e-5), key
    assert together.report["losses"] == pytest.approx(alone.report["losses"], rel=1e-4)
    assert other.progress == one.progress
    assert other.ledger.total == one.ledger.total
    for site, runner in one._runners.items():
        mine, theirs = runner.site.memory, other._runners[site].site.memory
        assert ("optimizer" in mine) == ("optimizer" in theirs) == (not options.get("reset_optimizer_each_round", True))
        if "optimizer" in mine:
            kept, again = mine["optimizer"], theirs["optimizer"]
            assert set(kept) == set(again)
            assert all(torch.allclose(kept[key], again[key], rtol=1e-3, atol=1e-6) for key in kept), site


def test_another_loss_and_stacks_of_a_few_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.federation.local.stacked.STACKED", 3)
    found = [replace(domain, labels=domain.labels.astype(np.float32)) for domain in FOUND]
    (alone, _), (together, _) = both(FedAvg(), MLP, 1, found)
    assert all(torch.allclose(together.weights[key], value, atol=1e-6) for key, value in alone.weights.items())
    assert together.report["losses"] == pytest.approx(alone.report["losses"], rel=1e-4)


def test_the_loss_of_the_first_mini_batch_is_known() -> None:
    (_, where) = both(FedAvg(steps_per_round=1), MLP, 1)[1]
    weights = start_of(FedAvg(), FOUND, MLP)
    expected = step_on(where.method, where, State(weights)).report["losses"]
    fits = [
        runner.begin("fit", Envelope(2, 1, 0.0, 9 if name != "one" else 0), {"weights": weights})
        for name, runner in where._runners.items()
    ]
    found = dict(zip(where._runners, minimise_together([replace(fit, steps=4) for fit in fits]), strict=True))
    assert found.pop("one") == (0.0, 0.0), "its budget is used"
    assert {name: first for name, (_, first) in found.items()} == pytest.approx(
        {name: expected[name] for name in found}, rel=1e-5
    )
    assert all(abs(mean - first) > 1e-3 for mean, first in found.values())


def test_a_site_that_diverges_is_lost_by_itself() -> None:
    bad = Domain("large", np.full_like(FOUND[1].inputs, 1e30), FOUND[1].labels)
    (alone, one), (together, other) = both(FedAvg(), MLP, 1, [FOUND[0], bad, *FOUND[2:]])
    assert set(one.missing) == set(other.missing) == {"large"}
    assert other.missing["large"].startswith("training turned to ")
    assert all(torch.allclose(together.weights[key], value, atol=1e-6) for key, value in alone.weights.items())


def test_a_site_that_refuses_does_not_train() -> None:
    unwilling = frozenset({"weights"})
    sites = [replace(plan, refuse=unwilling if plan.name == "one" else ()) for plan in plans(FedAvg(), FOUND)]
    chosen = replace(setting(FedAvg(), FOUND, MLP), on_refusal="leave_out")
    where = LocalFederation(
        sites, chosen, side_by_side=True, budget=BUDGETS, rounds=1, quorum=2, on_refusal="leave_out"
    )
    state = step_on(chosen.method, where, State(start_of(FedAvg(), FOUND, MLP)))
    assert set(state.report["losses"]) == {"small", "large", "middle"}
    assert where._runners["one"].site.mini_batches == 0


WRONG: list[tuple[Method, dict[str, object], dict[str, Any], str]] = [
    (FedDyn(), MLP, {}, "feddyn trains in its own way"),
    (FedSAM(), MLP, {}, "plug-ins"),
    (FedNova(), MLP, {}, "fednova trains in its own way"),
    (FedAvg(local=[{"name": "mixup"}]), MLP, {}, "plug-ins"),
    (FedAvg(), {**MLP, "dropout": 0.1}, {}, "without dropout"),
    (FedAvg(), NORMED, {}, "without batch_norm"),
    (FedAvg(), MLP, {"precision": "bf16"}, "training.precision"),
    (FedAvg(), MLP, {"privacy": {"noise_multiplier": 1.0}}, "training.privacy"),
    (FedAvg(), MLP, {"adapters": {}}, "training.adapters"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[3])
def test_what_is_not_covered_is_refused(case: tuple[Method, dict[str, object], dict[str, Any], str]) -> None:
    method, network, options, said = case
    made = setting(method, domains(network), network)
    kinds = {"in_parts": method.calls.come_in_parts, "plugged": bool(method.at_sites(made.input_shape).local)}
    with pytest.raises(UserError, match=rf"engine\.sites: side_by_side: .*{said}.*; or leave it out"):
        check_side_by_side(method.display, made.build_network(), training(**options), made.input_shape, **kinds)


@pytest.mark.parametrize(
    "method", [FedAvg(server={"optimizer": "momentum"}), FedProx(), FedOMG()], ids=lambda m: m.name
)
def test_what_is_covered_is_not(method: Method) -> None:
    made = setting(method, domains(LINEAR), LINEAR)
    kinds = {"in_parts": method.calls.come_in_parts, "plugged": False}
    check_side_by_side(method.display, made.build_network(), made.training, made.input_shape, **kinds)


@pytest.mark.parametrize(
    ("network", "shape", "batch", "faster"),
    [
        (MLP, (1280,), 512, True),
        ({"name": "mnist_cnn"}, (1, 28, 28), 64, False),  # measured: 0.3 to 0.5 times as fast
        (CNN, (1, 12, 12), 4, True),
        (CNN, (1, 12, 12), 512, False),
    ],
)
def test_convolutions_are_worth_it_in_small_steps_only(
    network: dict[str, object], shape: tuple[int, ...], batch: int, faster: bool
) -> None:
    made = models.build(models.parse(network), shape, 3, 0)
    assert faster_side_by_side(made, shape, batch) == faster


class Branches(nn.Module):
    """A forward pass that depends on a value, which torch.func cannot follow."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_a_network_that_looks_at_its_values_is_refused() -> None:
    made = setting(FedAvg(), FOUND, MLP)
    plain = made.build_network()
    network = plain.with_parts(nn.Sequential(Branches(), plain.features), plain.classifier, moved_to="1")
    with pytest.raises(UserError, match="cannot stack the network"):
        check_side_by_side("FedAvg", network, made.training, made.input_shape, in_parts=True, plugged=False)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_drawn_sites_keep_no_converted_samples_and_end_in_the_same_bits(side_by_side: bool) -> None:
    ends, told = [], []
    for drawn in (None, len(FOUND), 2):
        chosen = setting(FedAvg(), FOUND, MLP, rounds=2)
        where = LocalFederation(
            plans(FedAvg(), FOUND),
            chosen,
            side_by_side=side_by_side,
            budget=BUDGETS,
            rounds=2,
            per_round=drawn,
            on_answer=lambda site, number: told.append((site, number)),
        )
        state = State(start_of(FedAvg(), FOUND, MLP))
        for _ in range(2):
            state = step_on(chosen.method, where, state)
        ends.append((state, [runner.site.data._cache is None for runner in where._runners.values()]))
    (kept, caches), (drawn_all, gone), (few, few_gone) = ends
    assert not any(caches)
    assert all(gone)
    assert all(few_gone)
    assert drawn_all.weights == kept.weights != few.weights
    apart = [number for site, number in told if site == NOT_DRAWN]
    assert len(apart) == 2, "once an exchange, for all of them"
    assert sum(apart) == where.progress.undrawn > 0
