"""Size of a network on the wire, and cost of a forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.models.made_up import made_up, reads_tokens
from fedshift.models.wide import WideLinear


@dataclass(frozen=True)
class Payload:
    """The size of one model."""

    parameters: int  # trained numbers
    bytes: int  # of all tensors, buffers such as BatchNorm's statistics included


def payload(model: nn.Module) -> Payload:
    """The size of a model."""
    return Payload(
        sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False)),
        sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()),
    )


def forward_cost(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiply-accumulates of convolutions and linear layers in the forward pass of one sample.

    Normalisation, pooling and activations are not counted. The pass runs on tensors without data: it computes nothing
    and does not change the network; one of tokens, whose way may depend on them, computes with made-up tokens. A
    backward pass costs about twice as much again.
    """
    total = 0
    # BatchNorm in training mode refuses a single sample.
    samples = 2

    def count(module: nn.Module, _inputs: object, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            window = math.prod(module.kernel_size)
            total += output.numel() * module.in_channels // module.groups * window
        elif isinstance(module, nn.Linear | WideLinear):
            total += output.numel() * module.in_features

    handles = [module.register_forward_hook(count) for module in network.modules()]
    tensors = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
    shapes = {name: tensor.detach().to("meta") for name, tensor in tensors}
    try:
        with torch.no_grad():
            _forward(network, shapes, made_up(network, samples, input_shape))
    finally:
        for handle in handles:
            handle.remove()
    return total // samples


def _forward(network: nn.Module, shapes: dict[str, Tensor], samples: Tensor) -> None:
    """A forward pass without data, or with made-up data where there is no other way."""
    try:
        functional_call(network, shapes, (samples.to("meta"),))
    except Exception:
        if not reads_tokens(network):
            raise
        with torch.random.fork_rng(devices=[]):
            tensors = (
                *network.named_parameters(remove_duplicate=False),
                *network.named_buffers(remove_duplicate=False),
            )
            functional_call(network, {name: tensor.detach().cpu().clone() for name, tensor in tensors}, (samples,))
