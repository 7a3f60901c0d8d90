"""Federated Fish: the model goes from site to site, and the server goes a part of the way.

Shi, Seely, Torr, Siddharth, Hannun, Usunier, Synnaeve: Gradient Matching for Domain Generalization. ICLR 2022,
arXiv 2104.09937, algorithm 1, with a domain at each site.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's, but one site after the other: a round has as many exchanges as sites, each site is sent what the one
before it trained, and the server reads every model. No sum over sites has these steps.

    θ̃ ← θ;  for each site k in an order drawn anew:  θ̃ ← local training of θ̃ at k
    θ ← θ + ε (θ̃ − θ)
To first order this also ascends the mean inner product of the sites' gradients (theorem 3.1). With one step on all
samples of a site a round is a step of pooled `fish`.

Where papers and code differ, and what was chosen
 1. In the paper all domains lie in one place, and each has one step. ``inouye-lab/FedDG_Benchmark`` (src/client.py,
    Fish) has it over the domains *within* a client.
 2. ε = 0.5, as in DomainBed (domainbed/hparams_registry.py). With ε = 1 this is cyclic training.
 3. ``order: fixed`` visits the sites in the order of their names.
 4. A missing site is passed over where ``engine.quorum`` allows it; the next is sent what it was sent.
 5. BatchNorm's running statistics move by ε, too. A site's momentum is its own.

Should reproduce: no table of this setting is known to us.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Content, Update
from fedshift.federation.randomness import generator
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.weights import Weights


class FederatedFish(LocalTraining):
    """A part of the way that training at one site after the other takes."""

    traits = LocalTraining.traits.derive(
        name="fedfish",
        citation="Shi et al., ICLR 2022",
        group="rivals",
        advice="For few sites whose gradients disagree; sites wait for each other, and each is sent the model of the "
        "one before it.",
        sends="a model, which goes on to the next site",
        tests=MethodTests(options={"meta_rate": tries(0.1, 1.0)}),
    )

    meta_rate: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="ε: the part of the way that is taken")
    order: Literal["drawn", "fixed"] = Field("drawn", description="of the sites in a round")

    def round(self, federation: Federation, state: State) -> State:
        sites, trained = sorted(federation.sources), state.weights
        if self.order == "drawn":
            draws = generator(federation.seed, "order of sites", federation.round)
            sites = [sites[index] for index in torch.randperm(len(sites), generator=draws).tolist()]
        losses: dict[str, float] = {}

        def onward(site: str, update: Update) -> dict[str, Content]:
            nonlocal trained
            trained, losses[site] = update.weights, update.loss
            return {"weights": trained}

        federation.ask_in_turn(self.fit, to=sites, then=onward, weights=trained)
        moved = {
            name: old.lerp(trained[name], self.meta_rate) if old.is_floating_point() else trained[name]
            for name, old in state.weights.items()
        }
        return state.advance(Weights(moved), report={"losses": losses})
