"""Size of a network on the wire, and cost of a forward pass."""

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
    """The size of one model. All counts are of numbers, not of tensors.

    Attributes:
        parameters: float parameters, |θ|.
        float_buffers: float buffers, |b|, such as BatchNorm's running mean.
        integer_buffers: integer buffers, n_i, such as BatchNorm's counter.
        bytes: S(θ) = 4·(|θ| + |b|) + 8·n_i for float32 and int64 tensors; other types count with their own size.
    """

    parameters: int
    float_buffers: int
    integer_buffers: int
    bytes: int


def payload(model: nn.Module | Mapping[str, Tensor]) -> Payload:
    """The size of a model.

    Args:
        model: a module or its state dict. A state dict does not say which tensors are buffers, so BatchNorm's running
            mean and variance are recognised by their names.
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
    """Multiply-accumulates of convolutions and linear layers in the forward pass of one sample.

    Normalisation, pooling and activations are not counted. The pass runs on tensors without data: it computes nothing
    and does not change the network. A backward pass costs about twice as much again.

    Args:
        network: any module.
        input_shape: shape of one sample.
    """
    total = 0
    # BatchNorm in training mode refuses a single sample.
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
