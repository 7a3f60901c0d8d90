"""16 bits: close to float32, float32 outside of the network, and the same in copies and in every engine."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError
from tiny import CNN, federation, run, start_of, step_on, training
from torch import nn

from fedshift.federation.local.pool import WorkerPool
from fedshift.federation.steps import Steps
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.rounds import start_run
from fedshift.models import registry as models
from fedshift.models.products import has_bf16_units, with_precision


def test_products_are_rounded_and_what_comes_out_is_float32() -> None:
    """1 + 2⁻⁹ is 1 in bf16, which has 8 bits behind the point's first."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    inputs = torch.tensor([[1 + 2.0**-9]])
    assert layer(inputs).item() == 1 + 2.0**-9
    found = with_precision(layer, "bf16")(inputs)
    assert (found.item(), found.dtype) == (1.0, torch.float32)
    assert layer.weight.dtype == torch.float32


def test_a_network_and_its_stages() -> None:
    plain = models.build(models.parse(CNN), (1, 12, 12), 3, 0)
    fast = with_precision(copy.deepcopy(plain), "bf16")
    inputs = torch.rand(6, 1, 12, 12)
    logits, stages = copy.deepcopy(fast).with_stages(inputs, ["conv1", "hidden"])
    assert {tensor.dtype for tensor in (logits, *stages.values())} == {torch.float32}
    expected = plain(inputs)
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.05)
    assert not torch.equal(logits, expected)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert isinstance(fast.features, nn.Sequential)


def test_training_uses_it_and_changes_little() -> None:
    plain, fast = (run(FedAvg(), rounds=1, precision=kind)[0].weights for kind in ("float32", "bf16"))
    assert plain != fast
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, atol=5e-3, rtol=0.05)


def test_only_one_library_at_a_time() -> None:
    with pytest.raises(ValidationError, match="multiplies in float32"):
        training(precision="bf16", matrix_products="onednn")


def test_devices_without_units() -> None:
    assert has_bf16_units("mps") is False


@pytest.mark.slow
def test_workers_give_the_same_bits(pool: WorkerPool) -> None:
    method = CSAC(acquisition_epochs=1, calibration_epochs=1)
    options = {"precision": "bf16", "lr_step": "mini_batch", "lr_schedule": "linear", "lr_warmup": 0.1}
    here, _ = run(method, rounds=1, **options)
    where = federation(method, pool=pool, rounds=1, **options)
    state = start_run(method, where, start_of(method))
    where.settle()
    assert step_on(method, where, state).weights == here.weights


def test_parts_of_a_mini_batch_and_rounding_go_together() -> None:
    """Each part is rounded for itself, so the difference is of the size of bf16's rounding, not of the parts."""
    whole, parts = (run(FedAvg(), rounds=1, precision="bf16", accumulate=k)[0].weights for k in (1, 3))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=5e-3, rtol=0.05)
    assert {value.dtype for value in parts.values()} == {torch.float32}


def test_fp16_learns_as_float32_does() -> None:
    plain, fast = (run(FedAvg(), rounds=2, precision=kind)[0].weights for kind in ("float32", "fp16"))
    assert plain != fast
    for name, value in plain.items():
        assert fast[name].dtype == torch.float32
        torch.testing.assert_close(fast[name], value, atol=5e-3, rtol=0.02)  # fp16 has 3 bits more than bf16


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_scaled_losses(optimizer: str) -> None:
    """A gradient of 1e-9 is 0 in fp16; with a scaled loss the step is that of float32."""
    steps = {}
    for kind in ("float32", "fp16"):
        layer = with_precision(nn.Linear(2, 1, bias=False), kind)
        nn.init.ones_(layer.weight)
        settings = training(precision=kind, optimizer=optimizer, lr=1e6 if optimizer == "sgd" else 0.1, momentum=0.0)
        one = Steps(settings, [settings.build_optimizer(layer.parameters(), settings.lr)], torch.device("cpu"))
        one.begin()
        one.add((layer(torch.ones(1, 2)) * 1e-9).sum())
        one.step(list(layer.parameters()))
        steps[kind] = layer.weight.detach()
    assert not torch.equal(steps["float32"], torch.ones(1, 2))
    torch.testing.assert_close(steps["fp16"], steps["float32"], rtol=1e-3, atol=1e-5)


def test_gradients_are_clipped_as_they_are_without_a_scale() -> None:
    layer = with_precision(nn.Linear(2, 1, bias=False), "fp16")
    before = layer.weight.detach().clone()
    settings = training(precision="fp16", lr=1.0, momentum=0.0, clip_norm=0.5)
    steps = Steps(settings, [settings.build_optimizer(layer.parameters(), settings.lr)], torch.device("cpu"))
    steps.begin()
    steps.add((layer(torch.ones(1, 2)) * 2).sum())  # a gradient of 2 for each weight
    steps.step(list(layer.parameters()))
    assert (before - layer.weight.detach()).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_a_step_that_overflows_is_left_out_and_the_next_ones_are_smaller() -> None:
    """As torch's GradScaler, which is not ours: the scale halves until gradients are finite again."""
    layer = with_precision(nn.Linear(1, 1, bias=False), "fp16")
    nn.init.ones_(layer.weight)
    settings = training(precision="fp16", lr=1e-6, momentum=0.0, clip_norm=1e9)
    steps = Steps(settings, [settings.build_optimizer(layer.parameters(), settings.lr)], torch.device("cpu"))
    weights = []
    for _ in range(8):
        steps.begin()
        steps.add((layer(torch.ones(1, 1)) * 300).sum())  # 300 · 4096 is above 65504, the largest number of fp16
        steps.step(list(layer.parameters()))
        weights.append(layer.weight.item())
    assert weights[0] == 1.0
    assert len({round(later - earlier, 6) for earlier, later in zip(weights[-4:], weights[-3:], strict=False)}) == 1
    assert weights[-1] == pytest.approx(weights[-2] - 300e-6, abs=1e-6)
