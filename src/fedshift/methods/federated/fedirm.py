"""Federated IRM: one classifier that is best for every site at once.

Arjovsky, Bottou, Gulrajani, Lopez-Paz: Invariant Risk Minimization. 2019, arXiv 1907.02893, IRMv1, with an environment
at each site.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's: the penalty is a sum over sites, and each has its own part of it.

    1/K Σ_k (L_k(θ) + λ ‖∇_{w|w=1} L_k(w · θ)‖²)                                                (IRMv1)
    every site trains its summand;   θ ← 1/K Σ_k θ_k
where w is a number that multiplies the network's outputs. With one step on all samples of a site a round is a step of
pooled `irm`.

Where papers and code differ, and what was chosen
 1. The paper has no federated form. `inouye-lab/FedDG_Benchmark` (src/client.py, IRM) has the penalty
    over the domains *within* a client, and sets its weight to zero just before use.
 2. λ is 1; pooled training has 10,000 and 100 in the two codes (facebookresearch/InvariantRiskMinimization,
    code/colored_mnist/main.py; facebookresearch/DomainBed, domainbed/hparams_registry.py). Above 1 the site's loss is
    divided by it with ``rescaled``, as in the authors' code. The penalty begins at a round.
 3. The squared gradient of a mini-batch is larger on average than that of all samples. ``estimate: halves`` multiplies
    the gradients of two halves (appendix D), which is not.

Should reproduce: no table of this setting is known to us; with λ = 0 it is FedAvg with equal shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fedshift.federation.site import Batch, Site
from fedshift.functional.invariance import irm_penalty
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FederatedIRM(FedAvg):
    """FedAvg with a penalty on how much each site would scale the outputs."""

    traits = FedAvg.traits.derive(
        name="fedirm",
        citation="Arjovsky et al., 2019",
        group="rivals",
        advice="For spurious features whose relation to the label differs between sites. Set clip_norm: plain SGD "
        "diverged on rotated digits.",
        tasks=("classification",),
        needs_classes="its penalty scales logits",
        relative_cost=1.1,
        tests=MethodTests(
            options={
                "weight_before": tries(3.0, penalty_start=1),
                "rescaled": tries(True, penalty_weight=3.0),
                "estimate": tries("halves", penalty_weight=3.0),
            },
        ),
    )

    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares 1/K (paper) or N_k/ΣN")
    penalty_weight: NonNegativeFloat = Field(1.0, description="λ: weight of the penalty")
    penalty_start: NonNegativeInt = Field(0, description="rounds before the penalty has its weight")
    weight_before: NonNegativeFloat = Field(0.0, description="weight of the penalty until then")
    rescaled: bool = Field(False, description="whether the whole loss is divided by a weight above 1")
    estimate: Literal["batch", "halves"] = Field(
        "batch", description="the squared gradient of a mini-batch, or the product of the gradients of its halves"
    )

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        """L_k + λ ‖∇_w L_k‖² of a mini-batch."""
        weight = self.penalty_weight if site.envelope.round > self.penalty_start else self.weight_before
        scale = max(1.0, weight) if self.rescaled else 1.0

        def loss(batch: Batch) -> Tensor:
            logits = model(batch.inputs)
            penalty = irm_penalty([logits], [batch.targets], halves=self.estimate == "halves")
            return (site.objective.loss(logits, batch.targets) + weight * penalty) / scale

        return loss
