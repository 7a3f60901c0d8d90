"""FedDyn: a penalty that changes with the site's own gradient, so that local optima meet the common one.

Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization. ICLR 2021,
Algorithm 1.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's. A site's h_i stays there; the server keeps h.

    θ_i = argmin L_i(θ) − ⟨h_i, θ⟩ + α/2·‖θ − θ_t‖²                          at every site
    h_i ← h_i − α(θ_i − θ_t)
    h ← h − α·(1/m)·Σ_i (θ_i − θ_t),    θ_{t+1} = (1/|P|)·Σ_i θ_i − h/α      at the server, m: all sites

Where papers and code differ, and what was chosen
 1. The argmin is E local epochs of the experiment's optimiser, as in the paper's experiments.
 2. α is 0.01 (the paper tunes it within 0.001 … 0.1).
 3. BatchNorm statistics are averaged and have no h.
 4. The published model is θ_{t+1}, which sites start from, as in the algorithm; the code also reports the mean.
 5. The losses in ``rounds.jsonl`` are what sites minimise, the penalty included.

Should reproduce: no published table of this setting is known to us. As α becomes small, its first round is FedAvg's
with equal shares, moved on once more by the sites' mean change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

from pydantic import Field, PositiveFloat
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.control_variates import dynamic_penalty, moved_gradient
from fedshift.methods.base import Reads, State
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.federated.scaffold import zeros
from fedshift.methods.robust import Averaged, Averages
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedDyn(LocalTraining):
    """Dynamic regularization."""

    name: ClassVar[str] = "feddyn"
    memory_names: ClassVar[tuple[str, ...]] = ("optimizer", "gradient")
    averages: ClassVar[Averages] = {"fit": Averaged()}
    server_reads: ClassVar[Reads] = "sums"

    alpha: PositiveFloat = Field(0.01, description="α: strength of the penalty")

    def start(self, federation: Federation, weights: Weights) -> State:
        return State(weights, parts={"gradient": zeros(weights)})

    def round(self, federation: Federation, state: State) -> State:
        mean = federation.ask(self.fit, to=federation.sources, weights=state.weights).mean("uniform")
        average, losses = mean.model(), mean.numbers["loss"]
        answered = mean.answered / len(federation.sources)
        known = cast(Weights, state.parts["gradient"])
        gradient = Weights(moved_gradient(known, state.weights, average, self.alpha * answered))
        weights = {name: average[name] - value / self.alpha for name, value in gradient.items()}
        common = Weights({name: weights.get(name, value) for name, value in average.items()})
        return state.advance(common, parts={"gradient": gradient}, report={"losses": losses})

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train with the site's penalty, then move its h_i."""
        if "gradient" not in site.memory:
            site.memory["gradient"] = zeros(weights)
        update = super().fit(site, weights)
        known = site.memory.weights("gradient")
        site.memory["gradient"] = Weights(moved_gradient(known, weights, update.weights, self.alpha))
        return update

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        plain = super().loss_at(site, model, weights)
        gradient = site.memory.weights("gradient").to(site.device)
        reference = weights.to(site.device)
        sent = {name: reference[name] for name in gradient}

        def loss(batch: Batch) -> Tensor:
            return plain(batch) + dynamic_penalty(dict(model.named_parameters()), gradient, sent, self.alpha)

        return loss
