"""CMSS: curriculum manager for source selection.

Yang, Balaji, Lim, Shrivastava: Curriculum Manager for Source Selection in Multi-Source Domain Adaptation. ECCV 2020.

Setting: domain adaptation, *not private*: K labelled sources and a target without labels, all in one place.
Wire: every training sample once, also the target's (the ledger counts them as raw data); nothing after that.

Features F, a classifier, one domain classifier D, and a curriculum network CM that gives every source sample a score.
On a batch of N source samples (a mini-batch of every source together):
    w = N · softmax(CM(x_1), …, CM(x_N))                                               mean 1
    L_wadv = −E_s w·log D(F(x^s)) − E_t log(1 − D(F(x^t)))
    D minimises L_wadv; F and CM maximise it (gradient reversal); F and the classifier minimise the plain CE

Where papers and code differ: no code by the authors was at hand; this follows the equations, and agrees with a second
derivation from them. Our own choices:
* CM reads the network's inputs: two strided convolutions (16, 32) and a mean over positions for images, one hidden
  layer of ``width`` units for vectors. D has one hidden layer of ``width`` units.
* The strength of the reversal is constant; ``ramp: true`` lets it grow as DANN does, 2/(1 + e^(−10p)) − 1. D always
  takes its whole step, as behind a layer that reverses gradients; in the paper's one objective λ scales it, too.
* All sources pass through the network as one batch and the target as another, so BatchNorm sees their mixture.
* D and CM are not in the saved model, which is the ordinary network. The experiment's optimiser trains all.
* Equal work: an optimiser step counts K + 1 mini-batches, one of each source and one of the target. With
  ``domain_batches: split`` these are the parts of one.

Should reproduce (as printed by KD3A): Digit-5 90.8; Office-Caltech10 97.2; DomainNet 46.5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.adversarial import reverse_gradient
from fedshift.functional.schedules import ramp
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.adaptation import DomainBatches, PooledAdaptation, domain_classifier
from fedshift.weights import Weights


class CMSS(PooledAdaptation):
    """A second network chooses the source samples that look most like the target's."""

    traits = PooledAdaptation.traits.derive(
        name="cmss",
        citation="Yang et al., ECCV 2020",
        group="pooled",
        advice="Needs training.clip_norm; 82.53 on Amazon Review, 56.58 on PACS features where FedAvg has 61.31.",
        tasks=WITHOUT_MASKS,
        relative_cost=1.3,
        tests=MethodTests(
            where="mlp",
            options={"width": tries(8)},
            rates=(0.015, 0.005),
        ),
    )

    reversal: NonNegativeFloat = Field(1.0, description="strength of the gradient reversal, features and curriculum")
    ramp: bool = Field(False, description="the strength grows from 0 with the share of work done, as in DANN")
    width: PositiveInt = Field(
        64, description="hidden units of the domain classifier and, for vectors, of the curriculum"
    )

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        shape = site.data.input_shape
        parts = self.parts(site, lambda: Parts(model.embedding_size, shape, self.width))

        def loss_of(batches: DomainBatches) -> Tensor:
            sources, target = batches
            inputs = torch.cat([batch.inputs for batch in sources])
            labels = torch.cat([batch.targets for batch in sources])
            strength = self.reversal * (ramp(self.progress(site)) if self.ramp else 1.0)
            features, at_target = model.features(inputs), model.features(target.inputs)
            chosen = curriculum_weights(reverse_gradient(parts.curriculum(inputs), strength))
            adversarial = weighted_adversarial_loss(
                parts.discriminator(reverse_gradient(features, strength)),
                parts.discriminator(reverse_gradient(at_target, strength)),
                chosen,
            )
            return site.objective.loss(model.classifier(features), labels) + adversarial

        return self.train(site, self.with_target(site, steps), loss_of, model, parts)


class Parts(nn.Module):
    """What trains besides the model: the domain classifier D and the curriculum network CM."""

    def __init__(self, embedding: int, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.discriminator = domain_classifier(embedding, width)
        self.curriculum = curriculum_network(shape, width)


def curriculum_network(shape: tuple[int, ...], width: int) -> nn.Sequential:
    """CM: inputs (n, *shape) → one score per sample, (n, 1)."""
    if len(shape) != 3:
        return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), width), nn.ReLU(), nn.Linear(width, 1))
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


def weighted_adversarial_loss(source_logits: Tensor, target_logits: Tensor, weights: Tensor) -> Tensor:
    """Domain loss with weighted source samples, ``−E_s w·log D(s) − E_t log(1 − D(t))``, a scalar.

    D minimises it. Features and the curriculum network maximise it: pass both through `reverse_gradient`. Source: CMSS
    (Yang et al., ECCV 2020).
    """
    return -(weights * F.logsigmoid(source_logits)).mean() - F.logsigmoid(-target_logits).mean()


def curriculum_weights(scores: Tensor) -> Tensor:
    """Weights of the N samples of a source batch, ``w = N·softmax(scores)``; their mean is 1.

    Source: CMSS (Yang et al., ECCV 2020). Differentiable.
    """
    return scores.numel() * scores.flatten().softmax(0).view_as(scores)
