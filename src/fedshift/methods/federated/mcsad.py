"""MCSAD: maps in styles that the classifiers of all sites find hard, and features and predictions that agree with them.

Wei: Multi-Source Collaborative Style Augmentation and Domain-Invariant Learning for Federated Domain Generalization.
IJCAI 2025.

Setting: domain generalization of images by a convolutional network. The target is never seen.
Wire: FedAvg's; and in every round the K classifiers of the round before down to each site, K·K·|C|.

C_1 … C_K are the classifiers of all sites after the round before. The style of a map f is its mean μ and deviation σ
per channel. A hard style is one step up the classifiers' loss, with all else fixed:
    (μ', σ') = (μ, σ) + η·∇_(μ, σ) 1/K Σ_j CE(C_j(rest of the network behind σ·f̄ + μ), y),   f̄ = (f − μ)/σ
    f' = σ'·f̄ + μ'
A mini-batch passes the network in two ways. z: behind the first stage its maps are f_1'. z': those behind the second
stage are f_2' in addition, the hard style of what the second stage makes of f_1'.
    L = CE(C(z), y) + CE(C(z'), y) + λ₁·S(z, z') + λ₂·[KL(q ‖ p(z)) + KL(q ‖ p(z'))]
    S: supervised contrast of all features (Khosla et al., NeurIPS 2020), of cosines divided by 0.07
    p(z) = softmax(C(z)/τ),   q = softmax(1/K Σ_j C_j(z)/τ) without gradient

Where paper and code differ, and what was chosen
 1. The paper could be read in part only. The equations are those of its code (``weiyikang/FedAdvSty``, train.py,
    `train_MSCAD`), with whose numbers a step agrees, with S from its paper, since its file is missing there.
 2. η = 2, as in run_dg.sh, which has λ₁ = λ₂ = 0. Neither their defaults nor τ are in the repository. **Here
    λ₁ = λ₂ = 0.1 and τ = 1.** The loss is a mean over the mini-batch, so a style moves by η over its size (16 there).
 3. In the code (`train_MSCAD`) no gradient passes f̄, so that what comes before the first styled stage never trains,
    and the second stage trains by z alone. This suits a pre-trained network. **Here gradients pass f̄**, not μ and σ
    (``setting: released`` is the code).
 4. σ has n − 1 in its denominator, as in the code (`train_MSCAD`), and the paper's has n.
 5. The stages are the first two that have a convolution, in a ResNet its first two blocks. Those of the code's
    `forward_block1` and `forward_block2` are not in its repository.
 6. What the code (`train_MSCAD`) lends in the first round is not in its repository. Here it is the common classifier.
 7. All sites have the same weight in the code (train.py): ``weighting: uniform``.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.site import Batch, Site
from fedshift.functional.contrastive import supervised_contrast
from fedshift.functional.distillation import softened_divergence
from fedshift.functional.styles import channel_styles
from fedshift.methods.base import Samples
from fedshift.methods.composition.mixstyle import STEM
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.federated.lent_heads import Head, LentHeads, scores_of
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Change, Network, changed_stages, map_channels

CONTRAST = 0.07
"""By what cosines are divided, as in SupCon's code."""


class MCSAD(LentHeads):
    """FedAvg on maps in styles that the classifiers of all sites find hard."""

    traits = LentHeads.traits.derive(
        name="mcsad",
        citation="Wei, IJCAI 2025",
        group="unseen",
        advice="For images and convolutional networks, where sites differ in style; four passes a step. Each site's "
        "classifier reaches the others.",
        sends="a model; its classifier reaches the other sites",
        needs_classes="it contrasts features by their classes",
        settings={"released": {"through": False, "weighting": "uniform"}},
        relative_cost=4.0,
        tests=MethodTests(
            options={
                "style_rate": tries(0.0, 30.0),
                "contrast_weight": tries(0.0, 3.0),
                "agreement_weight": tries(0.0, 9.0),
                "temperature": tries(5.0, agreement_weight=9.0),
            },
        ),
    )

    style_rate: NonNegativeFloat = Field(2.0, description="η: how far a style moves up the loss")
    contrast_weight: NonNegativeFloat = Field(0.1, description="λ₁: contrast of features by their classes")
    agreement_weight: NonNegativeFloat = Field(0.1, description="λ₂: agreement with the mean of all classifiers")
    temperature: PositiveFloat = Field(1.0, description="τ of the predictions that agree")
    through: bool = Field(True, description="whether gradients pass the maps whose style changes (code: no)")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no styles")
        return super().check_samples(samples)

    def check(self, network: Network) -> None:
        styled_stages(network)
        super().check(network)

    def loss_beside(self, site: Site, model: Network, heads: list[Head]) -> Callable[[Batch], Tensor]:
        first, second = styled_stages(model)

        def answers(features: Tensor) -> Tensor:
            return torch.stack([scores_of(model, head, features) for head in heads])

        def loss(batch: Batch) -> Tensor:
            changes: dict[str, Change] = {}
            features: list[Tensor] = []
            for stage in (first, second):
                style = HardStyle(self.through)
                with changed_stages(model, {**changes, stage: style.with_style_gradient}):
                    scores = answers(model.features(batch.inputs))
                    wrong = torch.stack([F.cross_entropy(some, batch.targets) for some in scores]).mean()
                style.move(wrong, self.style_rate)
                changes[stage] = style.in_style
                with changed_stages(model, changes):
                    features.append(model.features(batch.inputs))
            scores_each = [model.classifier(some) for some in features]
            total = torch.stack([F.cross_entropy(some, batch.targets) for some in scores_each]).sum()
            with torch.no_grad():
                mean = answers(features[0]).mean(0)
            apart = torch.stack([softened_divergence(mean, some, self.temperature) for some in scores_each]).sum()
            contrast = supervised_contrast(torch.cat(features), batch.targets.repeat(2), CONTRAST, with_itself=False)
            return total + self.contrast_weight * contrast + self.agreement_weight * apart

        return loss


class HardStyle:
    """The style of a mini-batch's maps, and the one up the loss.

    ``through``: whether gradients pass the maps that take it.
    """

    def __init__(self, through: bool) -> None:
        self.through = through
        self.style: tuple[Tensor, ...] = ()

    def with_style_gradient(self, maps: Tensor) -> Tensor:
        """The maps (n, c, h, w) as they are, with a gradient to their style alone."""
        self.style = tuple(part.requires_grad_() for part in channel_styles(maps.detach(), unbiased=True))
        return _restyle(maps.detach(), *self.style)

    def move(self, loss: Tensor, rate: float) -> None:
        """One step up the loss of a pass with `with_style_gradient`."""
        up = torch.autograd.grad(loss, self.style)
        self.style = tuple(part.detach() + rate * step for part, step in zip(self.style, up, strict=True))

    def in_style(self, maps: Tensor) -> Tensor:
        """The maps in this style."""
        return _restyle(maps if self.through else maps.detach(), *self.style)


def _restyle(maps: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """σ'·(f − μ)/σ + μ', with μ and σ constants for the gradient."""
    centre, spread = (part[:, :, None, None] for part in channel_styles(maps.detach(), unbiased=True))
    return (maps - centre) / spread * deviation[:, :, None, None] + mean[:, :, None, None]


def styled_stages(network: Network) -> tuple[str, str]:
    """The first two stages with maps. Raises UserError: there are fewer."""
    stages = [name for name in map_channels(network) if name != STEM]
    if len(stages) < 2:
        raise UserError(
            "mcsad needs two stages of maps, and the network has fewer with a convolution: choose one such as "
            "mnist_cnn or resnet18"
        )
    return stages[0], stages[1]
