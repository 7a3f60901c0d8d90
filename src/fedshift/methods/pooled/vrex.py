"""V-REx: the domains' losses vary little.

Krueger, Caballero, Jacobsen, Zhang, Binas, Zhang, Le Priol, Courville: Out-of-Distribution Generalization via Risk
Extrapolation (REx). ICML 2021, arXiv 2003.00688.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L(θ) = 1/K Σ_e L_e(θ) + β Var_e(L_e(θ)),   Var_e(L_e) = 1/K Σ_e (L_e − L̄)²                  (8)

Where papers and code differ, and what was chosen. Codes: `capybaralet/REx_code_release`,
InvariantRiskMinimization/colored_mnist/main.py; facebookresearch/DomainBed, domainbed/algorithms.py, `VREx`
 1. Defaults are those of the authors' code (`capybaralet/REx_code_release`, InvariantRiskMinimization/colored_mnist,
    main.py): β = 10,000 from step 100 on and 1 before, and the whole loss is divided by a weight above 1.
 2. Paper and code add the losses; here and in DomainBed (item 3) it is their mean. For its two domains the code's (L_1
    − L_2)² is four times the variance.
 3. ``setting: domainbed`` (facebookresearch/DomainBed, domainbed/algorithms.py, VREx): 10 from step 500 on and 1
    before, not divided; Adam begins anew at step 500. **Before that step it is another method.**
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 78.3, PACS 84.9, OfficeHome 66.4,
TerraIncognita 46.4.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import LaterPenalty, Step


class VREx(LaterPenalty):
    """The mean of the domains' losses, and their variance."""

    traits = LaterPenalty.traits.derive(
        name="vrex",
        citation="Krueger et al., ICML 2021",
        group="pooled",
        advice="For domains that are learnt unequally well; its penalty begins at a step that must lie within the run.",
        settings={
            "domainbed": {
                "penalty_weight": 10.0,
                "penalty_start": 500,
                "rescaled": False,
                "restart_optimizer": True,
            }
        },
        small={"penalty_start": 1, "penalty_weight": 0.5},
        tasks=WITHOUT_MASKS,
        tests=MethodTests(
            options={"penalty_start": tries(0, 1), "weight_before": tries(0.0, 3.0)},
            golden={"penalty_start": 3, "penalty_weight": 2.0},
        ),
    )

    penalty_weight: NonNegativeFloat = Field(10_000.0, description="β: weight of the penalty")
    penalty_start: NonNegativeInt = Field(100, description="steps of the run before the penalty has its weight")
    rescaled: bool = Field(True, description="whether the whole loss is divided by a weight above 1")

    def penalty(self, step: Step) -> Tensor:
        return step.losses.var(correction=0)
