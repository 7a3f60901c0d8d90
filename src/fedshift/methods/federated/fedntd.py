"""FedNTD: a site keeps what the common model says of the classes that a sample is not of.

Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning.
NeurIPS 2022.

Setting: domain generalization, as FedAvg; written for sites whose classes differ.
Wire: FedAvg's.

    L = CE + β·L_NTD
    L_NTD = Σ_{c≠y} q̃_g(c) log( q̃_g(c)/q̃_l(c) ),    q̃(c) = e^{z_c/τ} / Σ_{c'≠y} e^{z_{c'}/τ}
q̃_g is of the common model, which stays as it was sent; q̃_l of the model that trains.

Where papers and code differ, and what was chosen
 1. The code (Lee-Gihun/FedNTD, algorithms/fedntd/criterion.py, `NTD_Loss._ntd_loss`) multiplies L_NTD by τ², as usual
    in distillation. So does this file; at τ = 1 it is the same.
 2. β = 1, τ = 1 (config/fedntd.json). PFLlib's β is 0 unless it is given, which is FedAvg.
 3. The common model answers in evaluation mode, as in PFLlib (system/flcore/clients/clientntd.py, `clientNTD.train`);
    the authors' networks have no BatchNorm or dropout.

Should reproduce: no published table of this setting is known to us. With β = 0, and with two classes, of which one is
not true, it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.federation.site import Batch, Site
from fedshift.functional.distillation import softened_divergence
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedNTD(FedAvg):
    """FedAvg with distillation of the classes that are not true."""

    traits = FedAvg.traits.derive(
        name="fedntd",
        citation="Lee et al., NeurIPS 2022",
        group="rivals",
        advice="For sites whose classes differ: what the common model knows of the other classes is kept.",
        tasks=("classification",),
        needs_classes="it distils what the common model says of the other classes",
        relative_cost=1.4,
        tests=MethodTests(options={"distillation_weight": tries(0.0, 5.0)}),
    )

    distillation_weight: NonNegativeFloat = Field(1.0, description="β")
    temperature: PositiveFloat = Field(1.0, description="τ")

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        if self.distillation_weight == 0:
            return super().loss_at(site, model, weights)
        common = site.model(weights).eval().requires_grad_(False)
        strength = self.distillation_weight * self.temperature**2

        def loss(batch: Batch) -> Tensor:
            scores = model(batch.inputs)
            with torch.no_grad():
                known = common(batch.inputs)
            teacher, student = (other_scores(item, batch.targets) for item in (known, scores))
            apart = softened_divergence(teacher, student, self.temperature)
            return site.objective.loss(scores, batch.targets) + strength * apart

        return loss


def other_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """Each row's scores of the classes that are not its own, in their order: FedNTD's not-true classes.

    Source: Lee et al., NeurIPS 2022.
    """
    others = torch.arange(scores.shape[1], device=scores.device) != labels[:, None]
    return scores[others].view(len(scores), -1)
