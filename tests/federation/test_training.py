"""Optimisers, schedules and clipping against their formulas, and the mean loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_site import site_of
from tiny import training
from torch import Tensor, nn

from fedshift.federation.site import Envelope

SLOPES = (torch.tensor([0.5, -1.0]), torch.tensor([0.25, 2.0]), torch.tensor([-1.5, 0.75]))


def steps(**options: Any) -> list[float]:
    """Where three gradients take the weights (1, −2)."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = training(**options).build_optimizer([weight], 0.1)
    for slope in SLOPES:
        weight.grad = slope.clone()
        optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd(momentum: float, nesterov: bool, decay: float) -> None:
    """g ← g + λθ,  v ← μv + g,  θ ← θ − η(g + μv with Nesterov, else v)."""
    if nesterov and not momentum:
        pytest.skip("Nesterov's form needs momentum")
    weight, speed = torch.tensor([1.0, -2.0]), torch.zeros(2)
    for slope in SLOPES:
        whole = slope + decay * weight
        speed = momentum * speed + whole
        weight = weight - 0.1 * (whole + momentum * speed if nesterov else speed)
    assert steps(momentum=momentum, nesterov=nesterov, weight_decay=decay) == pytest.approx(weight.tolist(), abs=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam(decay: float) -> None:
    weight, first, second = torch.tensor([1.0, -2.0]), torch.zeros(2), torch.zeros(2)
    for number, slope in enumerate(SLOPES, 1):
        whole = slope + decay * weight
        first, second = 0.9 * first + 0.1 * whole, 0.999 * second + 0.001 * whole.square()
        weight = weight - 0.1 * first / (1 - 0.9**number) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
    assert steps(optimizer="adam", weight_decay=decay) == pytest.approx(weight.tolist(), abs=1e-5)


def test_schedules_from_end_to_end() -> None:
    cosine, power, flat = (
        training(lr=0.2, lr_schedule=kind, lr_end=0.02 if kind == "cosine" else 0.0)
        for kind in ("cosine", "inverse_power", "constant")
    )
    assert [cosine.learning_rate(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.2, 0.11, 0.02])
    assert cosine.learning_rate(0.25) == pytest.approx(0.02 + 0.18 * (1 + math.cos(math.pi / 4)) / 2)
    assert [power.learning_rate(p) for p in (0.0, 1.0)] == pytest.approx([0.2, 0.2 * 11**-0.75])
    assert [flat.learning_rate(p) for p in (0.0, 1.0)] == [0.2, 0.2]


def test_a_linear_schedule_and_a_warm_up() -> None:
    """Half of a warm-up of a fifth: 0.505 of the schedule's rate there."""
    found = training(lr=0.2, lr_schedule="linear", lr_end=0.1, lr_step="mini_batch", lr_warmup=0.2)
    assert [found.learning_rate(p) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0.002, 0.505 * 0.19, 0.18, 0.14, 0.1]
    )
    with pytest.raises(ValidationError, match="lr_step: mini_batch"):
        training(lr_warmup=0.2)


def test_rates_that_change_with_every_mini_batch() -> None:
    """Ten mini-batches of an exchange, five of them done before it; a head has ten times the rate."""
    site = site_of(40, lr=0.1, lr_schedule="linear", lr_step="mini_batch", batch_size=8)
    site.begin(Envelope(2, 1, 0.5, 5))
    model = site.model()
    optimizer, head = site.optimizer(model), site.optimizer(nn.Linear(2, 2))
    head.param_groups[0]["lr"] = 10 * site.learning_rate
    found = []
    for _ in site.batches():
        found.append(optimizer.param_groups[0]["lr"])
        assert head.param_groups[0]["lr"] == pytest.approx(10 * found[-1])
        assert site.learning_rate == pytest.approx(found[-1])
    assert found == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01])
    assert site.mean_learning_rate == pytest.approx(0.03)
    constant = site_of(40, lr=0.1, lr_schedule="linear")
    constant.begin(Envelope(2, 1, 0.5, 5))
    optimizer = constant.optimizer(model)
    assert {optimizer.param_groups[0]["lr"] for _ in constant.batches()} == {constant.mean_learning_rate} == {0.05}


@pytest.mark.parametrize("largest", [None, 0.05])
def test_a_gradient_is_clipped_before_its_step(largest: float | None) -> None:
    """Plain descent moves by η times the gradient, whose norm is at most ``largest``."""
    site = site_of(8, lr=0.4, momentum=0.0, clip_norm=largest, batch_size=8)
    model = site.model()
    start = [value.detach().clone() for value in model.parameters()]
    inputs, labels, _ = next(site.data.all_batches(8))

    def loss_of(_: Any) -> Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    slopes = torch.autograd.grad(loss_of(None), list(model.parameters()))
    norm = math.sqrt(sum(float(slope.square().sum()) for slope in slopes))
    assert norm > 0.1, "clipping would not show"
    site.minimise(loss_of, model, steps=1)
    factor = 1.0 if largest is None else largest / norm
    for value, before, slope in zip(model.parameters(), start, slopes, strict=True):
        torch.testing.assert_close(value.detach(), before - 0.4 * factor * slope, atol=2e-6, rtol=1e-4)


def test_the_mean_loss_is_that_of_all_batches() -> None:
    site = site_of(24, lr=1e-9)
    model, losses = site.model(), []

    def loss_of(batch: Any) -> Tensor:
        losses.append(nn.functional.cross_entropy(model(batch.inputs), batch.targets))
        return losses[-1]

    found = site.minimise(loss_of, model)
    assert len(losses) == 3
    assert found == pytest.approx(sum(loss.item() for loss in losses) / 3, abs=1e-6)
