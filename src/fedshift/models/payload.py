"""How large a network is on the wire and how much work one sample is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.models.wide import WideLinear

_RUNNING_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Payload:
    """What one model carries: |θ| float parameters, |b| float buffers, n_i integer buffers and S(θ) bytes.

    All but the bytes count numbers, not tensors.
    """

    parameters: int
    float_buffers: int
    integer_buffers: int
    bytes: int


def payload(model: nn.Module | Mapping[str, Tensor]) -> Payload:
    """The payload of a module or state dict: ``S(θ) = 4·(|θ| + |b|) + 8·n_i`` bytes for float32 and int64 tensors.

    Other types count with their own size. A state dict does not say which of its tensors are buffers, so there
    BatchNorm's running mean and variance are known by their names.
    """
    if isinstance(model, nn.Module):
        tensors: Mapping[str, Tensor] = model.state_dict()
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    else:
        tensors = model
        trained = {name for name in tensors if name.rpartition(".")[2] not in _RUNNING_STATISTICS}
    parameters = float_buffers = integer_buffers = size = 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point():
            integer_buffers += tensor.numel()
        elif name in trained:
            parameters += tensor.numel()
        else:
            float_buffers += tensor.numel()
    return Payload(parameters, float_buffers, integer_buffers, size)


def forward_cost(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiply-accumulates of convolutions and linear layers in one forward pass of one sample of ``input_shape``.

    Everything else (normalisation, pooling, activation) is left out. Nothing is computed and nothing in the network
    changes: the pass runs on tensors without data. A backward pass costs about twice as much again.
    """
    total = 0
    # Two samples, because BatchNorm in training mode refuses one.
    samples = 2

    def count(module: nn.Module, _inputs: object, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            window = module.kernel_size[0] * module.kernel_size[1]
            total += output.numel() * module.in_channels // module.groups * window
        elif isinstance(module, nn.Linear | WideLinear):
            total += output.numel() * module.in_features

    handles = [module.register_forward_hook(count) for module in network.modules()]
    shapes = {name: tensor.detach().to("meta") for name, tensor in network.state_dict().items()}
    try:
        with torch.no_grad():
            functional_call(network, shapes, (torch.empty((samples, *input_shape), device="meta"),))
    finally:
        for handle in handles:
            handle.remove()
    return total // samples
