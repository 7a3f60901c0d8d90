"""MASF: episodes in which classes must confuse alike, and cluster alike, across domains.

Dou, Castro, Kamnitsas, Glocker: Domain Generalization via Model-Agnostic Learning of Semantic Features. NeurIPS 2019.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In every step one source is the meta-test domain and the others are the meta-train domains (Algorithm 1):
    θ' = θ − α ∇L_task(θ), L_task over the meta-train domains                             inner step
    L_global(θ') = mean over meta-train domains of 1/C Σ_c ½[KL(s_c ‖ s'_c) + KL(s'_c ‖ s_c)]       (3, 4)
    L_local(θ') = triplet loss of a metric network on the embeddings of all domains                 (6)
    θ ← θ − η∇L_task(θ) − γ∇[β_1 L_global(θ') + β_2 L_local(θ')]
s_c is the softmax of the mean logits of class c at temperature τ = 2.

Where papers and code differ, and what was chosen
 1. The gradient of the inner step is a constant (code: first order), and each tensor's is clipped to norm 2.
 2. β_1 = 1, β_2 = 0.005; α = 1e-5 with AlexNet (code). Default here: the learning rate of the experiment at that
    moment, since 1e-5 does nothing to a network that is not pre-trained; ``inner_rate`` sets it.
 3. Semi-hard triplets with margin 10 (code; the paper also has a contrastive loss).
 4. The paper updates task and meta losses by two optimisers (Adam, 1e-5 each). Here: the experiment's, for the sum.
 5. Two domains of three are meta-train domains in the paper; here all but one.
 6. Equal work: a step counts K mini-batches, one of each source, and passes them twice.

Should reproduce: PACS AlexNet 70.35, 72.46, 90.68, 67.33 (75.21); ResNet-18 80.29, 77.17, 94.99, 71.69 (81.04).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.meta_learning import clipped_by_norm, inner_step, with_gradient
from fedshift.functional.metric_learning import class_confusion, confusion_divergence, semi_hard_triplet_loss
from fedshift.methods.pooled.training import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class MASF(PooledTraining):
    """Global class alignment and local sample clustering after a virtual step."""

    name: ClassVar[str] = "masf"
    thaws: ClassVar[bool] = False
    relative_cost: ClassVar[float] = 2.2

    inner_rate: PositiveFloat | None = Field(None, description="α; none = the learning rate (paper: 1e-5, pre-trained)")
    inner_clip: PositiveFloat = Field(2.0, description="largest norm of each tensor's gradient in the inner step")
    global_weight: NonNegativeFloat = Field(1.0, description="β_1: classes that confuse alike")
    local_weight: NonNegativeFloat = Field(0.005, description="β_2: samples that cluster by class")
    temperature: PositiveFloat = Field(2.0, description="τ")
    margin: NonNegativeFloat = Field(10.0, description="margin of the triplets")
    embedding: PositiveInt = Field(128, description="width of the metric network's output")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        metric = self.parts(site, lambda: metric_network(model.embedding_size, self.embedding))
        draws = site.generator_for("episodes")
        rate = self.inner_rate or site.learning_rate

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            test = int(torch.randint(len(batches), (), generator=draws))
            logits = [model(batch.inputs) for batch in batches]
            losses = [F.cross_entropy(said, batch.targets) for said, batch in zip(logits, batches, strict=True)]
            tested = losses.pop(test)
            if not losses:
                return tested
            train = torch.stack(losses).sum()
            parameters = dict(model.named_parameters())
            gradients = torch.autograd.grad(train, list(parameters.values()), retain_graph=True, materialize_grads=True)
            means = [gradient / len(losses) for gradient in gradients]
            ahead = inner_step(parameters, clipped_by_norm(means, self.inner_clip), rate)
            # The inner step has differentiated all losses but one; what it found serves the outer step, too.
            task = (with_gradient(train, list(parameters.values()), gradients) + tested) / len(batches)
            return task + self.meta_loss(model, ahead, metric, batches, test)

        return self.trained(site, self.of_sources(site, steps), loss_of, model, metric)

    def meta_loss(
        self, model: Network, ahead: dict[str, Tensor], metric: nn.Module, batches: tuple[Batch, ...], test: int
    ) -> Tensor:
        """β_1 L_global + β_2 L_local at θ'; the gradient by θ' is that by θ."""
        features = [at(model, ahead, "features", batch.inputs) for batch in batches]
        said = [at(model, ahead, "classifier", feature) for feature in features]
        confusions = [
            class_confusion(logits, batch.targets, model.classes, self.temperature)
            for logits, batch in zip(said, batches, strict=True)
        ]
        others = [one for number, one in enumerate(confusions) if number != test]
        alike = torch.stack([confusion_divergence(one, confusions[test]) for one in others]).mean()
        labels = torch.cat([batch.targets for batch in batches])
        clustered = semi_hard_triplet_loss(metric(torch.cat(features)), labels, self.margin)
        return self.global_weight * alike + self.local_weight * clustered


def at(model: Network, parameters: dict[str, Tensor], part: str, inputs: Tensor) -> Tensor:
    """What a part of the network, ``features`` or ``classifier``, gives with other parameters."""
    own = {name.removeprefix(f"{part}."): value for name, value in parameters.items() if name.startswith(f"{part}.")}
    said: Tensor = functional_call(model.get_submodule(part), own, (inputs,))
    return said


def metric_network(width: int, outputs: int) -> nn.Sequential:
    """Features (n, width) → embeddings (n, outputs)."""
    return nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(), nn.Linear(width, outputs))
