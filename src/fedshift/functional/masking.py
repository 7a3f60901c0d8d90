"""Masks that split features into what domains share and what is specific to one (MDFNet)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def straight_through_mask(logits: Tensor, draws: Tensor) -> Tensor:
    """Binary mask ``m = 1[u < p] + p − stopgrad(p)`` with ``p = σ(m̂)``.

    Its values are 0 or 1; its gradient is that of the probability. Source: MDFNet, after Chattopadhyay et al. (ECCV
    2020).

    ``logits``: m̂, (d,). ``draws``: u, (b, d), uniform in [0, 1). Returns (b, d). Raises UserError: the widths differ.

    Example:
        >>> straight_through_mask(torch.tensor([0.0, 0.0]), torch.tensor([[0.2, 0.8]]))  # p = ½
        tensor([[1., 0.]])
    """
    if logits.dim() != 1 or draws.shape[-1:] != logits.shape:
        raise UserError(
            f"a mask needs logits (d,) and draws (…, d), found {tuple(logits.shape)} and {tuple(draws.shape)}"
        )
    probabilities = logits.sigmoid()
    # The bracket is exactly 0 and carries the gradient, so the mask is exactly 0 or 1.
    return (draws < probabilities).to(logits.dtype) + (probabilities - probabilities.detach())


def soft_interaction(specific: Tensor, invariant: Tensor, smoothing: float = 0.0) -> Tensor:
    """Soft intersection over union, ``⟨g^s, g^I⟩ / Σ(g^s + g^I − g^s ⊗ g^I)``, along the last axis (MDFNet).

    It lies in [0, 1] for arguments in [0, 1], and is 0 where both are empty. For other arguments it has no lower bound.

    ``specific``: g^s, (…, d). ``invariant``: g^I, (…, d). ``smoothing``: added to numerator and denominator. Returns
    (…). Raises UserError: the shapes differ.

    Example:
        >>> soft_interaction(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0]))
        tensor(0.3333)
    """
    if specific.shape != invariant.shape:
        raise UserError(
            f"the interaction of two masks needs equal shapes, found {tuple(specific.shape)} and "
            f"{tuple(invariant.shape)}"
        )
    both = specific * invariant
    union = (specific + invariant - both).sum(-1) + smoothing
    return (both.sum(-1) + smoothing) / torch.where(union == 0, 1.0, union)


def draws_like(features: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) in the shape of ``features``, from torch's CPU generator (which each exchange seeds).

    Example:
        >>> draws_like(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    return torch.rand(features.shape, dtype=features.dtype).to(features.device)
