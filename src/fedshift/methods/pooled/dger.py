"""DGER: features whose domains look alike, and whose classes given the features do, too.

Zhao, Gong, Liu, Fu, Tao: Domain Generalization via Entropy Regularization. NeurIPS 2020.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

Features F, the published classifier T, a domain discriminator D, and for each source i two more classifiers T_i, T'_i:
    min L_cls(F, T)                                                                     (2)
      + L_D: D names the domain, F hides it (reversal of strength λ_d)                  (1)
      + α_1 L_er: T_i learns on F's features of domain i, F held fixed; then F learns that T_i, held fixed, is right
        about all other domains                                                         (6)
      + L_ge: T'_i learns the classes of domain i behind a reversal of strength α_2     (4, 5)

Where papers and code differ, and what was chosen
 1. λ_d = 0.1, α_1 = 0.05, α_2 = 0.001 (the code's values for ResNet-18).
 2. L_D weighs a domain by the inverse of its number of samples, L_ge a class by the inverse of its number in the batch.
 3. T_i and T'_i learn at ``heads_rate`` = 0.1 of the learning rate (code: 1e-4 beside 1e-3).
 4. In the first ten of 100 epochs the code multiplies every loss by 0.01: ``warm_up`` is the share of the run, and the
    factor holds for the terms beside L_cls only, since it is a change of the learning rate for the others.
 5. D and the classifiers have two hidden layers (1024, 256) with dropout ½ (code).
 6. Equal work: a step counts K mini-batches, one of each source.

Should reproduce: PACS ResNet-18 80.70, 76.40, 96.65, 71.77 (81.38); VLCS AlexNet 74.38; Rotated MNIST 96.36.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.adversarial import reverse_gradient
from fedshift.functional.losses import inverse_frequencies
from fedshift.methods.heads import Dropout
from fedshift.methods.pooled.training import PooledTraining
from fedshift.weights import Weights

WARM_UP = 0.01
"""What the other terms are multiplied by at first."""


class DGER(PooledTraining):
    """Adversarial domains, and classifiers that must agree across them."""

    name: ClassVar[str] = "dger"
    memory_names: ClassVar[tuple[str, ...]] = ("optimizer", "parts", "heads")
    relative_cost: ClassVar[float] = 1.5

    reversal: NonNegativeFloat = Field(0.1, description="λ_d: strength of the reversal before D")
    agreement_weight: NonNegativeFloat = Field(0.05, description="α_1: weight of L_er at F")
    entropy_reversal: NonNegativeFloat = Field(0.001, description="α_2: strength of the reversal before T'_i")
    heads_rate: PositiveFloat = Field(0.1, description="learning rate of T_i and T'_i beside that of F")
    warm_up: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="share of the run with weak other terms")
    hidden: tuple[PositiveInt, ...] = Field((1024, 256), description="hidden layers of D, T_i and T'_i")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model.embedding_size, model.classes, site.domains, self.hidden))
        by_domain = inverse_frequencies(site.data.domain_numbers, site.domains)
        optimizers = [site.optimizer(model, parts.discriminator, memory="optimizer")]
        optimizers.append(site.optimizer(parts.own, parts.reversed, memory="heads"))
        for group in optimizers[1].param_groups:
            group["lr"] = self.heads_rate * site.learning_rate

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            features = [model.features(batch.inputs) for batch in batches]
            labels = [batch.targets for batch in batches]
            loss = F.cross_entropy(model.classifier(torch.cat(features)), torch.cat(labels))
            share = WARM_UP if self.progress(site) < self.warm_up else 1.0
            others = self.domain_loss(parts, features, by_domain)
            others = others + self.agreement(parts, features, labels)
            return loss + share * (others + self.balanced_entropy(parts, features, labels))

        batches = self.of_sources(site, steps)
        loss = site.minimise_over(batches, loss_of, model, parts, optimizers=optimizers)
        site.remember_optimizer(optimizers[0], "optimizer")
        site.remember_optimizer(optimizers[1], "heads")
        site.memory["parts"] = site.weights_of(parts)
        return Update(site.weights_of(model), site.samples, loss)

    def domain_loss(self, parts: Parts, features: list[Tensor], weights: Tensor) -> Tensor:
        """L_D of (1)."""
        domains = torch.cat([torch.full((len(f),), number, device=f.device) for number, f in enumerate(features)])
        said = parts.discriminator(reverse_gradient(torch.cat(features), self.reversal))
        return F.cross_entropy(said, domains, weights)

    def agreement(self, parts: Parts, features: list[Tensor], labels: list[Tensor]) -> Tensor:
        """L_er of (6): T_i on its own domain without F, then F on the other domains without T_i."""
        losses = []
        for number, head in enumerate(parts.own):
            losses.append(F.cross_entropy(head(features[number].detach()), labels[number]))
            if len(features) > 1:
                others = [one for one in range(len(features)) if one != number]
                fixed = {name: parameter.detach() for name, parameter in head.named_parameters()}
                said = functional_call(head, fixed, (torch.cat([features[one] for one in others]),))
                theirs = F.cross_entropy(said, torch.cat([labels[one] for one in others]))
                losses.append(self.agreement_weight * theirs)
        return torch.stack(losses).sum()

    def balanced_entropy(self, parts: Parts, features: list[Tensor], labels: list[Tensor]) -> Tensor:
        """L_ge of (4, 5)."""
        losses = []
        for head, feature, own in zip(parts.reversed, features, labels, strict=True):
            said = head(reverse_gradient(feature, self.entropy_reversal))
            losses.append(F.cross_entropy(said, own, inverse_frequencies(own, said.shape[1])))
        return torch.stack(losses).sum()


class Parts(nn.Module):
    """What trains beside the model: D, and T_i and T'_i for every source."""

    def __init__(self, width: int, classes: int, domains: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.discriminator = head_of(width, hidden, domains)
        self.own = nn.ModuleList(head_of(width, hidden, classes) for _ in range(domains))
        self.reversed = nn.ModuleList(head_of(width, hidden, classes) for _ in range(domains))


def head_of(width: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Features (n, width) → logits (n, outputs), with ReLU and dropout behind each hidden layer."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(), Dropout(0.5)]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
