"""SagNet: a network that cannot tell the class by the style of its features.

Nam, Lee, Park, Yoon, Yoo: Reducing Domain Gap by Reducing Style Bias. CVPR 2021, arXiv 1910.11645, algorithm 1, as
DomainBed runs it.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

f are the features, h the classifier, g a second one for style. μ and σ² are the mean and the variance of a sample's
features z; a prime stands for another sample of the step, α ~ U(0, 1):
    z_c = σ̂ (z − μ)/σ + μ̂,   μ̂ = α μ + (1 − α) μ',   σ̂² = α σ² + (1 − α) σ'²         another style
    z_s = σ (z' − μ')/σ' + μ,  without a gradient of z'                                  another content
A step is three, each on other draws:
    f and h go down CE(h(z_c), y);   g goes down CE(g(z_s), y)
    f goes down −λ 1/C Σ_c log softmax_c(g(z_s))                                         as far from any class as it can

Where papers and code differ, and what was chosen. DomainBed: `SagNet` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The authors (hyeonseobnam/sagnet, modules/randomizations.py, modules/sag_resnet.py) change the maps before the last
    block of a ResNet, and g is a copy of that block. DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py,
    SagNet) changes the features that the classifier reads, and g is a second classifier, as here.
 2. The authors train g first and f and h last; the adversary moves BatchNorm's weights alone, with its gradient clipped
    at 0.1 (train.py). DomainBed moves all of f, without a clip.
 3. Both codes mix variances, which they take over n − 1, with 1e-5 below the root. λ = 0.1.
 4. DomainBed has an Adam for each of f, h and g. Here one optimiser has them all: Adam counts a weight's own steps, so
    these are the same steps.
 5. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one. It
    makes three steps of the optimiser, two of which move the published network.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.8, PACS 86.3, OfficeHome 68.1,
TerraIncognita 48.6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional

from fedshift.federation.site import Batch, Site
from fedshift.federation.site_memory import begin_momentum
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step
from fedshift.models.network import Network

TURNS = 3
EPSILON = 1e-5


class SagNet(DomainLoss):
    """Features whose style says nothing of the class, by turns of a content, a style and an adversarial loss."""

    traits = DomainLoss.traits.derive(
        name="sagnet",
        citation="Nam et al., CVPR 2021",
        group="pooled",
        advice="For domains that differ in style; three passes a step.",
        needs_classes="it hides the class in the style",
        relative_cost=3.0,
        tests=MethodTests(
            options={"adversarial_weight": tries(0.0, 3.0)},
            rates=(0.01, 0.02),
        ),
    )

    adversarial_weight: NonNegativeFloat = Field(0.1, description="λ: weight of the adversarial loss")

    def steps(self, mini_batches: int, domains: int) -> float:
        return 2 * super().steps(mini_batches, domains)

    def build_parts(self, model: Network, domains: int) -> nn.Module:
        return nn.Linear(model.embedding_size, model.classes)

    def of_sources(self, site: Site, due: int) -> Iterator[tuple[Batch, ...]]:
        return (batches for batches in super().of_sources(site, due) for _ in range(TURNS))

    def loss(self, step: Step) -> Tensor:
        """That of whose turn it is: f and h, g, or f alone."""
        begin_momentum(step.optimizer)  # a turn has gradients of one side
        order = torch.randperm(len(step.features), generator=step.draws).to(step.features.device)
        turn = step.number % TURNS
        if turn == 0:
            shares = torch.rand(len(order), generator=step.draws).to(step.features)
            return functional.cross_entropy(
                step.model.classifier(other_style(step.features, order, shares)), step.labels
            )
        step.parts.requires_grad_(turn == 1)
        features = step.features.detach() if turn == 1 else step.features
        logits = step.parts(other_content(features, order))
        step.parts.requires_grad_(True)
        if turn == 1:
            return functional.cross_entropy(logits, step.labels)
        return -self.adversarial_weight * functional.log_softmax(logits, 1).mean()


def other_style(features: Tensor, order: Tensor, shares: Tensor) -> Tensor:
    """z_c: features (n, d) with a mean and a variance between the sample's and its partner's."""
    variances, means = torch.var_mean(features, 1, keepdim=True)
    mean, variance = (torch.lerp(values[order], values, shares[:, None]) for values in (means, variances))
    return (features - means) / (variances + EPSILON).sqrt() * (variance + EPSILON).sqrt() + mean


def other_content(features: Tensor, order: Tensor) -> Tensor:
    """z_s: the partner's features (n, d), with the sample's mean and variance."""
    variances, means = torch.var_mean(features, 1, keepdim=True)
    deviations = (variances + EPSILON).sqrt()
    return ((features - means) / deviations)[order].detach() * deviations + means
