"""GroupDRO: the worst group counts most.

Sagawa, Koh, Hashimoto, Liang: Distributionally Robust Neural Networks for Group Shifts: On the Importance of
Regularization for Worst-Case Generalization. ICLR 2020, arXiv 1911.08731, algorithm 1.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

Groups are the sources. In every step
    q_e ← q_e exp(η_q (L_e + C/√n_e)),  q ← q / Σ q
    θ ← θ − η ∇ Σ_e q_e L_e(θ)
with q_e = 1/K at first and n_e the samples of a source. C = 0: no group adjustment (section 3.3).

Where papers and code differ, and what was chosen
 1. The paper draws one group in a step. Its code (kohpangwei/group_DRO, loss.py, LossComputer.compute_robust_loss) and
    DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, GroupDRO) use all groups of a step; so does this.
 2. η_q = 0.01 in both codes (run_expt.py; domainbed/hparams_registry.py).
 3. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 76.7, PACS 84.4, OfficeHome 66.0,
TerraIncognita 43.2.
"""

from __future__ import annotations

from typing import cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step
from fedshift.models.network import Network


class GroupDRO(DomainLoss):
    """The domains' losses, with weights that grow where the loss is large."""

    traits = DomainLoss.traits.derive(
        name="groupdro",
        citation="Sagawa et al., ICLR 2020",
        group="pooled",
        advice="For the worst of the sources rather than their mean; its weights need a long run to move.",
        tasks=WITHOUT_MASKS,
        tests=MethodTests(
            options={"weights_rate": tries(0.0, 0.5), "adjustment": tries(1.0, weights_rate=0.5)},
            golden={"weights_rate": 0.5},
        ),
    )

    weights_rate: NonNegativeFloat = Field(0.01, description="η_q: how fast the weights of the domains move")
    adjustment: NonNegativeFloat = Field(0.0, description="C: what smaller domains have added to their losses")

    def build_parts(self, model: Network, domains: int) -> nn.Module:
        return DomainWeights(domains)

    def loss(self, step: Step) -> Tensor:
        """Σ_e q_e L_e, after the step of q."""
        raised = step.losses.detach()
        if self.adjustment:
            sizes = torch.bincount(step.site.data.domain_numbers.flatten(), minlength=len(raised))
            raised = raised + self.adjustment / sizes.to(raised).sqrt()
        q = cast(DomainWeights, step.parts).move(self.weights_rate * raised)
        return (q * step.losses).sum()


class DomainWeights(nn.Module):
    """q, a probability for each domain."""

    q: Tensor

    def __init__(self, domains: int) -> None:
        super().__init__()
        self.register_buffer("q", torch.full((domains,), 1 / domains))

    def move(self, by: Tensor) -> Tensor:
        """q after a step of exponentiated gradient."""
        self.q = (self.q.log() + by.to(self.q)).softmax(0)
        return self.q
