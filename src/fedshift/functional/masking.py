"""Masks that split features into what domains share and what is specific to one (MDFNet)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedshift.errors import UserError


def straight_through_mask(logits: Tensor, draws: Tensor) -> Tensor:
    """Binary mask ``m = 1[u < p] + p − stopgrad(p)`` with ``p = σ(m̂)``.

    Its values are 0 or 1; its gradient is that of the probability. Source: MDFNet, after Chattopadhyay et al. (ECCV
    2020).

    Args:
        logits: m̂, (d,).
        draws: u, (b, d), uniform in [0, 1).

    Returns:
        (b, d).

    Raises:
        UserError: the widths differ.

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

    Args:
        specific: g^s, (…, d).
        invariant: g^I, (…, d).
        smoothing: added to numerator and denominator.

    Returns:
        (…).

    Raises:
        UserError: the shapes differ.

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


def challenged_features(
    features: Tensor, labels: Tensor, classifier: Callable[[Tensor], Tensor], feature_share: float, batch_share: float
) -> Tensor:
    """Features without those that decide most for the label, of the samples that this mask hurts most.

    Source: RSC (Huang et al., ECCV 2020), equations 1 to 4 and section 3.3. A share ends at the linearly interpolated
    percentile; what lies at or above it is muted.

    Args:
        features: z, (n, d).
        labels: (n,).
        classifier: logits of features, (n, C).
        feature_share: of a sample's features.
        batch_share: of the samples.

    Example:
        >>> z = torch.tensor([[1.0, 2.0, 3.0]])
        >>> weights = torch.tensor([[0.0, 9.0, 1.0], [0.0, 0.0, 0.0]])
        >>> challenged_features(z, torch.tensor([0]), lambda z: z @ weights.T, 0.5, 1.0).tolist()
        [[1.0, 0.0, 0.0]]
    """
    probe, true_class = features.detach().requires_grad_(True), labels[:, None]
    logits = classifier(probe)
    (by_feature,) = torch.autograd.grad(logits.gather(1, true_class).sum(), probe)
    with torch.no_grad():
        kept = by_feature < by_feature.quantile(1 - feature_share, dim=1, keepdim=True)
        hurt = logits.softmax(1).gather(1, true_class) - classifier(features * kept).softmax(1).gather(1, true_class)
        whole = hurt < hurt.quantile(1 - batch_share)
    return features * (kept | whole)
