"""IB-ERM: empirical risk with features that vary little within a source.

Ahuja, Caballero, Zhang, Gagnon-Audet, Bengio, Mitliagkas, Rish: Invariance Principle Meets Information Bottleneck for
Out-of-Distribution Generalization. NeurIPS 2021, arXiv 2106.06607.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L(θ) = 1/K Σ_e L_e(θ) + λ 1/K Σ_e mean over features of Var_e(f)
Var_e is the variance of a feature in a domain's batch (n − 1 below); the entropy that the paper bounds grows with it.

Where papers and code differ, and what was chosen
 1. ``setting: domainbed`` (facebookresearch/DomainBed, domainbed/algorithms.py, IB_ERM; hparams_registry.py): λ = 100,
    and no penalty before step 500, at which Adam begins anew. **Before that step it is plain training**.
 2. Here the penalty is there from the first step on with λ = 1: 100 makes plain SGD diverge.
 3. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import LaterPenalty, Step


class IBERM(LaterPenalty):
    """The mean of the domains' losses, and the variance of their features."""

    traits = LaterPenalty.traits.derive(
        name="ib_erm",
        citation="Ahuja et al., NeurIPS 2021",
        group="pooled",
        advice="For features that hold more than the label needs; with a long run and a large weight they may vanish.",
        settings={"domainbed": {"penalty_weight": 100.0, "penalty_start": 500, "restart_optimizer": True}},
        tasks=WITHOUT_MASKS,
        tests=MethodTests(
            options={"rescaled": tries(True, penalty_weight=2.0)},
            golden={"penalty_weight": 0.1},
        ),
    )

    weight_before: NonNegativeFloat = Field(0.0, description="weight of the penalty until then")

    def penalty(self, step: Step) -> Tensor:
        variances = [item.var(0, correction=min(1, len(item) - 1)).mean() for item in step.by_domain(step.features)]
        return torch.stack(variances).mean()
