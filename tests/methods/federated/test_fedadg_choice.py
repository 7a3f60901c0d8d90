"""FedADG with BatchNorm and with held-out parts: which features D sees, and which D stays at the site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fedadg import answer, descend, generated, held_out, short, site_of
from tiny import NORMED, federation, images, start_of, step_on, vectors
from torch import Tensor

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods.federated import fedadg
from fedshift.weights import Weights


def in_evaluation(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Features of the tiny mlp with BatchNorm, by the running statistics."""
    for layer in ("hidden1", "hidden2"):
        linear, norm = (
            {part: values[f"features.{layer}.{place}.{part}"] for part in ("weight", "bias")} for place in (0, 1)
        )
        mean, variance = (values[f"features.{layer}.1.running_{part}"] for part in ("mean", "var"))
        inputs = inputs @ linear["weight"].T + linear["bias"]
        inputs = ((inputs - mean) / (variance + 1e-5).sqrt() * norm["weight"] + norm["bias"]).relu()
    return inputs


def test_d_sees_features_in_evaluation_mode_and_statistics_move_once_a_batch() -> None:
    method, found = short(task_epochs=0, noise=2, discriminator_loss="least_squares"), [vectors("alone", 8)]
    moved = {"running_mean": 0.5, "running_var": 2.0, "num_batches_tracked": 0}
    odd = {
        name: tensor + moved.get(name.rpartition(".")[2], 0.0)
        for name, tensor in start_of(method, found, NORMED).items()
    }
    where = federation(method, found, NORMED, rounds=1, momentum=0.0, batch_size=8, lr=0.5)
    state = step_on(method, where, method.start(where, Weights(odd)))
    site = site_of(where, "alone")

    # The discriminator before the round: what a round that does not train it leaves at the site.
    still = short(task_epochs=0, noise=2, adversary_rate=0.0, discriminator_loss="least_squares")
    untouched = federation(still, found, NORMED, rounds=1, batch_size=8)
    step_on(still, untouched, still.start(untouched, Weights(odd)))
    critic = {
        name: tensor.clone().requires_grad_(name != "projection")
        for name, tensor in site_of(untouched, "alone").memory.weights("discriminator").items()
    }
    site.begin(type(site.envelope)(1, 1, 0.0, 100))
    noise = torch.rand(8, 2, generator=site.generator_for("noise"))
    batch = next(iter(site.batches()))
    condition = 0.7 * F.one_hot(batch.targets, 3).float()
    made, extracted = generated(odd, noise, condition), in_evaluation(odd, batch.inputs)
    loss = (1 - answer(critic, made, condition)).square().mean() + answer(critic, extracted, condition).square().mean()
    descend(critic, [name for name in critic if name != "projection"], loss, 0.35)
    for name, tensor in site.memory.weights("discriminator").items():
        torch.testing.assert_close(tensor, critic[name].detach(), atol=3e-6, rtol=1e-5)
    counts = [tensor.item() for name, tensor in state.weights.items() if name.endswith("num_batches_tracked")]
    assert counts == [1] * len(counts) != []


@pytest.mark.parametrize("scores", [[0.2, 0.9, 0.4], [0.2, 0.9, 0.9], [0.1, 0.9, 0.2]])
def test_the_discriminator_of_the_best_epoch_stays(scores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What three epochs leave of which the second is best (the first of equals) is what two epochs leave."""
    start = start_of(short(), [images("a", 9)])

    def left(epochs: int, accuracies: list[float]) -> tuple[Any, dict[str, Weights]]:
        said: dict[str, int] = {}

        def pretended(site: Any, model: Any) -> float:
            said[site.name] = said.get(site.name, -1) + 1
            return accuracies[said[site.name]]

        monkeypatch.setattr(fedadg, "_accuracy", pretended)
        method = short(adversarial_epochs=epochs)
        where, _ = held_out(method)
        assert isinstance(where, LocalFederation)
        state = step_on(method, where, method.start(where, start))
        return state, {name: site_of(where, name).memory.weights("discriminator") for name in "ab"}

    best, kept = left(3, scores)
    two, after_two = left(2, [0.0, 1.0])
    _, after_three = left(3, [0.0, 0.1, 1.0])
    assert kept == after_two
    assert kept != after_three
    assert best.weights == two.weights


def test_accuracies_of_the_task_epochs_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """F and Cl after the task's epochs have met no D: only epochs of the game are looked at."""
    asked: list[str] = []
    monkeypatch.setattr(fedadg, "_accuracy", lambda site, _: asked.append(site.name) or 0.5)
    method = short(task_epochs=2, adversarial_epochs=3)
    where, _ = held_out(method)
    step_on(method, where, method.start(where, start_of(method, [images("a", 9)])))
    assert sorted(asked) == ["a"] * 3 + ["b"] * 3


def test_accuracies_are_those_of_evaluation_mode() -> None:
    """With BatchNorm the statistics of the batch would say something else, and would move."""
    found = [vectors("a", 12)]
    method = short()
    where = federation(method, found, NORMED)
    site = site_of(where, "a")
    site.held_out = site.data
    odd = {
        name: tensor + (1.5 if name.endswith("running_mean") else 0.0) if tensor.is_floating_point() else tensor
        for name, tensor in start_of(method, found, NORMED).items()
    }
    model = site.model(Weights(odd))
    inputs, labels, _ = next(site.data.all_batches(12))
    logits = in_evaluation(odd, inputs) @ odd["classifier.weight"].T + odd["classifier.bias"]
    assert fedadg._accuracy(site, model) == pytest.approx((logits.argmax(1) == labels).float().mean().item())  # type: ignore[arg-type]
    assert site.weights_of(model) == Weights(odd)
    assert model.training


def test_the_warm_up_goes_on_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs a round, six to warm up: epochs 0 to 5 have 0, 1/6, … 5/6 of the rate, then the whole."""
    rates: list[float] = []
    plain = fedadg._Game.set_rates

    def watched(self: Any, epoch: int) -> None:
        plain(self, epoch)
        rates.append(self.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(fedadg._Game, "set_rates", watched)
    method, found = short(warm_up=6), [vectors("a", 8)]
    where = federation(method, found, NORMED, rounds=4, lr=0.6)
    state = method.start(where, start_of(method, found, NORMED))
    for _ in range(4):
        state = step_on(method, where, state)
    assert rates == pytest.approx([1e-7, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6], rel=1e-6)
