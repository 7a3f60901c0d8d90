"""FedADG against its equations: who moves in which step, what travels, what stays, and which epoch is kept."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tiny import (
    CNN,
    MLP,
    NORMED,
    data_set,
    domains,
    federation,
    images,
    run,
    setting,
    start_of,
    step_on,
    training,
    vectors,
)
from torch import Tensor

from fedshift.data.view import SiteData
from fedshift.experiment import protocol
from fedshift.experiment.sections import LeaveOneOut
from fedshift.federation.federation import Federation
from fedshift.federation.local import LocalFederation, Setting
from fedshift.federation.pool import PoolFederation, WorkerPool
from fedshift.federation.site import Site
from fedshift.methods.federated.fedadg import FedADG, _accuracy
from fedshift.models import registry as models
from fedshift.models.payload import payload
from fedshift.weights import Weights

Tensors = dict[str, Tensor]


def short(**options: Any) -> FedADG:
    return FedADG(**{"task_epochs": 1, "adversarial_epochs": 1, **options})


def site_of(where: Federation, name: str) -> Site:
    assert isinstance(where, LocalFederation)
    return where._runners[name].site


# The equations --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", ["formula", "towards_features", "frozen"])
def test_a_round_is_the_equations(form: str) -> None:
    """One site of 8 samples, one epoch on the task and two of the game, by hand with plain tensors."""
    method = short(adversarial_epochs=2, label_smoothing=0.2, adversarial_weight=0.4, generator=form, noise=2)
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
    untouched = federation(short(adversary_rate=0.0, noise=2), found, MLP, rounds=1, batch_size=8)
    step_on(untouched.method, untouched, untouched.method.start(untouched, start))  # type: ignore[arg-type, attr-defined]
    critic = {
        n: t.clone().requires_grad_() for n, t in site_of(untouched, "alone").memory.weights("discriminator").items()
    }
    trained = [name for name in critic if name != "projection"]

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
        loss = (1 - answer(critic, made.detach(), condition)).square().mean()
        loss = loss + answer(critic, h.detach(), condition).square().mean()
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


# What travels and what stays ------------------------------------------------------------------------------------------


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


def test_equal_generators_are_their_mean() -> None:
    """A generator that no site trains comes back bit for bit."""
    method = short(generator="frozen")
    state, _ = run(method, rounds=2)
    assert state.parts["generator"] == start_of(method).select("generator")


def test_the_published_bytes() -> None:
    """25,202,688 parameters of G for the released AlexNet setup with 7 classes: (2048+7)·4096+4096 + 4096·4096+4096."""
    network = models.build(models.parse({"name": "alexnet"}), (3, 64, 64), 7, 0)
    made = FedADG().adapt_network(network, 3)
    assert payload(made.generator).parameters == 25_202_688  # type: ignore[arg-type]
    assert payload(made).bytes == payload(network).bytes + 4 * 25_202_688


def test_the_projection_of_the_paper_has_its_width() -> None:
    method = FedADG(projection=1024, condition="before")
    _, where = run(method.model_copy(update={"task_epochs": 0, "adversarial_epochs": 1}), rounds=1)
    critic = site_of(where, "large").memory.weights("discriminator")
    assert critic["projection"].shape == (1024, 6 + 3)  # features and classes
    assert critic["layers.0.weight"].shape == (1024, 1024)


def test_the_released_warm_up_hardly_trains() -> None:
    """Counted in local epochs over all rounds: the first has 1e-7, and 4 of 500 are under a hundredth."""
    start = start_of(short())
    moved = [
        sum((run(method)[0].weights[name] - start[name]).abs().sum().item() for name in start if "classifier" in name)
        for method in (short(), short(warm_up=500))
    ]
    assert 0 < moved[1] < 0.05 * moved[0]


# Which epoch is kept --------------------------------------------------------------------------------------------------


def held_out(method: FedADG, pool: WorkerPool | None = None) -> tuple[Federation, Any]:
    data = data_set([images("a", 30), images("b", 30), images("hidden", 9)])
    split = protocol.split_of(LeaveOneOut(test_fraction=0.3), data, "hidden", 0)
    plans = protocol.site_plans(method, data, split)
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
    assert short().uses_held_out
    where, plans = held_out(short(keep="last"))
    assert not short(keep="last").uses_held_out
    assert all(not plan.held_out for plan in plans)
    assert list(site_of(where, "a").held_out_batches()) == []


def test_a_pool_holds_out_the_same_rows() -> None:
    method = short(adversarial_epochs=2)
    made = start_of(method, [images("a", 9)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = WorkerPool(2, threads=1)
    try:
        here, _ = held_out(method)
        there, _ = held_out(method, pool)
        states = [step_on(method, where, method.start(where, made)) for where in (here, there)]
    finally:
        pool.close()
        torch.set_num_threads(threads)
    assert states[0].weights == states[1].weights
    assert states[0].parts == states[1].parts


def test_the_evaluated_network_has_no_generator() -> None:
    method = short()
    network = method.evaluated_network(setting(method, domains(), CNN).build_network(), 3)
    assert not any(name.startswith("generator") for name in network.state_dict())
