"""Steps that look for flat minima: the gradient is taken where the loss is worst nearby (SAM, ASAM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def worst_nearby(
    parameters: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
    radius: float,
    *,
    adaptive: bool,
    eta: float = 0.2,
    biases: bool = True,
) -> dict[str, Tensor]:
    """``θ + ε`` with ``ε = ρ g/‖g‖`` (SAM) or ``ε = ρ T²g/‖Tg‖, T = |θ| + η`` (ASAM).

    ε is a constant for back-propagation, so a gradient taken at θ + ε arrives at θ. Sources: Foret, Kleiner, Mobahi,
    Neyshabur (ICLR 2021, equation 2); Kwon, Kim, Park, Choi (ICML 2021, equation 4).

    Args:
        parameters: θ by name.
        gradients: g, in the same order.
        radius: ρ.
        adaptive: whether it is ASAM's.
        eta: η of ASAM.
        biases: whether T is ``|θ| + η`` of biases, too; else theirs is 1.

    Example:
        >>> theta, gradient = {"w": torch.tensor([1.0, 1.0])}, [torch.tensor([3.0, 4.0])]
        >>> worst_nearby(theta, gradient, radius=0.5, adaptive=False)
        {'w': tensor([1.3000, 1.4000])}
    """
    scales = [
        value.detach().abs() + eta if adaptive and (biases or "weight" in name) else torch.ones_like(value)
        for name, value in parameters.items()
    ]
    scaled = [scale * gradient.detach() for scale, gradient in zip(scales, gradients, strict=True)]
    norm = torch.stack([tensor.square().sum() for tensor in scaled]).sum().sqrt().clamp_min(1e-12)
    moves = [radius * scale * tensor / norm for scale, tensor in zip(scales, scaled, strict=True)]
    return {name: value + move for (name, value), move in zip(parameters.items(), moves, strict=True)}
