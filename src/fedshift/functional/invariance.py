"""Penalties on the differences of domains' risks: IRM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def irm_penalty(logits: Sequence[Tensor], labels: Sequence[Tensor], *, halves: bool = False) -> Tensor:
    """``1/K Σ_e (d/dw CE(w · logits_e))²`` at w = 1, a scalar.

    Source: IRM (Arjovsky et al., 2019), IRMv1. The derivative is ``mean Σ_c p_c z_c − z_y``.

    ``logits``: (b, C) of each domain. ``labels``: (b,) of each domain. ``halves``: multiply the derivatives of every
    second sample and of the others, instead of squaring that of all; for a domain with one sample the square.

    Example:
        >>> irm_penalty([torch.tensor([[1.0, 0.0]])], [torch.tensor([0])])  # (0.7311 − 1)²
        tensor(0.0723)
    """
    return torch.stack([_of_domain(*pair, halves) for pair in zip(logits, labels, strict=True)]).mean()


def _of_domain(logits: Tensor, labels: Tensor, halves: bool) -> Tensor:
    by_scale = (logits.softmax(1) * logits).sum(1) - logits.gather(1, labels[:, None]).squeeze(1)
    if halves and len(labels) > 1:
        return by_scale[::2].mean() * by_scale[1::2].mean()
    return by_scale.mean().square()
