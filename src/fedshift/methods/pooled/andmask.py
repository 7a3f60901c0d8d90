"""AND-mask: a weight moves only where the sources' gradients agree in sign.

Parascandolo, Neitz, Orvieto, Gresele, Schölkopf: Learning explanations that are hard to vary. ICLR 2021,
arXiv 2009.00329.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    m_j = 1 where |1/K Σ_e sign ∂L_e/∂θ_j| ≥ τ, else 0
    θ ← θ − η m ⊙ 1/K Σ_e ∇L_e(θ), each tensor divided by the share of its weights that m keeps

Where papers and code differ, and what was chosen. DomainBed: `ANDMask` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The paper's equation has no division by that share; DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py,
    ANDMask.mask_grads) has: ``rescaled``, on by default, as in the tables with this name.
 2. τ = 1: all sources agree, as in DomainBed. An optimiser with moments moves weights that the mask stops, too.
 3. BatchNorm normalises all domains together; in DomainBed each domain alone.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step


class ANDMask(DomainLoss):
    """The mean gradient, where the domains' gradients agree in sign."""

    traits = DomainLoss.traits.derive(
        name="andmask",
        citation="Parascandolo et al., ICLR 2021",
        group="pooled",
        advice="For few sources with much in common; with many, hardly a weight moves unless agreement is below 1.",
        tasks=WITHOUT_MASKS,
        thaws=False,
        relative_cost=2.0,
        own_gradients=True,
        tests=MethodTests(options={"agreement": tries(0.3)}),
    )

    agreement: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="τ: how far signs must agree")
    rescaled: bool = Field(True, description="whether a tensor's gradient is divided by the share that is kept")

    def loss(self, step: Step) -> Tensor:
        """The mean loss, whose gradient is the masked one."""
        trained = [value for value in step.model.parameters() if value.requires_grad]
        by_domain = [
            torch.autograd.grad(loss, trained, retain_graph=True, materialize_grads=True) for loss in step.losses
        ]
        masked = [self.mask_gradients(torch.stack(gradients)) for gradients in zip(*by_domain, strict=True)]
        linear = torch.stack([(value * gradient).sum() for value, gradient in zip(trained, masked, strict=True)]).sum()
        return step.losses.mean().detach() + linear - linear.detach()

    def mask_gradients(self, gradients: Tensor) -> Tensor:
        """The mean of the domains' gradients of a tensor, (K, …), where they agree."""
        kept = (gradients.sign().mean(0).abs() >= self.agreement).to(gradients)
        share = kept.mean() + 1e-10 if self.rescaled else 1.0
        return kept * gradients.mean(0) / share
