"""Epi-FCR: a feature extractor and a classifier that must work with partners trained on other domains.

Li, Zhang, Yang, Liu, Song, Hospedales: Episodic Training for Domain Generalization. ICCV 2019.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

The published network (θ, ψ); for each source j a network (θ_j, ψ_j) that trains on domain j alone (1); a random ψ_r:
    L_agg   = Σ_i CE(ψ(θ(x_i)), y_i)                                                     (2)
    L_epif  = CE(ψ̄_j(θ(x_i)), y_i),   j ≠ i, ψ_j held fixed                              (3)
    L_epic  = CE(ψ(θ̄_j(x_i)), y_i),   j ≠ i, θ_j held fixed                              (4)
    L_epir  = Σ_i CE(ψ̄_r(θ(x_i)), y_i),  ψ_r random, held fixed                          (5)
    min L_agg + λ_1 L_epif + λ_2 L_epic + λ_3 L_epir                                      (6)

Where papers and code differ, and what was chosen
 1. λ_1 = 2, λ_2 = 0.05, λ_3 = 0.1 (the script for PACS with ResNet-18). Each step draws one ordered pair (i, j).
 2. The networks of the domains train from the start; the episodic terms begin after ``warm_up`` of the run (code: 500
    of 3,000 iterations).
 3. Sums over domains are means here, so that the learning rate means the same as DeepAll's.
 4. Frozen networks answer with their running BatchNorm statistics; the code freezes BatchNorm everywhere.
 5. Equal work: a step counts K mini-batches, one of each source, and passes them through two to four networks.

Should reproduce: PACS ResNet-18 82.1, 77.0, 93.9, 73.0 (81.5); VLCS AlexNet 72.9.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS, Task
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.heads import redrawn
from fedshift.methods.pooled.training import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class EpiFCR(PooledTraining):
    """Episodes in which features and classifier meet partners from other domains."""

    name: ClassVar[str] = "epi_fcr"
    tasks: ClassVar[tuple[Task, ...]] = WITHOUT_MASKS
    relative_cost: ClassVar[float] = 2.5

    feature_weight: NonNegativeFloat = Field(
        2.0, description="λ_1: features that other domains' classifiers understand"
    )
    classifier_weight: NonNegativeFloat = Field(0.05, description="λ_2: a classifier that understands their features")
    random_weight: NonNegativeFloat = Field(
        0.1, description="λ_3: features that a random classifier can be right about"
    )
    warm_up: Annotated[float, Field(ge=0, le=1)] = Field(1 / 6, description="share of the run before the episodes")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model, site.domains)).train()
        draws = site.generator_for("pairs")

        label_loss = site.objective.loss

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            features = [model.features(batch.inputs) for batch in batches]
            labels = [batch.targets for batch in batches]
            losses = [label_loss(model.classifier(f), y) for f, y in zip(features, labels, strict=True)]
            losses += [label_loss(parts.of(j)(batch.inputs), batch.targets) for j, batch in enumerate(batches)]
            loss = torch.stack(losses).sum() / len(batches)
            if self.progress(site) < self.warm_up:
                return loss
            with frozen(parts):
                said = [label_loss(parts.random(f), y) for f, y in zip(features, labels, strict=True)]
                loss = loss + self.random_weight * torch.stack(said).mean()
                if len(batches) > 1:
                    pairs = list(itertools.permutations(range(len(batches)), 2))
                    i, j = pairs[int(torch.randint(len(pairs), (), generator=draws))]
                    partner = parts.of(j)
                    loss = loss + self.feature_weight * label_loss(partner.classifier(features[i]), labels[i])
                    theirs = partner.features(batches[i].inputs)
                    loss = loss + self.classifier_weight * label_loss(model.classifier(theirs), labels[i])
            return loss

        return self.trained(site, self.of_sources(site, steps), loss_of, model, parts)


class Parts(nn.Module):
    """What trains beside the model: a network per source; and a head that never trains."""

    def __init__(self, model: Network, domains: int) -> None:
        super().__init__()
        self.domains = nn.ModuleList(redrawn(model) for _ in range(domains))
        self.random = redrawn(model.classifier).requires_grad_(False)

    def of(self, domain: int) -> Network:
        """(θ_j, ψ_j)."""
        return cast(Network, self.domains[domain])


@contextmanager
def frozen(parts: Parts) -> Iterator[None]:
    """The parts held fixed: no gradient reaches them, and BatchNorm neither uses nor learns the batch."""
    trained = [parameter for parameter in parts.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    parts.eval()
    try:
        yield
    finally:
        parts.train()
        for parameter in trained:
            parameter.requires_grad_(True)
