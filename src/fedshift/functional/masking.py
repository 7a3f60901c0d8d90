"""Masks that part features into what domains share and what they do not (MDFNet)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def straight_through_mask(logits: Tensor, draws: Tensor) -> Tensor:
    """``m = 1[u < p] + p − stopgrad(p)`` with ``p = σ(m̂)``: 0 or 1 forward, the probability's gradient backward
    (MDFNet, section 8.1, after Chattopadhyay et al., ECCV 2020).

    logits: m̂ (d,). draws: u (b, d), uniform in [0, 1). Returns (b, d). Raises UserError when the widths differ.
    """
    if logits.dim() != 1 or draws.shape[-1:] != logits.shape:
        raise UserError(
            f"a mask needs logits (d,) and draws (…, d), found {tuple(logits.shape)} and {tuple(draws.shape)}"
        )
    probabilities = logits.sigmoid()
    # Zero plus what has the gradient, so that the mask is exactly 0 or 1.
    return (draws < probabilities).to(logits.dtype) + (probabilities - probabilities.detach())


def soft_interaction(specific: Tensor, invariant: Tensor, smoothing: float = 0.0) -> Tensor:
    """``⟨g^s, g^I⟩ / Σ(g^s + g^I − g^s ⊗ g^I)`` along the last axis, (…, d) → (…) (MDFNet, section 8.2).

    A soft intersection over union in [0, 1] for arguments in [0, 1]; for others it has no lower bound. smoothing: added
    above and below. Raises UserError when the shapes differ.
    """
    if specific.shape != invariant.shape:
        raise UserError(
            f"the interaction of two masks needs equal shapes, found {tuple(specific.shape)} and "
            f"{tuple(invariant.shape)}"
        )
    both = specific * invariant
    return (both.sum(-1) + smoothing) / ((specific + invariant - both).sum(-1) + smoothing)


def draws_like(features: Tensor) -> Tensor:
    """Uniform numbers in the shape of ``features``, from torch's CPU generator (which an exchange seeds)."""
    return torch.rand(features.shape, dtype=features.dtype).to(features.device)
