"""A direction of the common model that no site's update contradicts (FedOMG)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def products_about(distances: Tensor) -> Tensor:
    """``⟨x_i − o, x_j − o⟩`` of all pairs of points, from squared distances between the points and o.

    Args:
        distances: squared distances, (K + 1, K + 1); the last point is o.

    Example:
        >>> products_about(torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    norms = distances[:-1, -1]
    return (norms[:, None] + norms - distances[:-1, :-1]) / 2


def matching_weights(gram: Tensor, kappa: float, steps: int = 500, rate: float = 0.5) -> Tensor:
    """Γ on the simplex that minimises ``⟨Γ·g, ḡ⟩ + κ‖ḡ‖·‖Γ·g‖``, ḡ the mean of the sites' updates.

    By exponentiated gradient descent from equal weights; the best weights on the way are kept. Source: FedOMG (Nguyen
    et al., ICLR 2025, theorem 2), after CAGrad (Liu et al., NeurIPS 2021).

    Args:
        gram: ⟨g_i, g_j⟩ of all pairs of updates, (K, K).
        kappa: κ.
        steps: of the descent.
        rate: of the descent, for a Gram matrix of mean diagonal 1.

    Returns:
        (K,) float64, with sum 1.

    Raises:
        UserError: the matrix is not square or not finite.

    Example:
        >>> matching_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), kappa=0.5)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1] or not bool(gram.isfinite().all()):
        raise UserError(f"a direction is matched by a finite Gram matrix (K, K), found one of {tuple(gram.shape)}")
    products = gram.double()
    scale = products.diagonal().mean()
    weights = torch.full((len(gram),), 1 / len(gram), dtype=torch.float64)
    if not scale > 0:
        return weights
    products = products / scale
    towards_mean = products.mean(1)
    strength = kappa * towards_mean.mean().clamp_min(0).sqrt()
    best, lowest = weights, float("inf")
    for _ in range(steps):
        length = (weights @ products @ weights).clamp_min(1e-12).sqrt()
        value = float(weights @ towards_mean + strength * length)
        if value < lowest:
            best, lowest = weights, value
        slope = towards_mean + strength * (products @ weights) / length
        weights = weights * (-rate * (slope - slope.min())).exp()
        weights = weights / weights.sum()
    return best


def matching_shares(gram: Tensor, kappa: float) -> Tensor:
    """``1/K + κ‖ḡ‖/‖Γ·g‖ · Γ``: how much of each site's update makes the invariant direction.

    Source: FedOMG (ICLR 2025, equation 9). Where Γ·g vanishes the mean alone is left.

    Args:
        gram: ⟨g_i, g_j⟩ of all pairs of updates, (K, K).
        kappa: κ.

    Returns:
        (K,) float64; their sum is at least 1.

    Example:
        >>> matching_shares(torch.eye(2), kappa=0.5)
        tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    weights, products = matching_weights(gram, kappa), gram.double()
    mean = products.mean().clamp_min(0).sqrt()
    length = (weights @ products @ weights).clamp_min(0).sqrt()
    plain = torch.full_like(weights, 1 / len(weights))
    return plain + kappa * mean / length * weights if length > 1e-6 * products.diagonal().max().sqrt() else plain
