"""FedNova: sites that make more local steps do not count for more.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.
NeurIPS 2020.

Setting: domain generalization, as FedAvg; it matters where sites make different numbers of local steps.
Wire: FedAvg's, and two numbers a site: ‖a_i‖₁ and τ_i.

    x ← x − τ_eff Σ_i p_i (x − y_i)/‖a_i‖₁,    τ_eff = Σ_i p_i ‖a_i‖₁,    p_i = N_i/ΣN
    ‖a_i‖₁ = τ_i for τ_i steps of plain SGD,   [τ_i − ρ(1 − ρ^{τ_i})/(1 − ρ)]/(1 − ρ) with momentum ρ,
    [1 − (1 − ημ)^{τ_i}]/(ημ) with a proximal term

Where papers and code differ, and what was chosen
 1. The factor of momentum is that of momentum reset in each round, as in the paper. With
    ``reset_optimizer_each_round: false`` it is that of a long run, τ_i/(1 − ρ). Nesterov's momentum, and momentum with
    a proximal term, have factors by the same definition: how far steps carry where every gradient is 1.
 2. ``proximal_weight`` is the paper's FedNova with a proximal term. The code's τ_eff is then Σ p_i τ_i, of steps (JYWa/
    FedNova, distoptim/FedNova.py, `FedNova.average`; ``effective_steps: steps``). With momentum and μ, and with
    Nesterov's form, the code's counter of ‖a_i‖₁ (`FedNova.step`) is not how far its own steps carry; the definition
    here is. There is no setting for that.
 3. BatchNorm statistics are averaged by p_i. Adam is refused.
 4. With equal numbers of steps at all sites it is FedAvg.
 5. Robust rules do not go with it: a site says its ‖a_i‖₁ itself, between 0 and that of all its mini-batches.

Should reproduce: no published table of this setting is known to us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.data.site_data import batches_per_epoch
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Between, NotNegative, Update
from fedshift.federation.replies import About, Bounds
from fedshift.federation.site import Batch, Site
from fedshift.functional.averaging import parameters_of
from fedshift.functional.control_variates import Parameters
from fedshift.functional.losses import proximal_penalty
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.federated.scaffold import plain_steps
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class Normalised(Update):
    """The trained model, and ‖a_i‖₁: how many plain steps it is away."""

    factor: NotNegative
    steps: NotNegative


class FedNova(LocalTraining):
    """The mean of normalised updates."""

    traits = LocalTraining.traits.derive(
        name="fednova",
        citation="Wang et al., NeurIPS 2020",
        group="rivals",
        advice="For sites that make different numbers of steps: 53.25 on SURF, where FedAvg has 51.06.",
        averages={"train": Averaged(rules="none")},
        tests=MethodTests(
            options={"proximal_weight": tries(3.0), "effective_steps": tries("steps", proximal_weight=3.0)},
        ),
    )

    proximal_weight: NonNegativeFloat = Field(0.0, description="μ of a proximal term, as FedProx has")
    effective_steps: Literal["norms", "steps"] = Field(
        "norms", description="τ_eff with a proximal term: Σ p_i ‖a_i‖₁ (paper), or Σ p_i τ_i (code)"
    )

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "train":
            return {}
        steps = self.mini_batches(batches_per_epoch(about.samples, about.training.batch_size), 1)
        return {
            "factor": Between(0, 1.001 * plain_steps(self.name, about.training, steps)),
            "steps": Between(0, float(steps)),
        }

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.train, to=federation.sources, weights=state.weights).keep()
        mean, shares, losses = trained_mean(updates)
        # The last step alone counts as 1: divided by less, the update of a site that lies would grow without bound.
        factors = {site: max(1.0, number) if number else 0.0 for site, number in updates.numbers("factor").items()}
        steps = updates.numbers("steps") if self.effective_steps == "steps" else factors
        drifted = normalised_average(
            parameters_of(state.weights),
            [update.weights for update in updates],
            list(shares.values()),
            [factors[site] for site in shares],
            effective=sum(share * steps[site] for site, share in shares.items()),
        )
        weights = Weights({name: drifted.get(name, value) for name, value in mean.items()})
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares, "factors": factors})

    def train(self, site: Site, weights: Weights) -> Normalised:
        """Train locally, and compute ‖a_i‖₁ of the steps that were made."""
        if self.proximal_weight:
            site.training.check_one_rate(f"{self.name} with proximal_weight")
        before = site.mini_batches
        update = self.fit(site, weights)
        decay = self.proximal_weight * site.mean_learning_rate
        factor = plain_steps(self.name, site.training, site.mini_batches - before, decay)
        return Normalised(update.weights, update.samples, update.loss, factor, float(site.mini_batches - before))

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        plain = super().loss_at(site, model, weights)
        if not self.proximal_weight:
            return plain
        reference = weights.to(site.device)
        return lambda batch: plain(batch) + proximal_penalty(model.named_parameters(), reference, self.proximal_weight)


def normalised_average(
    sent: Parameters,
    trained: Sequence[Parameters],
    shares: Sequence[float],
    factors: Sequence[float],
    effective: float | None = None,
) -> dict[str, Tensor]:
    """``x − τ_eff Σ_i p_i (x − y_i)/‖a_i‖₁`` with ``τ_eff = Σ_i p_i ‖a_i‖₁``.

    Source: FedNova (Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020).
    """
    if effective is None:
        effective = sum(share * factor for share, factor in zip(shares, factors, strict=True))
    result = {}
    for name, start in sent.items():
        drift = torch.zeros_like(start)
        for model, share, factor in zip(trained, shares, factors, strict=True):
            drift += share / (factor or 1.0) * (start - model[name])
        result[name] = start - effective * drift
    return result
