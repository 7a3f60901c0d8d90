"""FACT: amplitudes of images are mixed, and a mean teacher holds both views to one answer.

Xu, Zhang, Zhang, Wang, Tian: A Fourier-based Framework for Domain Generalization. CVPR 2021.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

On a mini-batch x with its amplitude-mixed view x̂ (partner: the batch in another order), student f and teacher f̄:
    Â = (1−λ)A(x) + λA(x'),  λ ~ U(0, η),  x̂ = F⁻¹(Â, P(x))                                     (3–5)
    L = L_cls(x) + L_cls(x̂) + β [KL(f̄(x)/τ ‖ f(x̂)/τ) + KL(f̄(x̂)/τ ‖ f(x)/τ)]                   (6–9)
    f̄ ← m f̄ + (1−m) f                                                                            after every step

Where papers and code differ, and what was chosen. Code: MediaBrain-SJTU/FACT, train.py, `_do_epoch`, unless another is
named
 1. The paper adds both cross-entropies; the code takes their mean, which doubles the other terms beside them.
    ``cross_entropy_weight: 0.5`` and ``setting: released`` are the code.
 2. β grows as 2·exp(−5(1 − e/5)²) over the first five epochs e, whole numbers from 0 (code: utils/tools.py,
    `get_current_consistency_weight`; the paper says a sigmoid ramp-up).
 3. The teacher's momentum is min(1 − 1/(t+1), m), so that it follows the student at first (code: utils/tools.py,
    `warm_update_teacher`).
 4. Teacher and student see their batches in training mode, both views in one batch, so BatchNorm normalises these
    together (code).
 5. λ is drawn per image. Mixed images may leave the range of pixels and are cut to it, as images are stored.
 6. Equal work: a step counts one mini-batch, though the student passes over two views.

Should reproduce: PACS ResNet-18 85.37, 78.38, 95.15, 79.15 (84.51).
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.distillation import softened_divergence
from fedshift.methods.base import Samples
from fedshift.methods.composition.mean_teacher import MeanTeacher
from fedshift.methods.composition.views import amplitude_mixed
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import ITS_OWN, PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class FACT(PooledTraining):
    """A co-teacher on amplitude-mixed images."""

    traits = PooledTraining.traits.derive(
        name="fact",
        citation="Xu et al., CVPR 2021",
        group="pooled",
        advice="For images that differ in colour and texture; no gain shown: 75.26 on PACS images, +0.69 over "
        "deepall (p = 1.000), while β grew within an epoch.",
        settings={"released": {"cross_entropy_weight": 0.5}},
        needs_classes="its student learns the teacher's probabilities of classes",
        unfit_plug_ins={
            "amplitude_mix": ITS_OWN,
            "label_smoothing": "which classifies two views of an image",
        },
        relative_cost=2.7,
        tests=MethodTests(
            options={
                "strength": tries(0.0, 0.3),
                "cross_entropy_weight": tries(0.5),
                "consistency_weight": tries(0.0, 20.0),
                "ramp_epochs": tries(0.0, 1.0),
                "temperature": tries(1.0, ramp_epochs=0.0),
                "momentum": tries(0.0, 0.5),
            },
        ),
    )

    strength: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="η: the largest λ")
    cross_entropy_weight: NonNegativeFloat = Field(1.0, description="weight of each view's cross-entropy (code: 0.5)")
    consistency_weight: NonNegativeFloat = Field(2.0, description="β after its ramp")
    ramp_epochs: NonNegativeFloat = Field(5.0, description="epochs over which β grows; 0 = none")
    temperature: PositiveFloat = Field(10.0, description="τ")
    momentum: Annotated[float, Field(ge=0, le=1)] = Field(0.9995, description="m of the teacher")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        if len(samples.shape) != 3:
            raise UserError("fact needs images: vectors have no spectrum; choose another method")
        return ()

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        teacher = self.parts(site, lambda: MeanTeacher(model, self.momentum, warm_up=True)).train()
        draws = site.generator_for("amplitude mix")
        counted = self.mini_batches_of_a_step(site.domains)

        def loss_of(batch: Batch) -> Tensor:
            mixed = amplitude_mixed(site, batch.inputs, self.strength, draws)
            epoch = int(teacher.steps) * counted // site.batches_per_epoch
            return self.loss(model, teacher, batch, mixed, epoch)

        optimizer = site.optimizer(model, memory="optimizer")
        optimizer.register_step_post_hook(lambda *_: teacher.follow(model))
        return self.train(site, self.of_all(site, steps), loss_of, model, teacher, {"optimizer": optimizer})

    def loss(self, model: Network, teacher: MeanTeacher, batch: Batch, mixed: Tensor, epoch: float) -> Tensor:
        """L of (6–9) at this epoch."""
        views = torch.cat([batch.inputs, mixed])
        plain, other = model(views).chunk(2)
        labels = F.cross_entropy(plain, batch.targets) + F.cross_entropy(other, batch.targets)
        weight = self.consistency_weight * (sigmoid_ramp(epoch / self.ramp_epochs) if self.ramp_epochs else 1.0)
        of_plain, of_mixed = teacher(views).chunk(2)
        agreement = softened_divergence(of_plain, other, self.temperature)
        agreement = agreement + softened_divergence(of_mixed, plain, self.temperature)
        return self.cross_entropy_weight * labels + weight * agreement


def sigmoid_ramp(progress: float) -> float:
    """``exp(−5(1 − p)²)``: a weight that grows from 0.0067 to 1 (Laine & Aila, ICLR 2017; FACT)."""
    return math.exp(-5 * (1 - min(progress, 1.0)) ** 2)
