"""FedSR's simple representations: Gaussian codes, their norm, and their distance from class references.

Source: Nguyen et al. (NeurIPS 2022). All in nats.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def norm_regulariser(codes: Tensor, form: Literal["squared", "norm"] = "squared") -> Tensor:
    """Penalty of the codes' norm, ``E‖z‖²`` (L_L2R), a scalar; or ``E‖z‖``, as in the released code.

    The squared form is, up to a constant, the cross-entropy from p(z) to a Gaussian around 0.

    Args:
        codes: z, (n, Z).
        form: ``"squared"`` or ``"norm"``. A code of zeros gets the gradient 0.

    Raises:
        UserError: other shapes, or an empty batch.

    Example:
        >>> codes = torch.tensor([[3.0, 4.0]])
        >>> norm_regulariser(codes), norm_regulariser(codes, "norm")
        (tensor(25.), tensor(5.))
    """
    if codes.dim() != 2 or not codes.numel():
        raise UserError(f"the norm regulariser needs codes (n, Z) of a batch, found {tuple(codes.shape)}")
    squares = codes.square().sum(1)
    if form == "squared":
        return squares.mean()
    # The root's slope at 0 is infinite, so codes of zeros get the gradient 0.
    return torch.where(squares > 0, squares, 1.0).sqrt().where(squares > 0, 0.0).mean()


def gaussian_divergence(
    means: Tensor,
    scales: Tensor,
    reference_means: Tensor,
    reference_scales: Tensor,
    factor: Tensor | float = 1.0,
    epsilon: float = 1e-6,
) -> Tensor:
    """``KL( N(cμ, (cσ)²) ‖ N(μ_y, σ_y²) )`` of diagonal Gaussians, for each sample.

    Per dimension it is ``log(σ_y/cσ) + ((cσ)² + (cμ − μ_y)²)/(2σ_y²) − ½``, summed over Z. With the reference of each
    sample's own class the mean is L_CMI, an upper bound of I(x; z | y).

    Args:
        means: μ of the codes, (n, Z).
        scales: σ of the codes, (n, Z).
        reference_means: μ_y, (n, Z).
        reference_scales: σ_y, (n, Z).
        factor: c, a learned number in the released code.
        epsilon: added inside the logarithms, because a softplus can underflow.

    Returns:
        (n,).

    Raises:
        UserError: shapes differ, or there is no sample.

    Example:
        >>> zero, one = torch.zeros(1, 2), torch.ones(1, 2)
        >>> gaussian_divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0]]), zero, one)
        tensor([1.3069])
    """
    shape = means.shape
    others = (scales.shape, reference_means.shape, reference_scales.shape)
    if means.dim() != 2 or not means.numel() or any(other != shape for other in others):
        text = ", ".join(str(tuple(other)) for other in (shape, *others))
        raise UserError(f"the divergence needs four tensors (n, Z), found {text}")
    means, scales = factor * means, factor * scales
    ratio = (scales.square() + (means - reference_means).square()) / (2 * reference_scales.square())
    return ((reference_scales + epsilon).log() - (scales + epsilon).log() + ratio - 0.5).sum(1)


def mean_prediction(logits: Tensor) -> Tensor:
    """``log mean_s softmax(logits_s)``, whose softmax is the mean prediction over S samples of the code.

    Args:
        logits: (S, n, C).

    Returns:
        (n, C).

    Raises:
        UserError: other shapes, or no sample.

    Example:
        >>> two = torch.tensor([[[1.0, 0.001]], [[0.5, 0.5]]]).log()
        >>> mean_prediction(two).exp().round(decimals=2)
        tensor([[0.7500, 0.2500]])
    """
    if logits.dim() != 3 or not logits.shape[0]:
        raise UserError(f"the mean prediction needs logits (S, n, C) with S > 0, found {tuple(logits.shape)}")
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))
