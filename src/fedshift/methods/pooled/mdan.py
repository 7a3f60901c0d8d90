"""MDAN: multisource domain adversarial networks.

Zhao, Zhang, Wu, Moura, Costeira, Gordon: Adversarial Multiple Source Domain Adaptation. NeurIPS 2018, Algorithm 1.

Setting: domain adaptation, *not private*: K labelled sources and a target without labels, all in one place.
Wire: every training sample once, also the target's (the ledger counts them as raw data); nothing after that.

Common features F, one classifier, and a domain classifier D_k per source that tells it from the target:
    ℓ_k = CE on a mini-batch of source k
    d_k = −E log D_k(F(x^k)) − E log(1 − D_k(F(x^T))),   F before a gradient reversal of strength ``reversal``
    dynamic   min 1/γ · log Σ_k exp(γ(ℓ_k + μ d_k))                                   (soft version)
    hard      min max_k (ℓ_k + μ d_k)                                                 (hard version)

Where papers and code differ. Code: hanzhaoml/MDAN, main_amazon.py and model.py, `MDANet.forward`
* Paper and code have a soft and a hard version; the default is the soft one. The code's hard version (hanzhaoml/MDAN,
  main_amazon.py, "maxmin") is another: max_k ℓ_k + μ · min_k d_k, ``rule: maxmin``.
* The code's domain classifier has two outputs and a log-softmax. Here: one logit, which gives the same probabilities.
* The domain classifiers are linear whatever the network, as in the code for Amazon Reviews.
* Adadelta with learning rate 1 and batches of 20 (code, Amazon). Here: the experiment's optimiser and batches, as for
  every method.
* Every domain is passed through the network separately, as in the code, so BatchNorm sees one domain at a time. The
  target is first; in the code, which has no BatchNorm, it is last.
* The domain classifiers are not in the saved model, which is the ordinary network.
* Equal work: an optimiser step counts K + 1 mini-batches, one of each source and one of the target. With
  ``domain_batches: split`` these are the parts of one.

Should reproduce (as printed by KD3A): Amazon Review 82.8; Digit-5 86.7; Office-Caltech10 96.1; DomainNet 42.8.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.adversarial import domain_identifier_loss, reverse_gradient
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.adaptation import DomainBatches, PooledAdaptation
from fedshift.weights import Weights


class MDAN(PooledAdaptation):
    """Features that domain classifiers cannot tell from the target's; harder sources have more weight."""

    traits = PooledAdaptation.traits.derive(
        name="mdan",
        citation="Zhao et al., NeurIPS 2018",
        group="pooled",
        advice="A steady choice: 82.79 on Amazon Review and 62.99 on PACS features, where FedAvg has 82.61 and 61.31.",
        tasks=WITHOUT_MASKS,
        relative_cost=1.1,
        tests=MethodTests(
            where="mlp",
            options={"mu": tries(0.0, 0.5), "gamma": tries(0.5), "reversal": tries(0.0, 0.3, mu=0.5)},
        ),
    )

    rule: Literal["dynamic", "hard", "maxmin"] = Field(
        "dynamic", description="soft version, hard version, or the code's hard version"
    )
    mu: NonNegativeFloat = Field(1e-2, description="μ: weight of the domain losses")
    gamma: PositiveFloat = Field(10.0, description="γ of the soft version: how much the hardest source counts")
    reversal: NonNegativeFloat = Field(1.0, description="strength of the gradient reversal")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        identifiers = self.parts(
            site, lambda: nn.ModuleList(nn.Linear(model.embedding_size, 1) for _ in range(site.domains))
        )

        def loss_of(batches: DomainBatches) -> Tensor:
            sources, target = batches
            at_target = reverse_gradient(model.features(target.inputs), self.reversal)
            source_losses, domain_losses = [], []
            for batch, identifier in zip(sources, identifiers, strict=True):
                features = model.features(batch.inputs)
                source_losses.append(site.objective.loss(model.classifier(features), batch.targets))
                at_source = reverse_gradient(features, self.reversal)
                domain_losses.append(domain_identifier_loss(identifier(at_source), identifier(at_target)))
            return combine_domains(
                torch.stack(source_losses), torch.stack(domain_losses), self.mu, self.gamma, self.rule
            )

        return self.train(site, self.with_target(site, steps), loss_of, model, identifiers)


def combine_domains(
    source_losses: Tensor,
    domain_losses: Tensor,
    mu: float = 1e-2,
    gamma: float = 10.0,
    rule: Literal["dynamic", "hard", "maxmin"] = "dynamic",
) -> Tensor:
    """Combine the source sites' errors ℓ_k and domain losses d_k into one scalar loss.

    Source: MDAN (Zhao et al., NeurIPS 2018). The features behind d_k pass through `reverse_gradient`.
    """
    if source_losses.dim() != 1 or source_losses.shape != domain_losses.shape or not len(source_losses):
        raise UserError(
            f"MDAN needs one source loss and one domain loss per source site, found {tuple(source_losses.shape)} and "
            f"{tuple(domain_losses.shape)}"
        )
    if rule == "maxmin":
        return source_losses.max() + mu * domain_losses.min()
    if rule == "hard":
        return (source_losses + mu * domain_losses).max()
    if not gamma > 0:
        raise UserError(f"gamma must be positive, found {gamma}")
    return (gamma * (source_losses + mu * domain_losses)).logsumexp(0) / gamma
