"""CSAC's projections: bring layers of different sizes to one shape, so that any two can be compared."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from fedshift.errors import UserError

_Module = TypeVar("_Module", bound=nn.Module)

Reduction = Literal["released", "strided", "pooled"]
"""How a larger map becomes a smaller one: see `projection_convolution`."""


def projection_layer(
    shape: tuple[int, ...],
    channels: int,
    size: tuple[int, int],
    generator: torch.Generator | None = None,
    reduction: Reduction = "released",
) -> nn.Module:
    """A module that maps features ``(n, *shape)`` to ``(n, channels, *size)``.

    Maps (c, h, w) go through `projection_convolution`. Vectors (d,) go through one linear layer whose outputs are
    viewed as a map. Other networks than the paper's have two further shapes: volumes (c, d, h, w) are averaged over
    their depth, and sequences (c, l) are maps of height 1.

    ``shape``: shape of one sample's features. ``channels``: channels of the result. ``size``: height and width of the
    result. ``generator``: generator of the initial weights; PyTorch's global one by default. ``reduction``: as in
    `projection_convolution`. Raises UserError: any other shape.

    Example:
        >>> projection_layer((10,), 32, (7, 7))(torch.zeros(2, 10)).shape
        torch.Size([2, 32, 7, 7])
    """
    if len(shape) == 3:
        return projection_convolution(shape[0], (shape[1], shape[2]), channels, size, generator, reduction)
    if len(shape) == 4:
        flat = projection_convolution(shape[0], (shape[2], shape[3]), channels, size, generator, reduction)
        return nn.Sequential(nn.AdaptiveAvgPool3d((1, None, None)), nn.Flatten(1, 2), flat)
    if len(shape) == 2:
        row = projection_convolution(shape[0], (1, shape[1]), channels, size, generator, reduction)
        return nn.Sequential(nn.Unflatten(1, (shape[0], 1)), row)
    if len(shape) != 1:
        raise UserError(f"a projection takes features of one to four dimensions, found {tuple(shape)}; choose others")
    linear = _initialise(nn.Linear(shape[0], channels * size[0] * size[1], device="meta"), generator)
    return _AsMap(linear, (channels, *size))


class _AsMap(nn.Sequential):
    """A layer whose outputs (n, c·g·w) are viewed as maps (n, c, g, w)."""

    def __init__(self, layer: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__(layer)
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self[0](inputs)
        return outputs.view(-1, *self.shape)


def projection_convolution(
    in_channels: int,
    size_from: tuple[int, int],
    channels: int,
    size_to: tuple[int, int],
    generator: torch.Generator | None = None,
    reduction: Reduction = "released",
) -> nn.Module:
    """A convolution from ``(n, in_channels, *size_from)`` to ``(n, channels, *size_to)``, by CSAC's released code.

    Along each axis, from size s to t:

        s = 2t         kernel 3, stride 2, padding 1
        s = t          kernel 1
        other s > t    kernel s − t + 1, no padding
        2s = t         transposed: kernel 4, stride 2, padding 1

    The axes may follow different rules. Some cases need more than one convolution: other enlargements, or one axis
    doubled and the other reduced. The paper has no such case. They use adaptive average pooling to ``size_to``, then a
    1×1 convolution.

    The third rule has large kernels: 9×9 from 12×12 to 4×4. Two other reductions need far less arithmetic. ``strided``
    steps by r = ⌊s/t⌋ with kernel s − (t − 1)·r, which covers each position about once: 3×3 with stride 3 there.
    ``pooled`` reduces every map by adaptive average pooling and a 1×1 convolution.

    ``in_channels``: channels of the features. ``size_from``: their height and width. ``channels``: channels of the
    result. ``size_to``: its height and width. ``generator``: generator of the initial weights (PyTorch's default
    distribution); PyTorch's global one by default. ``reduction``: how a larger map is reduced. Raises UserError: a size
    below 1.

    Example:
        >>> projection_convolution(256, (14, 14), 32, (7, 7))
        Conv2d(256, 32, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))
    """
    if min(*size_from, *size_to, in_channels, channels) < 1:
        raise UserError(
            f"cannot project {in_channels} channels of {size_from} to {channels} of {size_to}: sizes start at 1"
        )
    axes = list(zip(size_from, size_to, strict=True))
    pooled = reduction == "pooled" and size_from != size_to
    if all(s >= t for s, t in axes) and not pooled:
        rules = [_reducing(s, t, strided=reduction == "strided") for s, t in axes]
        kernel, stride, padding = _by_axis(rules)
        return _initialise(nn.Conv2d(in_channels, channels, kernel, stride, padding, device="meta"), generator)
    if all(t in (s, 2 * s) for s, t in axes):
        rules = [(1, 1, 0) if s == t else (4, 2, 1) for s, t in axes]
        kernel, stride, padding = _by_axis(rules)
        return _initialise(nn.ConvTranspose2d(in_channels, channels, kernel, stride, padding, device="meta"), generator)
    pointwise = _initialise(nn.Conv2d(in_channels, channels, 1, device="meta"), generator)
    return nn.Sequential(nn.AdaptiveAvgPool2d(size_to), pointwise)


def _reducing(size_from: int, size_to: int, strided: bool) -> tuple[int, int, int]:
    """(kernel, stride, padding) along an axis that does not grow."""
    if size_from == 2 * size_to:
        return 3, 2, 1
    stride = size_from // size_to if strided else 1
    return size_from - (size_to - 1) * stride, stride, 0


def _by_axis(rules: list[tuple[int, int, int]]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Turn (kernel, stride, padding) per axis into pairs per parameter."""
    (k0, s0, p0), (k1, s1, p1) = rules
    return (k0, k1), (s0, s1), (p0, p1)


def _initialise(module: _Module, generator: torch.Generator | None) -> _Module:
    """Give ``module`` memory and PyTorch's default initial weights, uniform in ±1/√fan_in, drawn from ``generator``."""
    bound = module.get_parameter("weight")[0].numel() ** -0.5
    for name in ("weight", "bias"):  # `to_empty` of a module on the meta device imports parts of torch's compiler
        drawn = torch.empty(module.get_parameter(name).shape).uniform_(-bound, bound, generator=generator)
        setattr(module, name, torch.nn.Parameter(drawn))
    return module
