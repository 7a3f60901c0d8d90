"""CORAL: the sources' features have like covariances.

Sun, Saenko: Deep CORAL: Correlation Alignment for Deep Domain Adaptation. ECCV 2016 Workshops, arXiv 1607.01719.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

C_e is the covariance of a domain's features (n − 1 below), d their width:
    ℓ(e, e') = 1/(4d²) ‖C_e − C_e'‖_F²                                                              (1)
    L(θ) = 1/K Σ_e L_e(θ) + λ · mean of ℓ over the pairs of domains

Where papers and code differ, and what was chosen. DomainBed: `CORAL` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The paper aligns one source with a target that has no labels. Here and in DomainBed the sources are aligned with
    each other, and the target is unseen.
 2. DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, CORAL and AbstractMMD.mmd) compares means too, and
    takes mean squares without the factor 1/4: ``moments: mean_and_covariance`` and ``setting: domainbed``.
 3. The paper aligns the outputs of the last layer; here and in DomainBed the features that the classifier reads.
 4. λ is chosen in the paper so that both terms end alike; here 1, as in DomainBed.
 5. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 78.8, PACS 86.2, OfficeHome 68.7,
TerraIncognita 47.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.functional.feature_alignment import coral_distance
from fedshift.methods.pooled.penalty import DomainPenalty, Step


class CORAL(DomainPenalty):
    """The mean of the domains' losses, and the distances of their features' covariances."""

    traits = DomainPenalty.traits.derive(
        name="coral",
        citation="Sun and Saenko, ECCV Workshops 2016",
        group="pooled",
        advice="The usual reference of domain generalization that aligns features; for an estimate it needs more than "
        "a few samples of each domain in a step.",
        settings={"domainbed": {"moments": "mean_and_covariance"}},
        tasks=WITHOUT_MASKS,
        relative_cost=1.2,
    )

    moments: Literal["covariance", "mean_and_covariance"] = Field(
        "covariance",
        description="what is compared: covariances, 1/4 of their mean squared difference; or means and covariances by "
        "mean squared differences (DomainBed)",
    )

    def penalty(self, step: Step) -> Tensor:
        return mean_over_pairs(
            step.by_domain(step.features), lambda first, second: coral_distance(first, second, self.moments)
        )


def mean_over_pairs(features: Sequence[Tensor], distance: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean distance over all pairs of domains, a scalar; 0 for a single domain."""
    distances = [distance(item, other) for item, other in itertools.combinations(features, 2)]
    return torch.stack(distances).mean() if distances else features[0].sum() * 0.0
