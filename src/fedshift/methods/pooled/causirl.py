"""CausIRL: two random mixtures of the sources have like features.

Chevalley, Bunne, Krause, Bauer: Invariant Causal Mechanisms through Distribution Matching. 2022, arXiv 2206.11646.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

Each domain's batch is cut at a place drawn anew; the first parts are S₁, the others S₂:
    L(θ) = 1/K Σ_e L_e(θ) + λ D(f(S₁), f(S₂))

Where papers and code differ, and what was chosen. DomainBed: `AbstractCausIRL` and its base in
facebookresearch/DomainBed, domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. D (``distance``) is the distance of `coral` with means, or that of `mmd` with its seven kernels: `CausIRL_CORAL`
    and `CausIRL_MMD` of DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, AbstractCausIRL). λ = 1.
 2. The place is uniform on 0 … n − 1. Where a mixture has fewer than two samples, the penalty is 0 (DomainBed).
 3. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.functional.feature_alignment import coral_distance, gaussian_discrepancy
from fedshift.methods.pooled.mmd import MMD
from fedshift.methods.pooled.penalty import DomainPenalty, Step


class CausIRL(DomainPenalty):
    """The mean of the domains' losses, and the distance of two random mixtures of their features."""

    traits = DomainPenalty.traits.derive(
        name="causirl",
        citation="Chevalley et al., 2022",
        group="pooled",
        advice="As coral or mmd, with one distance for all domains instead of one for each pair.",
        tasks=WITHOUT_MASKS,
        relative_cost=1.2,
    )

    distance: Literal["coral", "mmd"] = Field(
        "coral", description="D: squared differences of means and covariances, or the Gaussian discrepancy"
    )

    def penalty(self, step: Step) -> Tensor:
        by_domain = step.by_domain(step.features)
        cuts = [int(torch.randint(len(item), (), generator=step.draws)) for item in by_domain]
        first = torch.cat([item[:cut] for item, cut in zip(by_domain, cuts, strict=True)])
        second = torch.cat([item[cut:] for item, cut in zip(by_domain, cuts, strict=True)])
        if min(len(first), len(second)) < 2:
            return step.features.sum() * 0.0
        if self.distance == "coral":
            return coral_distance(first, second, "mean_and_covariance")
        return gaussian_discrepancy([first, second], MMD().kernels)
