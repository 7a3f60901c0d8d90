"""IRM: one classifier that is best for every source at once.

Arjovsky, Bottou, Gulrajani, Lopez-Paz: Invariant Risk Minimization. 2019, arXiv 1907.02893.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L(θ) = 1/K Σ_e L_e(θ) + λ 1/K Σ_e ‖∇_{w|w=1} L_e(w · θ)‖²                                  (IRMv1)
where w is a number that multiplies the network's outputs.

Where papers and code differ, and what was chosen
 1. Defaults are those of facebookresearch/InvariantRiskMinimization, code/colored_mnist/main.py: λ = 10,000 from step
    100 on and 1 before, and the whole loss is divided by a weight above 1.
 2. Its squared gradient is of a domain's whole batch, which is larger on average than that of all samples.
    ``estimate: halves`` multiplies the gradients of two halves (appendix D), which is not.
 3. ``setting: domainbed`` (facebookresearch/DomainBed, domainbed/algorithms.py, IRM): halves; λ = 100 from step 500 on
    and 1 before, not divided; Adam begins anew at step 500. **Before that step it is another method**: a run must be
    much longer.
 4. Their loss has an L2 penalty; here that is ``training.weight_decay``.
 5. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 78.5, PACS 83.5, OfficeHome 64.3,
TerraIncognita 47.6.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fedshift.functional.invariance import irm_penalty
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import LaterPenalty, Step


class IRM(LaterPenalty):
    """The mean of the domains' losses, and how much each domain would scale the outputs."""

    traits = LaterPenalty.traits.derive(
        name="irm",
        citation="Arjovsky et al., 2019",
        group="pooled",
        advice="The reference for spurious features whose relation to the label differs between domains; the steps of "
        "a run must be many more than penalty_start.",
        settings={
            "domainbed": {
                "penalty_weight": 100.0,
                "penalty_start": 500,
                "rescaled": False,
                "restart_optimizer": True,
                "estimate": "halves",
            }
        },
        needs_classes="its penalty scales logits",
        small={"penalty_start": 1, "penalty_weight": 1.0},
        relative_cost=1.2,
        tests=MethodTests(
            options={
                "penalty_start": tries(0, 1),
                "weight_before": tries(0.0, 3.0),
                "estimate": tries("halves", penalty_start=1, penalty_weight=5.0),
            },
            golden={"penalty_start": 3, "penalty_weight": 2.0},
        ),
    )

    penalty_weight: NonNegativeFloat = Field(10_000.0, description="λ: weight of the penalty")
    penalty_start: NonNegativeInt = Field(100, description="steps of the run before the penalty has its weight")
    rescaled: bool = Field(True, description="whether the whole loss is divided by a weight above 1")
    estimate: Literal["batch", "halves"] = Field(
        "batch", description="the squared gradient of a domain's batch, or the product of the gradients of its halves"
    )

    def penalty(self, step: Step) -> Tensor:
        return irm_penalty(
            step.by_domain(step.logits), [batch.targets for batch in step.batches], halves=self.estimate == "halves"
        )
