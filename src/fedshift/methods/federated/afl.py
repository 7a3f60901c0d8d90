"""AFL: the federation as the worst mixture of its sites sees it; GroupDRO's weights at the server.

Mohri, Sivek, Suresh: Agnostic Federated Learning. ICML 2019, algorithm 1 (``rule: projected``).
Sagawa, Koh, Hashimoto, Liang: Distributionally Robust Neural Networks for Group Shifts. ICLR 2020, algorithm 1, with
the sites as groups (``rule: exponential``).

Setting: domain generalization, as FedAvg.
Wire: FedAvg's, and a loss a site and round.

L_k is the mean loss of the common model at site k, λ the sites' weights, 1/K at first:
    θ_k ← local training from θ,  θ ← Σ_k λ_k θ_k
    projected     λ ← Π(λ + γ L(θ)),   Π the projection on the simplex                              (AFL)
    exponential   λ_k ← λ_k exp(γ L_k(θ)) / Σ_j λ_j exp(γ L_j(θ))                                   (GroupDRO)

Where papers and code differ, and what was chosen
 1. AFL steps on one gradient, and sites are drawn with probability λ; here sites train as FedAvg's do and are weighted
    by λ, which with one step is the same in expectation.
 2. Losses are those of the common model that came, on the training samples, without augmentation. They do not count as
    training. λ of a round follows from the losses of that round.
 3. AFL's model is the mean over steps; here the last one, or ``average``.
 4. A site that is missing in a round keeps its weight, and the others share what is left (``engine.quorum``).
 5. An author's public code (google/fedjax, fedjax/algorithms/agnostic_fed_avg.py, `agnostic_federated_averaging`, for
    Ro et al., 2021) has the exponential rule alone, and weighs by the losses of the round before.

Should reproduce: no table of this setting with our splits is known to us; with γ = 0 it is FedAvg with equal shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import NotNegative, Update
from fedshift.federation.site import Site
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.federated.feddg_ga import loss_of
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.weights import Weights


@dataclass(frozen=True)
class Met(Update):
    """The trained model, and the loss of the common model that came."""

    common_loss: NotNegative


class AgnosticFederated(LocalTraining):
    """Weights that grow at sites where the common model's loss is large."""

    traits = LocalTraining.traits.derive(
        name="afl",
        citation="Mohri et al., ICML 2019",
        group="rivals",
        advice="For the worst of the sites rather than their mean; sites with noisy labels have large losses, too.",
        sends="a model, with a loss",
        settings={"groupdro": {"rule": "exponential"}},
        averages={"train": Averaged()},
        server_reads="norms",
        relative_cost=1.3,
        tests=MethodTests(options={"weights_rate": tries(0.0, 1.0)}),
    )

    weights_rate: NonNegativeFloat = Field(0.1, description="γ: how fast the weights move")
    rule: Literal["projected", "exponential"] = Field("projected", description="how: AFL's, or GroupDRO's")

    def round(self, federation: Federation, state: State) -> State:
        sources = federation.sources
        known = {site: cast(float, state.numbers.get(site, 1 / len(sources))) for site in sources}
        updates = federation.ask(self.train, to=sources, weights=state.weights).keep()
        met = updates.numbers("common_loss")
        # Sites that are missing keep their weights; the others share what they have together.
        whole = sum(known[site] for site in updates.sites)
        shares = torch.tensor([known[site] / whole if whole else 1 / len(updates.sites) for site in updates.sites])
        losses = torch.tensor([met[site] for site in updates.sites], dtype=torch.float64)
        moved = ascended_weights(shares, losses, self.weights_rate, exponential=self.rule == "exponential")
        by = dict(zip(updates.sites, moved, strict=True))
        weights, used, trained = trained_mean(updates, by=by)
        kept = known | {site: whole * share for site, share in by.items()}
        return state.advance(weights, numbers=kept, report={"losses": trained, "aggregation_weights": used})

    def train(self, site: Site, weights: Weights) -> Met:
        """The loss of the common model, then training."""
        common = loss_of(site, weights)
        update = self.fit(site, weights)
        return Met(update.weights, update.samples, update.loss, common)


def ascended_weights(weights: Tensor, losses: Tensor, rate: float, *, exponential: bool = False) -> list[float]:
    """Weights of the sites after a step up their losses: the adversary's move in a minimax over mixtures of sites.

    Source: ``Π(λ + γL)``, Π the Euclidean projection on the simplex (AFL, Mohri et al., ICML 2019); ``exponential``:
    ``λ_k exp(γL_k) / Σ_j λ_j exp(γL_j)`` (GroupDRO, Sagawa et al., ICLR 2020).
    """
    if exponential:
        moved: list[float] = (weights.double().log() + rate * losses.double()).softmax(0).tolist()
        return moved
    raised = weights.double() + rate * losses.double()
    raised = raised - raised.max()  # which moves the projection nowhere; a large number would leave no digit for 1
    ordered = raised.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(ordered) + 1)
    projected: list[float] = (raised - excess[ordered > excess][-1]).clamp_min(0).tolist()
    return projected
