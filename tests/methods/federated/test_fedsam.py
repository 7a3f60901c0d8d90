"""FedSAM: FedAvg at radius 0, and steps by hand with SAM's and ASAM's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lost import site_of
from tiny import LINEAR, NORMED, federation, run, start_of, vectors

from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedsam import FedSAM


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_a_radius_it_is_fedavg_bit_for_bit(adaptive: bool) -> None:
    options: dict[str, Any] = {"network": NORMED, "momentum": 0.9}
    assert run(FedSAM(radius=0, adaptive=adaptive), **options)[0].weights == run(FedAvg(), **options)[0].weights


@pytest.mark.parametrize("network", [LINEAR, NORMED], ids=["linear", "BatchNorm"])
@pytest.mark.parametrize("setting", ["paper", "asam", "asam_released"])
def test_two_steps_by_hand(setting: str, network: dict[str, object]) -> None:
    """With BatchNorm, statistics follow both passes of a step."""
    method = FedSAM(steps_per_round=2, setting=setting)
    found = [vectors("alone", 6)]
    where = federation(method, found, network, momentum=0.0, lr=0.3)
    site, start = site_of(where, "alone"), start_of(method, found, network)
    (reply,) = where.ask(method.fit, to=where.sources, weights=start)
    batch = next(site.all_batches())  # the whole site is one mini-batch
    model = site.model(start)
    parameters = list(model.parameters())
    for _ in range(2):
        here = [parameter.detach().clone() for parameter in parameters]
        gradients = torch.autograd.grad(F.cross_entropy(model(batch.inputs), batch.targets), parameters)
        if setting == "paper":
            norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
            moves = [0.05 * gradient / norm for gradient in gradients]
        else:
            names = [name for name, _ in model.named_parameters()]
            whole = [setting == "asam" or "weight" in name for name in names]  # the code leaves biases as they are
            scales = [w.abs() + 0.2 if own else torch.ones_like(w) for w, own in zip(here, whole, strict=True)]
            scaled = [scale * gradient for scale, gradient in zip(scales, gradients, strict=True)]
            norm = sum(tensor.square().sum() for tensor in scaled) ** 0.5
            moves = [0.5 * scale * tensor / norm for scale, tensor in zip(scales, scaled, strict=True)]
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter += move
        gradients = torch.autograd.grad(F.cross_entropy(model(batch.inputs), batch.targets), parameters)
        with torch.no_grad():
            for parameter, weight, gradient in zip(parameters, here, gradients, strict=True):
                parameter.copy_(weight - 0.3 * gradient)
    counts = [tensor for name, tensor in model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert all(int(tensor) == 4 for tensor in counts)
    assert bool(counts) == (network is NORMED)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(reply.weights[name], tensor, atol=1e-6, rtol=1e-5)
