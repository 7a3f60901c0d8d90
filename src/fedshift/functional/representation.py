"""Simple representations: Gaussian codes, their norm and their distance from class references (FedSR, Nguyen et al.,
NeurIPS 2022). All in nats."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def norm_regulariser(codes: Tensor, form: Literal["squared", "norm"] = "squared") -> Tensor:
    """``E‖z‖²``, a scalar (L_L2R), or ``E‖z‖`` (``"norm"``, the released code).

    codes: z, (n, Z). The squared form is, up to a constant, the cross-entropy from p(z) to a Gaussian around 0.
    Raises UserError for other shapes or an empty batch.
    """
    if codes.dim() != 2 or not codes.numel():
        raise UserError(f"the norm regulariser needs codes (n, Z) of a batch, found {tuple(codes.shape)}")
    squares = codes.square().sum(1)
    if form == "squared":
        return squares.mean()
    # The root's slope at 0 is infinite; a code of zeros has none of its own.
    return torch.where(squares > 0, squares, 1.0).sqrt().where(squares > 0, 0.0).mean()


def gaussian_divergence(
    means: Tensor,
    scales: Tensor,
    reference_means: Tensor,
    reference_scales: Tensor,
    factor: Tensor | float = 1.0,
    epsilon: float = 1e-6,
) -> Tensor:
    """``KL( N(cμ, (cσ)²) ‖ N(μ_y, σ_y²) )`` of diagonal Gaussians: (n, Z) each → (n,).

    Per dimension ``log(σ_y/cσ) + ((cσ)² + (cμ − μ_y)²)/(2σ_y²) − ½``, summed over Z. With each sample's own class
    reference its mean is L_CMI, an upper bound of I(x; z | y).

    means, scales: μ and σ of the codes. reference_means, reference_scales: μ_y and σ_y. factor: c, the released code's
    learned number. epsilon: added inside the logarithms, because a softplus can underflow. Raises UserError when shapes
    differ or there is no sample.
    """
    shape = means.shape
    others = (scales.shape, reference_means.shape, reference_scales.shape)
    if means.dim() != 2 or not means.numel() or any(other != shape for other in others):
        found = ", ".join(str(tuple(other)) for other in (shape, *others))
        raise UserError(f"the divergence needs four tensors (n, Z), found {found}")
    means, scales = factor * means, factor * scales
    ratio = (scales.square() + (means - reference_means).square()) / (2 * reference_scales.square())
    return ((reference_scales + epsilon).log() - (scales + epsilon).log() + ratio - 0.5).sum(1)


def mean_prediction(logits: Tensor) -> Tensor:
    """``log mean_s softmax(logits_s)``: (S, n, C) → (n, C), whose softmax is the mean over S samples.

    Raises UserError for other shapes or no sample.
    """
    if logits.dim() != 3 or not logits.shape[0]:
        raise UserError(f"the mean prediction needs logits (S, n, C) with S > 0, found {tuple(logits.shape)}")
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))
