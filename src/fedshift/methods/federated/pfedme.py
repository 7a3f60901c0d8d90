"""pFedMe: each site solves its task near the common model, and the common model moves towards the solutions.

T Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common model.
Wire: FedAvg's. θ_i never leaves.

    θ_i ≈ argmin_θ  f_i(θ) + λ/2·‖θ − w_i‖²        K steps on a mini-batch                      (equations 3 and 7)
    w_i ← w_i − η λ (w_i − θ_i)                     after each mini-batch
    w ← (1 − β)·w + β·mean_i w_i                    at the server

Where paper and code differ, and what was chosen
 1. The K steps begin at the θ_i of the mini-batch before, and at w in a round's first, as in the code
    (CharlieDinh/pFedMe, FLAlgorithms/users/userpFedMe.py, `UserpFedMe.train`); the paper leaves it open.
 2. The code's steps have a weight decay of 0.001 (optimizers/fedoptimizer.py, `pFedMeOptimizer`), which is
    ``training.weight_decay: 0.001``.
 3. λ = 15 and K = 5, the code's defaults (main.py). η is ``training.lr``; the K steps have their own rate, by default
    the same.
 4. β = 1. For another one write ``server: {optimizer: momentum, beta: 0, rate: …}``.
 5. The mean has equal shares in the paper, which is ``weighting: uniform``; here by samples.
 6. A site predicts with θ_i of its last mini-batch. The code's list of θ_i is the network's own parameters, which hold
    w_i when they are measured; in PFLlib (clientpFedMe.py, `test_metrics_personalized`) they hold the common model, so
    its rows of pFedMe are those of that model.

Should reproduce: no number of θ_i on our data is known to us. With K steps that reach the minimum, w moves down the
gradient of the Moreau envelope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site, with_regulariser
from fedshift.functional.losses import proximal_penalty
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


class PFedMe(FedAvg):
    """The common model follows models of the sites' own, which are held near it."""

    traits = FedAvg.traits.derive(
        name="pfedme",
        citation="T Dinh et al., NeurIPS 2020",
        group="personal",
        advice="For sites that take part and differ: a whole model of each site's own near the common one, at several "
        "steps for each mini-batch.",
        keeps="a model of its own",
        memory_names=(PERSONAL,),
        tests=MethodTests(
            options={"proximal_weight": tries(0.0, 5.0), "inner_steps": tries(2), "inner_rate": tries(0.01)},
            rates=(0.04, 0.05),
        ),
    )

    proximal_weight: NonNegativeFloat = Field(15.0, description="λ: how strongly θ is held near w")
    inner_steps: PositiveInt = Field(5, description="K: steps on a mini-batch")
    inner_rate: PositiveFloat | None = Field(
        None, description="learning rate of these steps, below 2/λ, else they diverge; none: training.lr"
    )

    def adjust_traits(self, traits: Traits) -> Traits:
        return replace(super().adjust_traits(traits), relative_cost=float(self.inner_steps))

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train θ, which w follows."""
        model = site.model(weights)
        followed = {name: value.detach().clone() for name, value in model.named_parameters()}
        penalty = lambda: proximal_penalty(model.named_parameters(), followed, self.proximal_weight)  # noqa: E731
        loss = site.minimise_over(
            self._repeat_batches(site, model, followed),
            with_regulariser(self.loss_at(site, model, weights), penalty),
            model,
            optimizers=[site.optimizer(model, rate=self.inner_rate)],
        )
        personal = site.weights_of(model)
        site.memory[PERSONAL] = personal
        moved = Weights({name: value.cpu() for name, value in followed.items()})
        return Update(personal.merge(moved), site.samples, loss)

    def _repeat_batches(self, site: Site, model: Network, followed: dict[str, Tensor]) -> Iterator[Batch]:
        """Every mini-batch K times. Then ``followed``, w, moves towards the model θ that was trained on it."""
        for batch in site.batches(self.local_epochs, self.steps_per_round):
            for _ in range(self.inner_steps):
                yield batch
            with torch.no_grad():
                for name, value in model.named_parameters():
                    followed[name].lerp_(value, site.learning_rate * self.proximal_weight)
