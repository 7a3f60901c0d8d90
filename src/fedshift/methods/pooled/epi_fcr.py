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
Features θ_j begin as θ does, so with trained weights where the experiment has them; ψ_j and ψ_r are drawn.

Where papers and code differ, and what was chosen. Code: HAHA-DL/Episodic-DG, PACS/model_resnet.py, ModelEpiFCR.
 1. λ_1 = 2, λ_2 = 0.05, λ_3 = 0.1 (PACS/run_main_epi_fcr.sh, with ResNet-18). Each step draws one ordered pair (i, j).
 2. The networks of the domains train from the start; the episodic terms begin after ``warm_up`` of the run (code,
    train_agg_nn_warm: 500 of 3,000 iterations).
 3. L is a sum over K domains in the code (train_agg_nn), where one pair (i, j) adds one L_epif and one L_epic. Here all
    of it is divided by K, so that the learning rate means the same as DeepAll's; ``summed: true`` and ``setting:
    released`` leave it as it is. Each (θ_j, ψ_j) learns at the full rate in either case (train_ds_nn).
 4. Frozen networks answer with their running BatchNorm statistics. The code freezes BatchNorm everywhere, from the
    first step on (bn_eval): for that, a network with ``batch_norm: stored``.
 5. The code steps the domains' networks first, on batches of their own (train). Here both step on the same batches, and
    the published network sees its partners as they are before this step.
 6. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one. They
    pass through two to four networks.

Should reproduce: PACS ResNet-18 82.1, 77.0, 93.9, 73.0 (81.5); VLCS AlexNet 72.9.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.data.tasks.objective import Objective
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.heads import redrawn
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class EpiFCR(DomainTraining):
    """Episodes in which features and classifier meet partners from other domains."""

    traits = DomainTraining.traits.derive(
        name="epi_fcr",
        citation="Li et al., ICCV 2019",
        group="pooled",
        advice="For three domains or more, at several times the cost; no gain shown: 53.59 on SURF, where deepall "
        "with its mini-batches has 54.52.",
        settings={"released": {"summed": True}},
        tasks=WITHOUT_MASKS,
        relative_cost=2.5,
        tests=MethodTests(
            options={
                "feature_weight": tries(0.0, 0.5),
                "classifier_weight": tries(0.0, 1.0),
                "random_weight": tries(0.0, 1.0),
                "warm_up": tries(0.0, 1.0),
            },
            golden={"feature_weight": 0.5},
            rates=(0.005, 0.003),
        ),
    )

    feature_weight: NonNegativeFloat = Field(
        2.0, description="λ_1: features that other domains' classifiers understand"
    )
    classifier_weight: NonNegativeFloat = Field(0.05, description="λ_2: a classifier that understands their features")
    random_weight: NonNegativeFloat = Field(
        0.1, description="λ_3: features that a random classifier can be right about"
    )
    summed: bool = Field(False, description="(6) as it stands (code); false: divided by the number of domains")
    warm_up: Annotated[float, Field(ge=0, le=1)] = Field(1 / 6, description="share of the run before the episodes")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model, site.domains)).train()
        draws = site.generator_for("pairs")

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            pair = None if self.progress(site) < self.warm_up else drawn_pair(len(batches), draws)
            published = self.published_loss(model, parts, batches, pair)
            return published + own_losses(parts, batches, site.objective)

        return self.train(site, self.of_sources(site, steps), loss_of, model, parts)

    def published_loss(
        self, model: Network, parts: Parts, batches: tuple[Batch, ...], pair: tuple[int, int] | None
    ) -> Tensor:
        """What (θ, ψ) minimises: (6), or (2) alone where there is no pair (i, j) yet."""
        label_loss = model.objective.loss
        features = [model.features(batch.inputs) for batch in batches]
        labels = [batch.targets for batch in batches]
        losses = [label_loss(model.classifier(f), y) for f, y in zip(features, labels, strict=True)]  # (2)
        if pair is not None:
            i, j = pair
            with frozen(parts):
                losses += [
                    self.random_weight * label_loss(parts.random(f), y) for f, y in zip(features, labels, strict=True)
                ]  # (5)
                if i != j:
                    partner = parts.of(j)
                    losses.append(self.feature_weight * label_loss(partner.classifier(features[i]), labels[i]))  # (3)
                    theirs = partner.features(batches[i].inputs)
                    losses.append(self.classifier_weight * label_loss(model.classifier(theirs), labels[i]))  # (4)
        return torch.stack(losses).sum() / (1 if self.summed else len(batches))


def own_losses(parts: Parts, batches: tuple[Batch, ...], objective: Objective) -> Tensor:
    """What the networks of the domains minimise (1). None has parameters of another, so none's rate is divided."""
    return torch.stack(
        [objective.loss(parts.of(j)(batch.inputs), batch.targets) for j, batch in enumerate(batches)]
    ).sum()


def drawn_pair(domains: int, draws: torch.Generator) -> tuple[int, int]:
    """i, and j ≠ i; (0, 0) where there is one domain only."""
    pairs = list(itertools.permutations(range(domains), 2)) or [(0, 0)]
    return pairs[int(torch.randint(len(pairs), (), generator=draws))]


class Parts(nn.Module):
    """What trains beside the model: a network per source; and a head that never trains."""

    def __init__(self, model: Network, domains: int) -> None:
        super().__init__()
        self.domains = nn.ModuleList(
            model.with_parts(copy.deepcopy(model.features), redrawn(model.classifier)) for _ in range(domains)
        )
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
