"""APFL: a site predicts with a mixture of its own model and the common one, and learns how much of each.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv 2003.13461, 2020, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common model, FedAvg's.
Wire: FedAvg's. v_i and α_i never leave.

    w_i ← w_i − η ∇f_i(w_i),    v_i ← v_i − η ∇_v f_i(v̄_i),    v̄_i = α_i v_i + (1 − α_i) w_i    at every mini-batch
    α_i ← α_i − η ⟨v_i − w_i, ∇f_i(v̄_i)⟩, within 0 and 1        at the first mini-batch of a round
    w ← Σ_i (N_i / ΣN)·w_i                                       FedAvg

Where paper and code differ, and what was chosen
 1. The authors' code mixes outputs (MLOPTPSU/FedTorch, fedtorch/comms/utils/eval.py, `inference_personal`), as FL-bench
    does; the paper mixes weights, and so does this file. For a linear network that is the same.
 2. Its α moves by ⟨v − w, α·∂v + (1 − α)·∂w⟩ + 0.02 α of these outputs (flow_utils.py, `alpha_update`); here by the
    gradient of the paper.
 3. PFLlib (TsingZ0/PFLlib, system/flcore/clients/clientapfl.py, `clientAPFL.train`) trains v_i alone, mixes it with
    w_i at the end of a round for good, and begins at α = 1.
 4. α begins at 0.5, as in FedTorch; ``adaptive: false`` leaves it there, which is its default.
 5. The code takes the step of w_i first; here both are taken at once, as in the paper
    (fedtorch/comms/trainings/federated/apfl.py).
 6. A site predicts with v̄_i of the last common model. Its buffers (BatchNorm) are those of v_i.

Should reproduce: no number of this rule on our data is known to us; PFLlib's other one has 91.2 and 91.4 on ten clients
of MNIST with skewed labels. With α = 0 and ``adaptive: false`` it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedshift.federation.messages import Content, Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.averaging import parameters_of
from fedshift.functional.meta_learning import answer_at
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedavg import FedAvg, Finished
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights

SHARE = "share"
"""The entry of a site's memory with α."""


class APFL(FedAvg):
    """FedAvg, and at each site a mixture with a model of its own."""

    traits = FedAvg.traits.derive(
        name="apfl",
        citation="Deng et al., 2020",
        group="personal",
        advice="For sites that take part and differ: a mixture of FedAvg's model, which a new site gets, and a model "
        "of each site's own, with a share that is learned.",
        keeps="a model of its own, and its share",
        memory_names=("optimizer", PERSONAL, SHARE),
        relative_cost=2.0,
        own_gradients=True,
        tests=MethodTests(
            options={"share": tries(0.2, 1.0, where="finished"), "adaptive": tries(False, where="three rounds")},
        ),
    )

    share: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="α: the own model's part at the beginning")
    adaptive: bool = Field(True, description="whether each site learns α")

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights:
        personal, share = memory.get(PERSONAL), memory.get(SHARE)
        if not isinstance(personal, Weights) or not isinstance(share, float):
            return weights
        mixed = {name: _mix(value, weights[name], share) for name, value in parameters_of(personal).items()}
        return personal.merge(mixed)

    def tune(self, site: Site, weights: Weights) -> Finished:
        finished = super().tune(site, weights)
        site.memory[SHARE] = 1.0
        return finished

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common model, the site's own, and its share."""
        model = site.model(weights)
        personal = site.model(site.memory.weights(PERSONAL) if PERSONAL in site.memory else weights)
        share = torch.tensor(site.memory.get(SHARE, self.share), device=site.device)
        update = self._train_with(site, self._loss_of_both(site, model, personal, share), model, personal)
        site.memory[PERSONAL], site.memory[SHARE] = site.weights_of(personal), share.item()
        return update

    def _loss_of_both(
        self, site: Site, model: Network, personal_model: Network, share: Tensor
    ) -> Callable[[Batch], Tensor]:
        """f_i(w_i), and with the same steps f_i(v̄_i) as a function of v_i. The first call moves ``share``."""
        waiting = self.adaptive

        def loss(batch: Batch) -> Tensor:
            nonlocal waiting
            common = dict(model.named_parameters())
            part = share.clone().requires_grad_(waiting)
            mixture = {
                name: _mix(value, common[name].detach(), part) for name, value in personal_model.named_parameters()
            }
            personal = site.objective.loss(answer_at(personal_model, mixture, batch.inputs, counts=True), batch.targets)
            if waiting:
                (slope,) = torch.autograd.grad(personal, part, retain_graph=True)
                share.copy_((share - site.learning_rate * slope).clamp(0, 1))
                waiting = False
            plain = site.objective.loss(model(batch.inputs), batch.targets)
            return plain + (personal - personal.detach())

        return loss


def _mix(personal: Tensor, common: Tensor, share: Tensor | float) -> Tensor:
    """``α v + (1 − α) w``."""
    return share * personal + (1 - share) * common
