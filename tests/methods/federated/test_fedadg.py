"""FedADG against its equations: who moves in which step, what travels, what stays, and which epoch is kept."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from lost import site_of
from tiny import CNN, MLP, NORMED, data_set, federation, images, run, start_of, step_on, training, vectors
from torch import Tensor

from fedshift.data.site_data import SiteData
from fedshift.experiment import plan as plan_module
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation, WorkerPool
from fedshift.federation.site import Site
from fedshift.federation.site_runner import Setting
from fedshift.methods.federated.fedadg import FedADG, WithGenerator, _accuracy, _discriminator, _Game
from fedshift.models import registry as models
from fedshift.weights import Weights

Tensors = dict[str, Tensor]


def short(**options: Any) -> FedADG:
    return FedADG(**{"task_epochs": 1, "adversarial_epochs": 1, **options})


def features(values: Tensors, inputs: Tensor) -> Tensor:
    for layer in ("hidden1", "hidden2"):
        inputs = (inputs @ values[f"features.{layer}.0.weight"].T + values[f"features.{layer}.0.bias"]).relu()
    return inputs


def generated(values: Tensors, noise: Tensor, condition: Tensor) -> Tensor:
    hidden = (
        torch.cat([noise, condition], 1) @ values["generator.layers.0.weight"].T + values["generator.layers.0.bias"]
    )
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return (hidden @ values["generator.layers.2.weight"].T + values["generator.layers.2.bias"]).relu()


def answer(critic: Tensors, found: Tensor, condition: Tensor) -> Tensor:
    joined = torch.cat([found @ critic["projection"].T, condition], 1)
    hidden = joined @ critic["layers.0.weight"].T + critic["layers.0.bias"]
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return (hidden @ critic["layers.2.weight"].T + critic["layers.2.bias"]).sigmoid()


def error(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    wanted = torch.full_like(logits, smoothing / (logits.shape[1] - 1))
    wanted[torch.arange(len(labels)), labels] = 1 - smoothing
    return -(wanted * logits.log_softmax(1)).sum(1).mean()


def descend(values: Tensors, names: list[str], loss: Tensor, rate: float) -> None:
    slopes = torch.autograd.grad(loss, [values[name] for name in names])
    for name, slope in zip(names, slopes, strict=True):
        values[name] = (values[name] - rate * slope).detach().requires_grad_()


@pytest.mark.parametrize(
    ("options", "form", "squares", "projects"),
    [
        ({}, "formula", False, False),
        ({"setting": "least_squares"}, "formula", True, False),
        ({"generator": "towards_features"}, "towards_features", False, False),
        ({"generator": "frozen"}, "frozen", False, False),
        ({"setting": "released", "warm_up": None}, "towards_features", True, True),
        (
            {"setting": "released_vlcs", "warm_up": None, "condition": "after", "condition_value": 0.7},
            "frozen",
            False,
            True,
        ),
    ],
    ids=str,
)
def test_a_round_is_the_equations(options: dict[str, Any], form: str, squares: bool, projects: bool) -> None:
    """One site of 8 samples, one epoch on the task and two of the game, by hand with plain tensors.

    squares: D has the least-squares loss. projects: D trains its projection.
    """
    usual = {"adversarial_epochs": 2, "label_smoothing": 0.2, "adversarial_weight": 0.4, "noise": 2}
    method = short(**{**usual, **options})
    found = [vectors("alone", 8)]
    where = federation(method, found, MLP, rounds=1, momentum=0.0, batch_size=8, lr=0.5)
    start = start_of(method, found, MLP)
    state = step_on(method, where, method.start(where, start))
    values = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    site = site_of(where, "alone")
    inputs, labels, _ = next(site.data.all_batches(8))
    main = [name for name in values if not name.startswith("generator")]
    maker = [name for name in values if name.startswith("generator")]

    # The site's discriminator before the round: what a round without training of it leaves there.
    still = short(adversary_rate=0.0, noise=2, trainable_projection=projects)
    untouched = federation(still, found, MLP, rounds=1, batch_size=8)
    step_on(untouched.method, untouched, untouched.method.start(untouched, start))  # type: ignore[arg-type, attr-defined]
    critic = {
        n: t.clone().requires_grad_() for n, t in site_of(untouched, "alone").memory.weights("discriminator").items()
    }
    trained = [name for name in critic if projects or name != "projection"]

    site.begin(type(site.envelope)(1, 1, 0.0, 100))
    noises = site.generator_for("noise")
    logits = features(values, inputs) @ values["classifier.weight"].T + values["classifier.bias"]
    losses = [error(logits, labels, 0.2)]
    descend(values, main, losses[0], 0.5)
    batches = [next(iter(site.batches())) for _ in range(3)][1:]  # the orders of the two epochs of the game
    for batch in batches:
        condition = 0.7 * F.one_hot(batch.targets, 3).float()
        noise = torch.rand(8, 2, generator=noises)
        h, made = features(values, batch.inputs), generated(values, noise, condition)
        of_made, of_found = answer(critic, made.detach(), condition), answer(critic, h.detach(), condition)
        terms = (1 - of_made) ** 2 + of_found**2 if squares else -(of_made**2) - (1 - of_found) ** 2
        loss = terms.mean()
        descend(critic, trained, loss, 0.35)
        alignment = (1 - answer(critic, h, condition)).square().mean()
        logits = h @ values["classifier.weight"].T + values["classifier.bias"]
        losses.append(0.6 * error(logits, batch.targets, 0.2) + 0.4 * alignment)
        descend(values, main, losses[-1], 0.5)
        if form != "frozen":
            said = answer(critic, generated(values, noise, condition), condition)
            descend(values, maker, ((1 - said) if form == "formula" else said).square().mean(), 0.35)
    assert state.report["losses"]["alone"] == pytest.approx(sum(loss.item() for loss in losses) / 3, abs=1e-5)
    for name, tensor in state.weights.merge(cast(Weights, state.parts["generator"])).items():
        torch.testing.assert_close(tensor, values[name].detach(), atol=3e-6, rtol=1e-5)
    for name, tensor in site.memory.weights("discriminator").items():
        torch.testing.assert_close(tensor, critic[name].detach(), atol=3e-6, rtol=1e-5)
    moved = any(not torch.equal(values[name], start[name]) for name in maker)
    assert moved == (form != "frozen")


def test_the_discriminator_never_travels_and_differs_between_sites() -> None:
    method = short()
    state, where = run(method, network=NORMED)
    kept = [site_of(where, name).memory.weights("discriminator") for name in where.sources]
    assert not torch.equal(kept[0]["projection"], kept[1]["projection"])
    for critic in kept:
        assert critic["projection"].norm().item() == pytest.approx(1, abs=1e-6)
    assert {entry.field for entry in where.ledger.entries if entry.kind == "weights"} == {"weights", "generator"}
    assert set(state.parts) == {"generator"}
    assert not any(name.startswith(("generator", "projection")) for name in state.weights)


def test_the_projection_of_the_paper_has_its_width() -> None:
    method = FedADG(projection=1024, condition="before")
    _, where = run(method.model_copy(update={"task_epochs": 0, "adversarial_epochs": 1}), rounds=1)
    critic = site_of(where, "large").memory.weights("discriminator")
    assert critic["projection"].shape == (1024, 6 + 3)  # features and classes
    assert critic["layers.0.weight"].shape == (1024, 1024)


@pytest.mark.parametrize(("setting", "epochs"), [("released", 100), ("released_vlcs", 500)])
def test_the_released_warm_up_hardly_trains(setting: str, epochs: int) -> None:
    """Counted in local epochs over all rounds: the first has 1e-7, then the rate grows to the whole."""
    method = short(setting=setting)
    found = [vectors("alone", 8)]
    where = federation(method, found, MLP, rounds=1, lr=0.5)
    method.start(where, start_of(method, found, MLP))
    site = site_of(where, "alone")
    game = _Game(method, site, cast(WithGenerator, site.model()))
    for epoch, rate in ((0, 1e-7), (3, 0.5 * 3 / epochs), (epochs, 0.5), (9 * epochs, 0.5)):
        game.set_rates(epoch)
        assert game.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert game._for_generator.param_groups[0]["lr"] == pytest.approx(0.7 * rate)


def test_the_code_for_vlcs_projects_features_and_class_together() -> None:
    method = short(setting="released_vlcs")
    found = [vectors("alone", 8)]
    where = federation(method, found, MLP, rounds=1)
    method.start(where, start_of(method, found, MLP))
    site = site_of(where, "alone")
    critic = _discriminator(method, site, cast(WithGenerator, site.model()))
    d = site.model().embedding_size
    h = torch.rand(4, d)
    y = 0.6 * F.one_hot(torch.tensor([0, 1, 2, 1]), 3).float()
    assert method.condition_value == 0.6
    joined = torch.cat([h, y], 1) @ critic.projection.T
    torch.testing.assert_close(critic(h, y), critic.layers(joined))
    assert critic.projection.requires_grad


def held_out(method: FedADG, pool: WorkerPool | None = None) -> tuple[Federation, Any]:
    data = data_set([images("a", 30), images("b", 30), images("hidden", 9)])
    split = LeaveOneOut(test_fraction=0.3).split_of(data, "hidden", 0)
    plans = plan_module.site_plans(method, data, split)
    whole = Setting(method, training(lr=0.3), models.parse(CNN), data.preprocessing, (1, 12, 12), 3, 2, 0, "cpu")
    options: dict[str, Any] = {"budget": dict.fromkeys("ab", 100), "rounds": 1}
    if pool is None:
        return LocalFederation(plans, whole, **options), plans
    return PoolFederation(pool, plans, whole, **options), plans


def test_the_best_epoch_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs with accuracies 0.2, 0.9, 0.4: what the second one left is sent."""
    method = short(adversarial_epochs=3)
    sent: dict[str, list[Weights]] = {"a": [], "b": []}
    scores = [0.2, 0.9, 0.4]

    def pretended(site: Site, model: Any) -> float:
        sent[site.name].append(site.weights_of(model))
        return scores[len(sent[site.name]) - 1]

    monkeypatch.setattr("fedshift.methods.federated.fedadg._accuracy", pretended)
    where, plans = held_out(method)
    assert all(len(plan.held_out[0][1]) for plan in plans)
    made = start_of(method, [images("a", 9)])
    asked = where.ask(
        method.fit, to=where.sources, weights=made.without("generator"), generator=made.select("generator")
    )
    for site, update in asked.items():
        assert update.weights.merge(update.generator) == sent[site][1] != sent[site][2]


def test_held_out_accuracy_is_measured_on_held_out_rows() -> None:
    where, _ = held_out(short())
    site = site_of(where, "a")
    assert isinstance(site.held_out, SiteData)
    model = site.model()
    inputs, labels, _ = next(site.held_out.all_batches(100))
    assert len(labels) + site.samples == 30
    assert len(labels) == 9
    model.eval()
    assert _accuracy(site, model) == pytest.approx((model(inputs).argmax(1) == labels).float().mean().item())
    assert model.training


def test_held_out_rows_are_there_only_for_who_says_so() -> None:
    assert short().traits.uses_held_out
    where, plans = held_out(short(keep="last"))
    assert not short(keep="last").traits.uses_held_out
    assert all(not plan.held_out for plan in plans)
    assert list(site_of(where, "a").held_out_batches()) == []
