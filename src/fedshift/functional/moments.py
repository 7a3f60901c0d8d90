"""M3SDA: moments of the domains' features, and how far two classifiers disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def moment_distance(features: Sequence[Tensor], moments: Literal["mean_variance", "raw"] = "mean_variance") -> Tensor:
    """Mean Euclidean distance between the domains' moments, over two moments and all pairs of domains, a scalar
    (M3SDA, Peng et al., ICCV 2019, section 9.4).

    features: one batch (b, d) per domain, sources and target alike; batches may differ in size.
    moments: ``"mean_variance"`` (the usual re-implementation): mean and variance, the latter with b − 1. ``"raw"`` (the
        paper): ``E[x]`` and ``E[x²]``.
    A pair with equal moments gets the gradient 0. Raises UserError for fewer than two domains, features that differ in
    d, and batches of fewer than two samples (``"raw"``: one).
    """
    shapes = [tuple(batch.shape) for batch in features]
    fewest = 2 if moments == "mean_variance" else 1
    if len(shapes) < 2 or any(len(s) != 2 or s[0] < fewest or s[1] != shapes[0][1] for s in shapes):
        raise UserError(
            f"the moment distance needs two or more domains with features (b, d) of one d and at least {fewest} "
            f"samples each, found {shapes}"
        )
    second = [batch.var(0) if moments == "mean_variance" else batch.square().mean(0) for batch in features]
    both = torch.stack([torch.stack([batch.mean(0) for batch in features]), torch.stack(second)])
    gaps: Tensor = torch.linalg.vector_norm(both[:, :, None] - both[:, None], dim=3)
    # Of all ordered pairs those of a domain with itself are 0 and do not count.
    count = len(shapes)
    return gaps.sum() / (2 * count * (count - 1))


def classifier_discrepancy(first: Tensor, second: Tensor) -> Tensor:
    """``mean |p₁ − p₂|`` over samples and classes, a scalar in [0, 2/C] (MCD, Saito et al., CVPR 2018; M3SDA, section
    9.4).

    first, second: probabilities (b, C) of two classifiers on the same samples. Raises UserError when shapes differ or
    there is no sample.
    """
    if first.shape != second.shape or not first.numel():
        raise UserError(
            f"the discrepancy needs two classifiers' probabilities of the same samples, found {tuple(first.shape)} "
            f"and {tuple(second.shape)}"
        )
    return (first - second).abs().mean()
