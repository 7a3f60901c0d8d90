"""Distances between the feature distributions of several domains: CORAL, and MMD with fixed Gaussian kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def coral_distance(
    first: Tensor, second: Tensor, moments: Literal["covariance", "mean_and_covariance"] = "covariance"
) -> Tensor:
    """Distance of two batches by their covariances, a scalar.

    Source: Deep CORAL (Sun, Saenko, ECCV 2016 Workshops), equation 1. With ``mean_and_covariance`` it is the sum of the
    mean squared differences of means and of covariances, without the factor 1/4 (DomainBed).

    ``first``: (n, d). ``second``: (m, d). ``moments``: what is compared. Raises UserError: a batch has fewer than two
    samples.

    Example:
        >>> coral_distance(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]]))  # variances 2 and 8
        tensor(9.)
    """
    if min(len(first), len(second)) < 2:
        raise UserError(f"CORAL needs two samples of each domain, found {len(first)} and {len(second)}")
    gap = (_covariance(first) - _covariance(second)).square().mean()
    if moments == "covariance":
        return gap / 4
    return gap + (first.mean(0) - second.mean(0)).square().mean()


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    covariance: Tensor = centred.T @ centred / (len(features) - 1)
    return covariance


def gaussian_discrepancy(features: Sequence[Tensor], kernels: Sequence[float]) -> Tensor:
    """The mean over all pairs of domains of ``MMD² = mean k_ss + mean k_tt − 2 mean k_st``; 0 for a single domain.

    ``k(a, b) = Σ_g exp(−g ‖a − b‖²)``. Source: Gretton et al., JMLR 2012; kernels as in DomainBed.

    ``features``: one batch (b, d) per domain, of any sizes. ``kernels``: g of each kernel.

    Example:
        >>> gaussian_discrepancy([torch.tensor([[0.0]]), torch.tensor([[1.0]])], kernels=[1.0])  # 2 − 2/e
        tensor(1.2642)
    """
    number = len(features)
    if number < 2:
        return features[0].sum() * 0.0
    rows = torch.cat(list(features))
    # By way of inner products, as DomainBed, the distance of a sample to itself would be what rounding leaves of it.
    distances = (rows[:, None] - rows).square().sum(2).clamp_min(1e-30)
    kernel = torch.stack([(-g * distances).exp() for g in kernels]).sum(0)
    sizes = [len(batch) for batch in features]
    means = torch.stack(
        [torch.stack([block.mean() for block in torch.split(row, sizes, 1)]) for row in torch.split(kernel, sizes)]
    )
    within = means.diagonal().sum()
    return 2 * (number * within - means.sum()) / (number * (number - 1))
