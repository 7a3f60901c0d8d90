"""bf16: close to float32, float32 outside of the network, and the same in copies and in every engine."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError
from tiny import CNN, federation, run, start_of, step_on, training
from torch import nn

from fedshift.federation.local.pool import WorkerPool
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
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
    state = method.start(where, start_of(method))
    where.settle()
    assert step_on(method, where, state).weights == here.weights
