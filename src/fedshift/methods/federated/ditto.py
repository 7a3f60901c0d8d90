"""Ditto: beside FedAvg, each site trains a model of its own that is drawn to the common one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common model, FedAvg's.
Wire: FedAvg's. The model v_i never leaves.

    w ← Σ_i (N_i / ΣN)·w_i                           FedAvg
    v_i ← v_i − η·(∇f_i(v_i) + λ·(v_i − w))          at site i, in every round (equation 2); w: as the round begins

Where paper and code differ, and what was chosen
 1. λ is 0.1, the smallest that the authors' code lets a site choose of 0.1, 1 and 2 (litian96/ditto,
    flearn/trainers_MTL/ditto.py, `Server.train`); no site chooses here. PFLlib
    (TsingZ0/PFLlib, system/main.py) has ``--mu 0``, with which v_i is training alone: its published rows of Ditto have
    it unless set.
 2. The authors' code averages sites equally, which is ``weighting: uniform``; here by samples, as PFLlib does
    (`Server.train` again).
 3. The authors' code (`Server.train`) takes a step of v_i and of w_i in turn on the same mini-batches, PFLlib and
    fedshift train one after the other.
 4. v_i begins at the common start, and at a site's first round where it joins later.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, λ = 0.1: 92.6 and 92.9 (two seeds); with
λ = 0 91.2 and 91.1, where training alone has 90.6 and 91.6.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.losses import proximal_penalty
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.weights import Weights


class Ditto(FedAvg):
    """FedAvg, and beside it a model of each site's own."""

    traits = FedAvg.traits.derive(
        name="ditto",
        citation="Li et al., ICML 2021",
        group="personal",
        advice="For sites that take part and differ: a whole model of each site's own beside FedAvg's, which a new "
        "site gets. It trains twice as much.",
        keeps="a model of its own",
        memory_names=("optimizer", PERSONAL, "personal_optimizer"),
        tests=MethodTests(
            options={
                "proximal_weight": tries(0.0, 3.0, where="finished"),
                "personal_epochs": tries(2, where="finished"),
            },
        ),
    )

    proximal_weight: NonNegativeFloat = Field(0.1, description="λ: how strongly v_i is drawn to the common model")
    personal_epochs: PositiveInt = Field(1, description="passes over a site's data per round that train v_i")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return super().mini_batches(batches_per_epoch, rounds) + rounds * self.personal_epochs * batches_per_epoch

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common model, and then the site's own."""
        update = super().fit(site, weights)
        model = site.model(self.own_weights(weights, site.memory))
        reference = weights.to(site.device)
        site.minimise(
            self.loss_at(site, model, weights),
            model,
            epochs=self.personal_epochs,
            remember="personal_optimizer",
            regulariser=lambda: proximal_penalty(model.named_parameters(), reference, self.proximal_weight),
        )
        site.memory[PERSONAL] = site.weights_of(model)
        return update
