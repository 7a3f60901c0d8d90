"""Fishr: the variance of the classifier's gradients is the same in every source.

Rame, Dancette, Cord: Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization. ICML 2022,
arXiv 2109.02934.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

g_i is the gradient of a sample's loss by the classifier's weights, v_e its variance in domain e, one number a weight:
    v_e = mean over the domain of (g_i − mean g)²
    v̄_e ← γ v̄_e + (1 − γ) v_e                                            moving average
    L(θ) = 1/K Σ_e L_e(θ) + λ 1/K Σ_e ‖v̄_e − mean of v̄‖²

The classifier is linear, so g_i = (softmax(h(z_i)) − y_i) z_iᵀ and needs no pass of its own.

Where papers and code differ, and what was chosen. DomainBed: `Fishr` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. ‖·‖² is the mean over the weights, and v̄_e is divided by 1 − γ, so that the newest variance has the weight 1; both
    as in DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, Fishr; lib/misc.py, MovingAverage). The
    authors' own repository was not run. v̄_e is 0 at first.
 2. λ = 1000 and γ = 0.95, as there. ``setting: domainbed`` has no penalty before step 1,500, at which Adam begins
    anew. **Before that step it is plain training**: a run must be much longer. Here the penalty is there at once.
 3. DomainBed weighs samples alike, here domains; the same where batches are equally long.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import LaterPenalty, Step
from fedshift.models.network import Network


class Fishr(LaterPenalty):
    """The mean of the domains' losses, and how far the variances of their gradients are apart."""

    traits = LaterPenalty.traits.derive(
        name="fishr",
        citation="Rame et al., ICML 2022",
        group="pooled",
        advice="A penalty on gradients at the cost of plain training; it wants a few samples of each domain in a step.",
        settings={"domainbed": {"penalty_start": 1500, "restart_optimizer": True}},
        needs_classes="its gradients are those of cross-entropy",
        unfit_plug_ins={
            **LaterPenalty.traits.unfit_plug_ins,
            "dropout": "which reads the classifier's gradients from whole features",
        },
        relative_cost=1.1,
        tests=MethodTests(
            options={"penalty_weight": tries(0.0, 100.0), "rescaled": tries(True), "decay": tries(0.5)},
            golden={"penalty_weight": 1.0},
        ),
    )

    penalty_weight: NonNegativeFloat = Field(1000.0, description="λ: weight of the penalty")
    weight_before: NonNegativeFloat = Field(0.0, description="weight of the penalty until then")
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="γ: what is kept of the variances in a step")

    def check(self, network: Network) -> None:
        if not isinstance(network.classifier, nn.Linear):
            raise UserError("fishr: the network's classifier is not a linear layer; choose another network")

    def build_parts(self, model: Network, domains: int) -> nn.Module:
        weights = sum(value.numel() for value in model.classifier.parameters())
        return Variances(domains, weights)

    def penalty(self, step: Step) -> Tensor:
        parts = zip(step.by_domain(step.features), step.by_domain(step.logits), step.batches, strict=True)
        with_bias = cast(nn.Linear, step.model.classifier).bias is not None
        result = [gradient_variances(z, logits, batch.targets, with_bias) for z, logits, batch in parts]
        means = cast(Variances, step.parts).move(result, self.decay)
        return (means - means.mean(0)).square().mean()


class Variances(nn.Module):
    """v̄_e: a moving average of each domain's variances, (K, weights)."""

    means: Tensor

    def __init__(self, domains: int, weights: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(domains, weights))

    def move(self, variances: Sequence[Tensor], decay: float) -> Tensor:
        """v̄_e after a step, divided by 1 − γ; its gradient is that of the newest variances."""
        means = decay * self.means + (1 - decay) * torch.stack(list(variances))
        self.means = means.detach()
        return means / (1 - decay)


def gradient_variances(features: Tensor, logits: Tensor, labels: Tensor, with_bias: bool) -> Tensor:
    """The variance over samples of the gradient of cross-entropy by a linear classifier's weights, (C d + C,)."""
    errors = logits.softmax(1) - functional.one_hot(labels, logits.shape[1]).to(logits)
    by_weight = errors.square().T @ features.square() / len(errors) - (errors.T @ features / len(errors)).square()
    return torch.cat([by_weight.flatten(), errors.var(0, correction=0)]) if with_bias else by_weight.flatten()
