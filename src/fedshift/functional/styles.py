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

    Args:
        maps: images or feature maps, (n, c, h, w).
        epsilon: ε.
        unbiased: divide the variance by n − 1, as the released code does for the content.

    Returns:
        Means and deviations, (n, c) each.

    Raises:
        UserError: other shapes.

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

    Args:
        maps: F, (n, c, h, w).
        means: μ_S, (n, c).
        deviations: σ_S, (n, c).
        epsilon: ε of the own deviation.
        unbiased: as in `channel_styles`.

    Raises:
        UserError: other shapes.

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


class StyleAccumulator:
    """The overall style of many images: mean and deviation per channel over all pixels of all images, in one pass.

    The variance is the mean of the images' variances plus the variance of their means. Sums are float64.

    Example:
        >>> style = StyleAccumulator()
        >>> style.add(torch.tensor([[[[0.0, 2.0]]]]))
        >>> style.add(torch.tensor([[[[4.0, 6.0]]]]))
        >>> mean, deviation = style.result()
        >>> mean, deviation.square().round(decimals=2)
        (tensor([3.]), tensor([5.]))
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add images or maps (n, c, h, w), or vectors (n, d) whose columns count as channels."""
        # On the CPU, because not every accelerator has float64.
        rows = values.detach().cpu().double().transpose(0, 1).flatten(1)  # (c, values of the channel)
        self._count += rows.shape[1]
        self._sums = rows.sum(1) if self._sums is None else self._sums + rows.sum(1)
        squares = rows.square().sum(1)
        self._squares = squares if self._squares is None else self._squares + squares

    def result(self, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
        """Mean and deviation of all that was added.

        Returns:
            (c,) float32 each.

        Raises:
            UserError: nothing was added.
        """
        if self._sums is None or self._squares is None or not self._count:
            raise UserError("a style needs at least one image")
        mean = self._sums / self._count
        variance = (self._squares / self._count - mean.square()).clamp(min=0)
        return mean.float(), (variance + epsilon).sqrt().float()


def style_of_groups(maps: Tensor, groups: Tensor, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
    """One style of many images, in which each group of them counts the same.

    With means over all positions of a group's images, ``μ`` is the mean over groups of E x, and ``σ² + ε`` that of
    E x² less μ². Source: PARDON (Nguyen, Johnson, Leach, ICDCS 2025), judydnguyen/PARDON-FedDG, src/client.py,
    `DGClient.abstract_style`.

    Args:
        maps: images or feature maps, (n, c, h, w).
        groups: of each image, (n,) int64 0, 1, …
        epsilon: ε.

    Returns:
        Mean and deviation, (c,) each.

    Example:
        >>> maps = torch.tensor([0.0, 0.0, 4.0])[:, None, None, None]
        >>> style_of_groups(maps, torch.tensor([0, 0, 1]), epsilon=0.0)
        (tensor([2.]), tensor([2.]))
    """
    moments = torch.stack([maps.double().mean((2, 3)), maps.double().square().mean((2, 3))])  # (2, n, c)
    count = int(groups.max()) + 1
    sums = moments.new_zeros(2, count, maps.shape[1]).index_add_(1, groups, moments)
    mean, square = (sums / torch.bincount(groups, minlength=count)[:, None]).mean(1)
    return mean.to(maps), ((square - mean.square()).clamp(min=0) + epsilon).sqrt().to(maps)


def style_assignment(samples: int, domains: int, level: int, generator: torch.Generator) -> Tensor:
    """Draw which L of K domains each sample takes its style from, without replacement.

    A sample that draws its own domain stays as it is there. So L = K keeps one untouched copy of each.

    Args:
        samples: number of samples.
        domains: K.
        level: L, 1 to K.
        generator: generator of the draw, on the CPU.

    Returns:
        (samples, L) int64.

    Raises:
        UserError: L is outside 1 … K.

    Example:
        >>> style_assignment(4, 3, 3, torch.Generator().manual_seed(0)).sort(1).values[0]
        tensor([0, 1, 2])
    """
    if not 1 <= level <= domains:
        raise UserError(f"a sample can take 1 to {domains} of {domains} styles, found level {level}")
    return torch.rand(samples, domains, generator=generator).argsort(1)[:, :level]
