"""Federated V-REx: the sites' losses vary little.

Krueger, Caballero, Jacobsen, Zhang, Binas, Zhang, Le Priol, Courville: Out-of-Distribution Generalization via Risk
Extrapolation (REx). ICML 2021, arXiv 2003.00688, equation (8), with a domain at each site.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's; and in every round a loss from each site, whose mean goes back to all.

With L_k the mean loss of site k and L̄ their mean, the gradient of 1/K Σ_k L_k + β Var_k(L_k) is a sum over sites,
    1/K Σ_k (1 + 2β (L_k − L̄)) ∇L_k
so that of site k is the gradient of L_k + β (L_k − L̄)² with L̄ held fixed. In every round:
    every site sends  L_k(θ);   L̄ ← 1/K Σ_k L_k(θ)                                                  (server)
    every site trains  L_k + β (L_k − L̄)²,   L_k that of the mini-batch
    θ ← 1/K Σ_k θ_k
With one step on all samples of a site a round is a step of pooled `vrex`.

Where papers and code differ, and what was chosen
 1. The paper has no federated form. `inouye-lab/FedDG_Benchmark` (src/client.py, REx) has the variance
    over the domains *within* a client, and sets its weight to zero just before use.
 2. Of several steps L̄ stays that of the common model, and L_k is that of each mini-batch.
 3. β is 0.1; pooled training has 10,000 and 10 in the two codes (``capybaralet/REx_code_release``,
    InvariantRiskMinimization/colored_mnist/main.py; facebookresearch/DomainBed, domainbed/hparams_registry.py). A
    mini-batch with a large loss steps by 2β of it more, so that SGD with a rate of 0.1 diverged on rotated digits, at
    0.1 as at 1; with ``clip_norm: 1`` it did not. Above 1 the site's loss is divided by β with ``rescaled``, as in the
    authors' code. The penalty begins at a round.
 4. L_k(θ) is taken in evaluation mode and without augmentation. It does not count as training.

Should reproduce: no table of this setting is known to us; with β = 0 it is FedAvg with equal shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Between, Reply, Update
from fedshift.federation.replies import LARGEST_VALUE
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.federated.feddg_ga import loss_of
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.weights import Weights


@dataclass(frozen=True)
class Risk(Reply):
    """The loss of the common model at a site."""

    common_loss: Annotated[float, Between(0, LARGEST_VALUE)]


class FederatedVREx(LocalTraining):
    """FedAvg with a penalty on losses that are far from the sites' mean."""

    traits = LocalTraining.traits.derive(
        name="fedvrex",
        citation="Krueger et al., ICML 2021",
        group="rivals",
        advice="For sites that are learnt unequally well; sites with noisy labels have large losses, too. Set "
        "clip_norm: plain SGD diverged on rotated digits.",
        sends="a model, and a loss",
        averages={"fit_towards": Averaged()},
        server_reads="norms",
        relative_cost=1.3,
        tests=MethodTests(
            options={
                "penalty_weight": tries(0.0, 3.0),
                "weight_before": tries(3.0, penalty_start=1),
                "rescaled": tries(True, penalty_weight=3.0),
            },
            golden={"penalty_weight": 1.0},
        ),
    )

    penalty_weight: NonNegativeFloat = Field(0.1, description="β: weight of the penalty")
    penalty_start: NonNegativeInt = Field(0, description="rounds before the penalty has its weight")
    weight_before: NonNegativeFloat = Field(0.0, description="weight of the penalty until then")
    rescaled: bool = Field(False, description="whether the whole loss is divided by a weight above 1")

    def round(self, federation: Federation, state: State) -> State:
        risks = federation.ask(self.measure, to=federation.sources, weights=state.weights).numbers("common_loss")
        level = sum(risks.values()) / len(risks)
        updates = federation.ask_further(self.fit_towards, to=federation.sources, weights=state.weights, level=level)
        weights, shares, losses = trained_mean(updates, by="uniform")
        report = {"losses": losses, "aggregation_weights": shares, "risks": risks}
        return state.advance(weights, report=report)

    def measure(self, site: Site, weights: Weights) -> Risk:
        """L_k(θ)."""
        return Risk(loss_of(site, weights))

    def fit_towards(self, site: Site, weights: Weights, level: float) -> Update:
        """Train with the penalty on the distance from ``level``, which is L̄."""
        model = site.model(weights)
        plain = self.loss_at(site, model, weights)
        return self._train_with(site, self.towards(plain, level, site.envelope.round), model)

    def towards(self, plain: Callable[[Batch], Tensor], level: float, number: int) -> Callable[[Batch], Tensor]:
        """L_k + β (L_k − L̄)² of a mini-batch in the round of this number, which begins at 1."""
        weight = self.penalty_weight if number > self.penalty_start else self.weight_before
        scale = max(1.0, weight) if self.rescaled else 1.0

        def loss(batch: Batch) -> Tensor:
            risk = plain(batch)
            return (risk + weight * (risk - level).square()) / scale

        return loss
