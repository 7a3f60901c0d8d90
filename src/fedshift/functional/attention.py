"""Attention of one map to another.

CSAC: how well each layer of the fused model matches each layer of the local one. StableFDG: positions of an image that
look like its class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.errors import UserError


def cross_layer_attention(
    fused: Sequence[Tensor] | Tensor,
    local: Sequence[Tensor] | Tensor,
    position: bool = True,
    channel: bool = True,
    scale: bool = False,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Attention weights ``α`` of shape (R_fused, R_local); every row sums to 1 (CSAC, equations 7 to 9).

    Scores are the means over batch and entries of the maps ``AᵀB`` (d×d, position) and ``ABᵀ`` (c×c, channel). A
    softmax over the local layers normalises them. The weights are constants for back-propagation.

    The maps are never formed, because their means are products of means: ``mean(AᵀB) = Σ_c Ā_c B̄_c`` with Ā_c the mean
    of channel c over positions, and ``mean(ABᵀ) = Σ_p Ã_p B̃_p`` with Ã_p the mean of position p over channels.

    ``fused``: projected features of the fused model, one tensor (n, c, g, w) per layer or all stacked as (R, n, c, g,
    w). ``local``: features of the local model on the same mini-batch, likewise. ``position``: whether position
    attention takes part. With both, α is the mean of the two. ``channel``: whether channel attention takes part.
    ``scale``: divide position scores by √c and channel scores by √d, d = g·w. Not in the paper; raw means saturate the
    softmax. ``queries``: what stands for ``fused`` in the position attention; none: the same features. ``keys``: what
    stands for ``local`` there. Raises UserError: shapes differ, or no attention is chosen.

    Example:
        >>> layers = torch.zeros(2, 4, 3, 2, 2)  # two layers, four samples
        >>> cross_layer_attention(layers, layers)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    if not (position or channel):
        raise UserError("attention needs position, channel or both; switch attention off as a whole instead")
    shapes = _shapes(fused) | _shapes(local)
    if len(shapes) != 1 or len(next(iter(shapes))) != 4:
        raise UserError(f"attention needs features of one shape (n, c, g, w), found {sorted(shapes)}")
    with torch.no_grad():
        left, right = _stack(fused).flatten(3), _stack(local).flatten(3)
        n, c, d = left.shape[1:]
        scores: list[Tensor] = []
        if position:
            asking = left if queries is None else queries.flatten(3)
            answering = right if keys is None else keys.flatten(3)
            affinity = _product(asking.mean(3), answering.mean(3))
            scores.append(affinity / c**0.5 if scale else affinity)
        if channel:
            affinity = _product(left.mean(2), right.mean(2))
            scores.append(affinity / d**0.5 if scale else affinity)
        return torch.stack(scores).div_(n).softmax(2).mean(0)


def _shapes(layers: Sequence[Tensor] | Tensor) -> set[tuple[int, ...]]:
    """The shapes of one layer each; those of stacked layers are looked at once."""
    if isinstance(layers, Tensor):
        return {tuple(layers.shape[1:])}
    return {tuple(layer.shape) for layer in layers}


def _stack(layers: Sequence[Tensor] | Tensor) -> Tensor:
    """Layers as one tensor (R, n, c, g, w)."""
    return layers if isinstance(layers, Tensor) else torch.stack(list(layers))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of pooled features (R, n, …) of all pairs of layers, summed over samples."""
    return left.flatten(1) @ right.flatten(1).T
