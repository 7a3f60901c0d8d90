"""FedALA: a site begins its round between its own last model and the common one, tensor entry by tensor entry.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning. AAAI
2023, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common model.
Wire: FedAvg's. The shares W_i and the model that predicts never leave.

With Θ the common model, Θ_i what site i last trained, and p the last tensors of the network:
    Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i   in the last p tensors, Θ in all others                                    (4, 5)
    W_i ← clip(W_i − η ∂L(Θ̂_i)/∂W_i, 0, 1)   on s % of the site's samples, before it trains from Θ̂_i          (6)
    Θ ← Σ_i (N_i / ΣN)·Θ_i                                                                                 FedAvg

W_i begins at 1. The first time it learns until the losses of ten passes deviate by less than 0.1, later for one pass.

Where paper and code differ, and what was chosen
 1. p counts layers in the paper; in the code (TsingZ0/FedALA and TsingZ0/PFLlib, system/utils/ALA.py, `ALA`) tensors:
    ``layer_idx`` 2 is a last layer's weight and bias. Here, too.
 2. η = 1 and s = 80, as in both. The code (`ALA.adaptive_local_aggregation`) takes one stretch of samples for all
    passes, in their order; here each pass draws anew. It does not count as training.
 3. The first time ends after 100 passes at the latest; the code has no end (`ALA.adaptive_local_aggregation`).
 4. A site predicts with Θ̂_i of the last common model, as the code measures it (system/flcore/clients/clientala.py,
    `clientALA`).
 5. W is learned in evaluation mode; buffers are those of the common model.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels: 93.4 and 92.8 (two seeds), its best row.
"""

from __future__ import annotations

from itertools import islice
from statistics import pstdev
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.meta_learning import answer_at
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedavg import FedAvg, Finished
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.weights import Weights

_PASSES, _STEADY, _MOST = 10, 0.1, 100
"""The first time: losses that are compared, their largest deviation, the most passes."""


class FedALA(FedAvg):
    """FedAvg from a start that each site mixes of its own last model and the common one."""

    traits = FedAvg.traits.derive(
        name="fedala",
        citation="Zhang et al., AAAI 2023",
        group="personal",
        advice="For sites that take part and whose labels differ: each finds by itself how much of the common "
        "classifier it takes. A new site gets the common model.",
        keeps="how much it takes of the common model, and what comes of it",
        memory_names=("optimizer", PERSONAL, "last", "shares"),
        relative_cost=1.8,
        own_gradients=True,
        tests=MethodTests(
            options={
                "shares_rate": tries(0.0, 0.2, where="three rounds"),
                "mixed_tensors": tries(1, 4, where="three rounds"),
                "sampled": tries(0.3, where="three rounds"),
            },
            rates=(0.01, 0.02),
        ),
    )

    shares_rate: NonNegativeFloat = Field(1.0, description="η: learning rate of the shares W")
    mixed_tensors: PositiveInt = Field(2, description="p: the last tensors of the network, which are mixed")
    sampled: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="s: part of the samples that W learns on")

    def personalise(self, federation: Federation, weights: Weights) -> None:
        federation.ask(self.mix, to=federation.sources, weights=weights).drain()
        super().personalise(federation, weights)

    def fit(self, site: Site, weights: Weights) -> Update:
        """Mix, and train from there."""
        update = super().fit(site, self._mix_models(site, weights))
        site.memory["last"] = update.weights
        return update

    def mix(self, site: Site, weights: Weights) -> Finished:
        """Mix the last common model with the site's own for predictions."""
        self._mix_models(site, weights)
        return Finished(site.mini_batches)

    def _mix_models(self, site: Site, weights: Weights) -> Weights:
        """Θ̂_i. In the site's first round that is the common model."""
        if "last" not in site.memory:
            return weights
        last = site.memory.weights("last").to(site.device)
        names = [name for name, _ in site.network.named_parameters()][-self.mixed_tensors :]
        gaps = {name: weights[name].to(site.device) - last[name] for name in names}
        shares = self._learn_shares(site, weights, last, gaps)
        mixed = Weights({name: (last[name] + gaps[name] * shares[name]).cpu() for name in names})
        site.memory["shares"] = Weights({name: value.cpu() for name, value in shares.items()})
        site.memory[PERSONAL] = mixed
        return weights.merge(mixed)

    def _learn_shares(
        self, site: Site, weights: Weights, last: Weights, gaps: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The shares W after their passes (6)."""
        known = "shares" in site.memory
        shares = {name: torch.ones_like(gap) for name, gap in gaps.items()}
        if known:
            shares = dict(site.memory.weights("shares").to(site.device))
        model, batches = site.model(weights).eval().requires_grad_(False), site.looks("shares")
        steps = -(-max(1, int(self.sampled * site.samples)) // site.training.batch_size)
        losses: list[float] = []
        while not losses or not (known or len(losses) == _MOST or _steady(losses)):
            for batch in islice(batches, steps):
                for share in shares.values():
                    share.requires_grad_()
                mixed = {name: last[name] + gap * shares[name] for name, gap in gaps.items()}
                loss = site.objective.loss(answer_at(model, mixed, batch.inputs), batch.targets)
                slopes = torch.autograd.grad(loss, list(shares.values()))
                shares = {
                    name: (share.detach() - self.shares_rate * slope).clamp(0, 1)
                    for (name, share), slope in zip(shares.items(), slopes, strict=True)
                }
            losses.append(loss.item())
        return shares


def _steady(losses: list[float]) -> bool:
    """Whether the loss has come to rest."""
    return len(losses) > _PASSES and pstdev(losses[-_PASSES:]) < _STEADY
