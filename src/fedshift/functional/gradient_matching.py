"""Gradients of sites that agree: a step that none contradicts (FedOMG), signs (FedGMA), directions (MCGDM)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
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


def matching_weights(gram: Tensor, kappa: float) -> Tensor:
    """Γ on the simplex that minimises ``⟨Γ·g, ḡ⟩ + κ‖ḡ‖·‖Γ·g‖``, ḡ the mean of the sites' updates.

    The function is convex. Sequential quadratic programming finds its minimum, also where one update is much longer
    than the others. Source: FedOMG (Nguyen et al., ICLR 2025, theorem 2), after CAGrad (Liu et al., NeurIPS 2021).

    Args:
        gram: ⟨g_i, g_j⟩ of all pairs of updates, (K, K).
        kappa: κ.

    Returns:
        (K,) float64, with sum 1.

    Raises:
        UserError: the matrix is not square or not finite.

    Example:
        >>> matching_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), kappa=0.5)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    from scipy.optimize import minimize  # slow to import, and only this function needs it

    if gram.dim() != 2 or gram.shape[0] != gram.shape[1] or not bool(gram.isfinite().all()):
        raise UserError(f"a direction is matched by a finite Gram matrix (K, K), found one of {tuple(gram.shape)}")
    sites = len(gram)
    equal = np.full(sites, 1 / sites)
    products = gram.double().numpy(force=True)
    scale = products.diagonal().mean()
    if not scale > 0:
        return torch.from_numpy(equal)
    products = products / scale
    towards_mean = products.mean(1)
    strength = kappa * np.sqrt(max(towards_mean.mean(), 0.0))

    def value_and_slope(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        mixed = products @ weights
        length = np.sqrt(max(weights @ mixed, 1e-12))
        return float(weights @ towards_mean + strength * length), towards_mean + strength * mixed / length

    minimum = minimize(
        value_and_slope,
        equal,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * sites,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 200},
    ).x.clip(0)
    minimum = minimum / minimum.sum()
    return torch.from_numpy(min(minimum, equal, key=lambda weights: value_and_slope(weights)[0]))


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


def masked_by_agreement(update: Tensor, signs: Tensor, agreement: float) -> Tensor:
    """``m ⊙ Δ`` with ``m = 1`` where ``A = |mean sign| ≥ τ``, else ``A``.

    Source: Tenison et al., Gradient Masked Averaging for Federated Learning, TMLR 2023.

    Args:
        update: Δ, the mean of the sites' updates, of any shape.
        signs: The mean of the signs of their updates, of the same shape.
        agreement: τ, 0 to 1.

    Example:
        >>> masked_by_agreement(torch.tensor([2.0, 2.0]), torch.tensor([-1.0, 0.5]), agreement=0.8)
        tensor([2., 1.])
    """
    agreed = signs.abs()
    return update * agreed.where(agreed < agreement, 1.0)


def direction_gap(gradients: Sequence[Tensor], references: Sequence[Tensor]) -> Tensor:
    """``1 − cos(g, r)``, the mean over tensors; of a matrix the cosine is the mean over its rows (MCGDM).

    Source: Wei, Han (AAAI 2024), as in their code (weiyikang/FedGM_torch, train.py, `train_fedgm`).

    Args:
        gradients: g.
        references: r, in the same shapes.

    Example:
        >>> weight, bias = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([3.0, 0.0])
        >>> direction_gap([weight, bias], [weight, -bias])  # (0 + 2)/2
        tensor(1.)
    """
    gaps = []
    for gradient, reference in zip(gradients, references, strict=True):
        rows = (gradient[None], reference[None]) if gradient.dim() < 2 else (gradient.flatten(1), reference.flatten(1))
        gaps.append(1 - F.cosine_similarity(*rows, dim=1).mean())
    return torch.stack(gaps).mean()
