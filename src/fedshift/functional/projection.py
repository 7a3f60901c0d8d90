"""CSAC's projections: layers of different sizes brought to one shape, so that any two can be compared (section 2.1)."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from fedshift.errors import UserError

_Module = TypeVar("_Module", bound=nn.Module)


def projection_layer(
    shape: tuple[int, ...],
    channels: int,
    size: tuple[int, int],
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A module that maps features (n, *shape) to (n, channels, *size).

    Maps (c, h, w) go through `projection_convolution`; vectors (d,) through one linear layer whose outputs are viewed
    as a map. Raises UserError for any other shape.
    """
    if len(shape) == 3:
        return projection_convolution(shape[0], (shape[1], shape[2]), channels, size, generator)
    if len(shape) != 1:
        raise UserError(
            f"a projection takes features of shape (d,) or (c, h, w), found {tuple(shape)}; choose other stages"
        )
    linear = _initialised(nn.Linear(shape[0], channels * size[0] * size[1], device="meta"), generator)
    return nn.Sequential(linear, nn.Unflatten(1, (channels, *size)))


def projection_convolution(
    in_channels: int,
    size_from: tuple[int, int],
    channels: int,
    size_to: tuple[int, int],
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A convolution from (n, in_channels, *size_from) to (n, channels, *size_to) by the rule of CSAC's code.

    Along each axis, from size s to t: s = 2t → kernel 3, stride 2, padding 1; s = t → kernel 1; any other s > t →
    kernel s−t+1 without padding; 2s = t → transposed, kernel 4, stride 2, padding 1. The axes may follow different
    rules. What one convolution cannot do (other enlargements, or one axis doubled and the other reduced; the paper has
    no such case) is adaptive average pooling to ``size_to`` followed by a 1×1 convolution.

    generator: where the initial weights come from (PyTorch's default distribution); none = PyTorch's global generator.
    Raises UserError for a size below 1.
    """
    if min(*size_from, *size_to, in_channels, channels) < 1:
        raise UserError(
            f"cannot project {in_channels} channels of {size_from} to {channels} of {size_to}: sizes start at 1"
        )
    axes = list(zip(size_from, size_to, strict=True))
    if all(s >= t for s, t in axes):
        rules = [(3, 2, 1) if s == 2 * t else (s - t + 1, 1, 0) for s, t in axes]
        kernel, stride, padding = _by_axis(rules)
        return _initialised(nn.Conv2d(in_channels, channels, kernel, stride, padding, device="meta"), generator)
    if all(t in (s, 2 * s) for s, t in axes):
        rules = [(1, 1, 0) if s == t else (4, 2, 1) for s, t in axes]
        kernel, stride, padding = _by_axis(rules)
        return _initialised(
            nn.ConvTranspose2d(in_channels, channels, kernel, stride, padding, device="meta"), generator
        )
    pointwise = _initialised(nn.Conv2d(in_channels, channels, 1, device="meta"), generator)
    return nn.Sequential(nn.AdaptiveAvgPool2d(size_to), pointwise)


def _by_axis(rules: list[tuple[int, int, int]]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(kernel, stride, padding) per axis → per parameter."""
    (k0, s0, p0), (k1, s1, p1) = rules
    return (k0, k1), (s0, s1), (p0, p1)


def _initialised(module: _Module, generator: torch.Generator | None) -> _Module:
    """``module`` with memory and PyTorch's default initial weights, uniform in ±1/√fan_in, drawn from ``generator``."""
    module = module.to_empty(device="cpu")
    weight = module.get_parameter("weight")
    bound = weight[0].numel() ** -0.5
    with torch.no_grad():
        for parameter in (weight, module.get_parameter("bias")):
            parameter.uniform_(-bound, bound, generator=generator)
    return module
