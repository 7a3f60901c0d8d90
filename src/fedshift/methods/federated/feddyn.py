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
 3. The code (alpemreacar/FedDyn, utils_methods.py, `train_FedDyn`) divides a site's α by N_k over the mean of the
    sources' N, in its loss and its h_i; the server's sums then have one α (``alpha_by_samples``). It also clips the
    gradient of all but α/2·‖θ‖² at norm 10 in every step (utils_general.py, `train_feddyn_mdl`): ``clip_norm: 10``.
    ``setting: released`` has both.
 4. BatchNorm statistics are averaged and have no h.
 5. The published model is θ_{t+1}, which sites start from, as in the algorithm; the code also reports the mean
    (`train_FedDyn`).
 6. The losses in ``rounds.jsonl`` are what sites minimise, the penalty included.

Should reproduce: no published table of this setting is known to us. As α becomes small, its first round is FedAvg's
with equal shares, moved on once more by the sites' mean change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Count, Reply, Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.control_variates import Parameters, linear_term, moved_gradient
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.federated.scaffold import zeros
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class Counted(Reply):
    """How many training samples a site has."""

    samples: Count


class FedDyn(LocalTraining):
    """Dynamic regularization."""

    traits = LocalTraining.traits.derive(
        name="feddyn",
        citation="Acar et al., ICLR 2021",
        group="rivals",
        advice="For many rounds at sites that differ; no gain shown: +1.60 over FedAvg on SURF (p = 1.000), +1.57 "
        "on PACS features (p = 1.000).",
        settings={"released": {"alpha_by_samples": True, "clip_norm": 10.0}},
        memory_names=("optimizer", "gradient"),
        averages={"fit": Averaged()},
        server_reads="sums",
        tests=MethodTests(options={"alpha": tries(1.0), "clip_norm": tries(0.1)}),
    )

    alpha: PositiveFloat = Field(0.01, description="α: strength of the penalty")
    alpha_by_samples: bool = Field(False, description="a site's α is divided by N_k/mean N (code)")
    clip_norm: PositiveFloat | None = Field(
        None, description="largest norm of the gradient of all but α/2·‖θ‖² (code: 10); none: not clipped"
    )

    def start(self, federation: Federation, weights: Weights) -> State:
        numbers: dict[str, float] = {}
        if self.alpha_by_samples:
            counts = federation.ask(self.count, to=federation.sources).numbers("samples")
            numbers["mean_samples"] = sum(counts.values()) / len(counts)
        return State(weights, parts={"gradient": zeros(weights)}, numbers=numbers)

    def round(self, federation: Federation, state: State) -> State:
        mean = federation.ask(self.fit, to=federation.sources, weights=state.weights, **state.numbers).mean("uniform")
        average, losses = mean.model(), mean.numbers["loss"]
        answered = mean.answered / len(federation.sources)
        known = cast(Weights, state.parts["gradient"])
        gradient = Weights(moved_gradient(known, state.weights, average, self.alpha * answered))
        weights = {name: average[name] - value / self.alpha for name, value in gradient.items()}
        common = Weights({name: weights.get(name, value) for name, value in average.items()})
        return state.advance(common, parts={"gradient": gradient}, report={"losses": losses})

    def count(self, site: Site) -> Counted:
        """N_k."""
        return Counted(site.samples)

    def fit(self, site: Site, weights: Weights, mean_samples: float = 0.0) -> Update:
        """Train with the site's penalty, then move its h_i."""
        if "gradient" not in site.memory:
            site.memory["gradient"] = zeros(weights)
        alpha = self.alpha * mean_samples / site.samples if mean_samples else self.alpha
        site.scratch["alpha"] = alpha
        update = super().fit(site, weights)
        known = site.memory.weights("gradient")
        site.memory["gradient"] = Weights(moved_gradient(known, weights, update.weights, alpha))
        return update

    def adjust_traits(self, traits: Traits) -> Traits:
        traits = super().adjust_traits(traits)
        return traits if self.clip_norm is None else replace(traits, own_gradients=True)

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        plain = super().loss_at(site, model, weights)
        alpha = site.scratch.get("alpha", self.alpha)
        trained = {name for name, _ in model.named_parameters()}  # a network's own buffers have no gradient
        gradient = site.memory.weights("gradient").select(lambda name: name in trained).to(site.device)
        reference = weights.to(site.device)
        sent = {name: reference[name] for name in gradient}

        def loss(batch: Batch) -> Tensor:
            parameters = dict(model.named_parameters())
            whole = plain(batch) + dynamic_penalty(parameters, gradient, sent, alpha)
            return whole if self.clip_norm is None else clipped_but_decay(whole, parameters, alpha, self.clip_norm)

        return loss


def clipped_but_decay(whole: Tensor, parameters: Mapping[str, Tensor], alpha: float, largest: float) -> Tensor:
    """A loss of the value of ``whole`` whose gradient is clipped but for that of α/2·‖θ‖².

    ``whole``: the loss with FedDyn's penalty, a scalar. ``parameters``: θ by name. ``alpha``: α. ``largest``: the
    largest norm of the other gradient, over all parameters together.
    """
    trained = [value for value in parameters.values() if value.requires_grad]
    decay = alpha / 2 * torch.stack([value.square().sum() for value in trained]).sum()
    gradients = torch.autograd.grad(whole - decay, trained, retain_graph=True, materialize_grads=True)
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1)
    along = torch.stack([(v * (factor * g)).sum() for v, g in zip(trained, gradients, strict=True)]).sum()
    return whole.detach() + (along - along.detach()) + (decay - decay.detach())


def dynamic_penalty(parameters: Parameters, gradient: Parameters, sent: Parameters, alpha: float) -> Tensor:
    """``−⟨h_i, θ⟩ + α/2·‖θ − θ_t‖²``: what a site adds to its loss.

    Source: FedDyn (Acar et al., ICLR 2021), Algorithm 1.
    """
    gaps = torch.stack([(parameters[name] - value).square().sum() for name, value in sent.items()]).sum()
    return alpha / 2 * gaps - linear_term(parameters, gradient)
