"""Styles as channel statistics, and images that take on another style (CCST, Chen et al., WACV 2023).

A style is a mean and a standard deviation per channel, ``σ = sqrt(variance + ε)`` with ε = 1e-5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError

EPSILON = 1e-5


def channel_styles(maps: Tensor, epsilon: float = EPSILON, *, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel of every image.

    ``maps``: images or feature maps, (n, c, h, w). ``epsilon``: ε. ``unbiased``: divide the variance by n − 1, as the
    released code does for the content. Returns means and deviations, (n, c) each. Raises UserError: other shapes.

    Example:
        >>> channel_styles(torch.tensor([[[[1.0, 3.0], [3.0, 1.0]]]]), epsilon=0.0)
        (tensor([[2.]]), tensor([[1.]]))
    """
    if maps.dim() != 4 or not maps.numel():
        raise UserError(f"styles need images or feature maps (n, c, h, w), found {tuple(maps.shape)}")
    positions = maps.shape[2:].numel()
    means = maps.mean((2, 3), keepdim=True)
    # Tensor.var takes up to ten times as long on a processor.
    squares = torch.linalg.vector_norm(maps - means, dim=(2, 3)).square()
    return means[:, :, 0, 0], (squares / max(positions - unbiased, 1) + epsilon).sqrt()


def adain(
    maps: Tensor, means: Tensor, deviations: Tensor, epsilon: float = EPSILON, *, unbiased: bool = False
) -> Tensor:
    """Adaptive instance normalisation, ``σ_S · (F − μ(F))/σ(F) + μ_S`` per image and channel.

    Source: Huang & Belongie (ICCV 2017).

    ``maps``: F, (n, c, h, w). ``means``: μ_S, (n, c). ``deviations``: σ_S, (n, c). ``epsilon``: ε of the own deviation.
    ``unbiased``: as in `channel_styles`. Raises UserError: other shapes.

    Example:
        >>> maps = torch.tensor([[[[1.0, 3.0], [3.0, 1.0]]]])
        >>> adain(maps, means=torch.tensor([[10.0]]), deviations=torch.tensor([[5.0]]), epsilon=0.0)
        tensor([[[[ 5., 15.],
                  [15.,  5.]]]])
    """
    own_means, own_deviations = channel_styles(maps, epsilon, unbiased=unbiased)
    if means.shape != own_means.shape or deviations.shape != own_means.shape:
        raise UserError(
            f"{maps.shape[0]} images of {maps.shape[1]} channels need as many styles, found {tuple(means.shape)} and "
            f"{tuple(deviations.shape)}"
        )
    scale = deviations / own_deviations
    return maps * scale[:, :, None, None] + (means - own_means * scale)[:, :, None, None]
