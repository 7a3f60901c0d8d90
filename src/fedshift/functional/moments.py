"""M3SDA: distances between moments of the domains' features, and the discrepancy of two classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError


def moment_distance(features: Sequence[Tensor], moments: Literal["mean_variance", "raw"] = "raw") -> Tensor:
    """Distance of the domains' first two moments, by Euclidean norms, a scalar (M3SDA, Peng et al., ICCV 2019).

    A pair of domains with equal moments gets the gradient 0.

    Args:
        features: one batch (b, d) per domain, the target's last. Batches may differ in size.
        moments: ``"raw"`` is definition 1 of the paper. For ``E[x]`` and ``E[x²]`` each, it takes the mean distance of
            sources to the target plus the mean distance over all pairs of sources; both are added. ``"mean_variance"``
            is the common re-implementation by Zhou et al. It is the mean over mean and variance (the latter with b − 1)
            and over all pairs of domains alike.

    Raises:
        UserError: fewer than two domains, features that differ in d, or batches of fewer than two samples (``"raw"``:
            one).

    Example:
        >>> moment_distance([torch.tensor([[0.0]]), torch.tensor([[2.0]])])  # |0 − 2| + |0 − 4|
        tensor(6.)
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
    # The sums run over ordered pairs. Those of a domain with itself are 0 and do not count.
    count = len(shapes)
    if moments == "mean_variance":
        return gaps.sum() / (2 * count * (count - 1))
    sources = count - 1
    to_target = gaps[:, :sources, sources].sum() / sources
    return to_target + gaps[:, :sources, :sources].sum() / max(1, sources * (sources - 1))


def classifier_discrepancy(first: Tensor, second: Tensor) -> Tensor:
    """``mean |p₁ − p₂|`` over samples and classes, a scalar in [0, 2/C] (MCD, Saito et al., CVPR 2018; M3SDA).

    Args:
        first: probabilities of one classifier, (b, C).
        second: probabilities of the other on the same samples, (b, C).

    Raises:
        UserError: shapes differ, or there is no sample.

    Example:
        >>> classifier_discrepancy(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
        tensor(0.5000)
    """
    if first.shape != second.shape or not first.numel():
        raise UserError(
            f"the discrepancy needs two classifiers' probabilities of the same samples, found {tuple(first.shape)} "
            f"and {tuple(second.shape)}"
        )
    return (first - second).abs().mean()
