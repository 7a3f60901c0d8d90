"""MASF: episodes in which classes must confuse alike, and cluster alike, across domains.

Dou, Castro, Kamnitsas, Glocker: Domain Generalization via Model-Agnostic Learning of Semantic Features. NeurIPS 2019.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In every step one source is the meta-test domain and the others are the meta-train domains (Algorithm 1):
    L_task(θ) = mean over the meta-train domains of their cross-entropy
    θ' = θ − α ∇L_task(θ)                                                                 inner step
    L_global(θ') = mean over meta-train domains of 1/C Σ_c ½[KL(s_c ‖ s'_c) + KL(s'_c ‖ s_c)]       (3, 4)
    L_local(θ') = triplet loss of a metric network on the embeddings of all domains                 (6)
    θ ← θ − η∇L_task(θ) − γ∇[β_1 L_global(θ') + β_2 L_local(θ')]
s_c is the softmax of the mean logits of class c at temperature τ = 2. The meta-test domain is in no task loss.

Where papers and code differ, and what was chosen. Code: ``biomedia-mira/masf``, masf_func.py, construct_model_train
unless another function is named.
 1. The gradient of the inner step is a constant (code: first order), and each tensor's is clipped to norm 2 (both).
 2. The code clips the gradient of the meta losses at the network in the same way: ``meta_clip``, 2 in ``released``. The
    metric network's is not clipped.
 3. Triplets are of whole batches (6). The code takes the first third of each, one batch in all (main.py, train):
    ``triplet_part`` 3 in ``released``.
 4. β_1 = 1, β_2 = 0.005; α = 1e-5 with AlexNet (code). Default here: the learning rate of the experiment at that
    moment, since 1e-5 does nothing to a network that is not pre-trained; ``inner_rate`` sets it.
 5. Semi-hard triplets with margin 10 (code; the command of its README has 20; the paper also has a contrastive loss).
 6. The metric network has 1024 hidden units and 256 outputs, with a leaky ReLU of slope 0.2 behind both layers (code,
    MASF.forward_metric_net).
 7. The code steps task, meta losses and metric network with an Adam each, 1e-5. Here: the experiment's optimiser, for
    the sum.
 8. Two domains of three are meta-train domains in the paper and the code; here all but one.
 9. Their AlexNet has no BatchNorm. Here its running statistics follow the meta-train batches at θ alone.
10. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one. It
    passes those of the meta-train domains twice.

Should reproduce: PACS AlexNet 70.35, 72.46, 90.68, 67.33 (75.21); ResNet-18 80.29, 77.17, 94.99, 71.69 (81.04).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.clustering import squared_distances
from fedshift.functional.meta_learning import answer_at, inner_step, with_gradient
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network
from fedshift.weights import Weights

SLOPE = 0.2
"""Of the metric network's leaky ReLU."""


class MASF(DomainTraining):
    """Global class alignment and local sample clustering after a virtual step."""

    traits = DomainTraining.traits.derive(
        name="masf",
        citation="Dou et al., NeurIPS 2019",
        group="pooled",
        advice="For three domains or more, with small steps; no gain shown: 52.91 on SURF, where deepall with its "
        "mini-batches has 54.52.",
        settings={"released": {"meta_clip": 2.0, "triplet_part": 3}},
        needs_classes="it compares which classes are confused with each other",
        thaws=False,
        relative_cost=2.2,
        own_gradients=True,
        tests=MethodTests(
            options={
                "inner_clip": tries(0.001, inner_rate=1.0),
                "meta_clip": tries(0.001),
                "global_weight": tries(0.0, 10.0),
                "local_weight": tries(0.0, 1.0),
                "temperature": tries(1.0),
                "margin": tries(0.5, where="images for long", local_weight=1.0),
                "triplet_part": tries(3, local_weight=1.0),
                "hidden": tries(4),
                "embedding": tries(4),
            },
            golden={"inner_rate": 0.1, "global_weight": 0.1},
            rates=(0.005, 0.003),
        ),
    )

    inner_rate: PositiveFloat | None = Field(None, description="α; none = the learning rate (paper: 1e-5, pre-trained)")
    inner_clip: PositiveFloat = Field(2.0, description="largest norm of each tensor's gradient in the inner step")
    meta_clip: PositiveFloat | None = Field(
        None, description="largest norm of each tensor's gradient of the meta losses; none = no bound"
    )
    global_weight: NonNegativeFloat = Field(1.0, description="β_1: classes that confuse alike")
    local_weight: NonNegativeFloat = Field(0.005, description="β_2: samples that cluster by class")
    temperature: PositiveFloat = Field(2.0, description="τ")
    margin: NonNegativeFloat = Field(10.0, description="margin of the triplets")
    triplet_part: PositiveInt = Field(1, description="triplets are of one n-th of each mini-batch")
    hidden: PositiveInt = Field(1024, description="hidden units of the metric network")
    embedding: PositiveInt = Field(256, description="width of the metric network's output")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        metric = self.parts(site, lambda: metric_network(model.embedding_size, self.hidden, self.embedding))
        draws = site.generator_for("episodes")

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            test = int(torch.randint(len(batches), (), generator=draws))
            train = [batch for number, batch in enumerate(batches) if number != test]
            if not train:
                return F.cross_entropy(model(batches[test].inputs), batches[test].targets)
            return self.loss(model, metric, train, batches[test], self.inner_rate or site.learning_rate)

        return self.train(site, self.of_sources(site, steps), loss_of, model, metric)

    def loss(self, model: Network, metric: nn.Module, train: Sequence[Batch], test: Batch, rate: float) -> Tensor:
        """L_task(θ) + β_1 L_global(θ') + β_2 L_local(θ') of a step. Its gradient is known by then, and clipped."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        parameters, embedders = list(trained.values()), list(metric.parameters())
        task = torch.stack([F.cross_entropy(model(batch.inputs), batch.targets) for batch in train]).mean()
        by_task = torch.autograd.grad(task, parameters, materialize_grads=True)
        ahead = inner_step(trained, clipped_by_norm(by_task, self.inner_clip), rate)
        meta = self.meta_loss(model, ahead, metric, train, test)
        # The inner step is a constant, so the gradient by θ' is that by θ.
        result = torch.autograd.grad(meta, [*ahead.values(), *embedders], materialize_grads=True)
        by_meta, by_metric = result[: len(parameters)], result[len(parameters) :]
        bounded = by_meta if self.meta_clip is None else clipped_by_norm(by_meta, self.meta_clip)
        return with_gradient(task, parameters, by_task) + with_gradient(
            meta, [*parameters, *embedders], [*bounded, *by_metric]
        )

    def meta_loss(
        self, model: Network, ahead: dict[str, Tensor], metric: nn.Module, train: Sequence[Batch], test: Batch
    ) -> Tensor:
        """β_1 L_global + β_2 L_local at θ'."""
        batches = [*train, test]
        features = [answer_at(model, ahead, batch.inputs, part="features") for batch in batches]
        *others, held_out = (
            class_confusion(
                answer_at(model, ahead, feature, part="classifier"), batch.targets, model.classes, self.temperature
            )
            for feature, batch in zip(features, batches, strict=True)
        )
        alike = torch.stack([confusion_divergence(item, held_out) for item in others]).mean()
        first = [slice(max(1, len(feature) // self.triplet_part)) for feature in features]
        points = torch.cat([feature[rows] for feature, rows in zip(features, first, strict=True)])
        labels = torch.cat([batch.targets[rows] for batch, rows in zip(batches, first, strict=True)])
        clustered = semi_hard_triplet_loss(metric(points), labels, self.margin)
        return self.global_weight * alike + self.local_weight * clustered


def metric_network(width: int, hidden: int, outputs: int) -> nn.Sequential:
    """Features (n, width) → embeddings (n, outputs)."""
    return nn.Sequential(nn.Linear(width, hidden), nn.LeakyReLU(SLOPE), nn.Linear(hidden, outputs), nn.LeakyReLU(SLOPE))


def clipped_by_norm(gradients: Sequence[Tensor], largest: float) -> list[Tensor]:
    """Each tensor scaled to at most this Euclidean norm: ``g · min(1, c/‖g‖)`` (MASF's released code)."""
    return [gradient * (largest / gradient.norm().clamp_min(largest)) for gradient in gradients]


def semi_hard_triplet_loss(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean of ``max(0, ‖a − p‖² − ‖a − n‖² + ξ)`` over all anchors and positives.

    n is the semi-hard negative of a pair: the nearest one that is farther than the positive or, without one, the
    farthest. Source: FaceNet (Schroff et al., CVPR 2015); MASF (Dou et al., NeurIPS 2019, equation 6).
    """
    distances = squared_distances(embeddings, embeddings)
    same = labels[:, None] == labels[None]
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device) & (~same).any(1, keepdim=True)
    with torch.no_grad():  # every anchor's negatives in order: a binary search finds the first one beyond a positive
        negatives, order = distances.masked_fill(same, torch.inf).sort(1)
        first = torch.searchsorted(negatives, distances.where(pairs, torch.inf), right=True)
        chosen = order.gather(1, first.minimum((~same).sum(1, keepdim=True) - 1).clamp_min(0))
    losses = (distances - distances.gather(1, chosen) + margin).clamp_min(0)
    return losses.where(pairs, 0).sum() / pairs.sum().clamp_min(1)


def class_confusion(logits: Tensor, labels: Tensor, classes: int, temperature: float) -> tuple[Tensor, Tensor]:
    """``s_c = softmax(z̄_c / τ)`` with z̄_c the mean logits of class c, and which classes there are.

    Source: MASF (Dou et al., NeurIPS 2019, section 3.2), after Hinton et al.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise UserError(f"class confusions need logits (n, C) and n labels, found {tuple(logits.shape)}")
    chosen = F.one_hot(labels, classes).to(logits.dtype)
    counts = chosen.sum(0)
    means = chosen.T @ logits / counts.clamp_min(1)[:, None]
    return (means / temperature).softmax(1), counts > 0


def confusion_divergence(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """``1/C Σ_c ½[KL(s_c ‖ s'_c) + KL(s'_c ‖ s_c)]`` over the classes that both domains have.

    Source: MASF (Dou et al., NeurIPS 2019, equation 4). A probability that is rounded to 0 counts in a logarithm as the
    smallest number above 0.
    """
    (left, in_left), (right, in_right) = first, second
    both = in_left & in_right
    least = torch.finfo(left.dtype).tiny
    symmetric = ((left - right) * (left.clamp_min(least).log() - right.clamp_min(least).log())).sum(1) / 2
    return torch.where(both, symmetric, 0.0).sum() / len(both)
