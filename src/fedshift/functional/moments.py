"""M3SDA: moments of the domains' features, and how far two classifiers disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def moment_distance(features: Sequence[Tensor], moments: Literal["mean_variance", "raw"] = "raw") -> Tensor:
    """How far the domains' first two moments are apart, by Euclidean distances, a scalar.

    ``"raw"`` (M3SDA, Peng et al., ICCV 2019, definition 1): for ``E[x]`` and ``E[x²]`` each, the mean distance between
    a source's and the target's, plus the mean distance over all pairs of sources; the sum over both moments.
    ``"mean_variance"`` (the re-implementation in use, by Zhou et al.): the mean over mean and variance, the latter with
    b − 1, and over all pairs of domains alike.

    Args:
        features: one batch (b, d) per domain, the target's last; batches may differ in size.
        moments: which of the two. A pair with equal moments gets the gradient 0.

    Raises:
        UserError: fewer than two domains, features that differ in d, or batches of fewer than two samples (``"raw"``:
            one).
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
    if moments == "mean_variance":
        return gaps.sum() / (2 * count * (count - 1))
    sources = count - 1
    to_target = gaps[:, :sources, sources].sum() / sources
    return to_target + gaps[:, :sources, :sources].sum() / max(1, sources * (sources - 1))


def classifier_discrepancy(first: Tensor, second: Tensor) -> Tensor:
    """``mean |p₁ − p₂|`` over samples and classes, a scalar in [0, 2/C] (MCD, Saito et al., CVPR 2018; M3SDA,
    Peng et al., ICCV 2019).

    first, second: probabilities (b, C) of two classifiers on the same samples. Raises UserError when shapes differ or
    there is no sample.
    """
    if first.shape != second.shape or not first.numel():
        raise UserError(
            f"the discrepancy needs two classifiers' probabilities of the same samples, found {tuple(first.shape)} "
            f"and {tuple(second.shape)}"
        )
    return (first - second).abs().mean()
