"""MCGDM: gradients of the classifier that agree, of two views of an image and with those of other sites' classifiers.

Wei, Han: Multi-Source Collaborative Gradient Discrepancy Minimization for Federated Domain Generalization. AAAI 2024.

Setting: domain generalization, as FedAvg. The target is never seen.
Wire: FedAvg's; and in every round the K classifiers of the round before down to each site, K·K·|C|.

F is the feature extractor, C the classifier, C_1 … C_K are those of all sites after the round before, x' is an
augmented view of x. With ∇ the gradient with respect to a classifier's own parameters:
    g  = ∇ CE(C(F(x)), y)     g' = ∇ CE(C(F(x')), y)     g_j = ∇ CE(C_j(F(x)), y)
    L = ½ CE(C(F(x)), y) + ½ CE(C(F(x')), y) + λ₁·d(g, g') + λ₂·1/K Σ_j d(g_j, g')
    d(u, v) = mean over parameters of  1 − cos(u, v),   cos of a matrix: the mean over its rows
The penalties train F, too, through the gradients.

Where paper and code differ, and what was chosen
 1. The paper could be read in part only. The equations are those of its code (``weiyikang/FedGM_torch``, train.py,
    `train_fedgm`), with whose numbers a step agrees.
 2. Its weights are options without a default there. run_dg.sh has λ₁ = 0.7 and λ₂ = 0, README.md has zeros. **Here λ₂
    is 0.1**, since without it no site needs the classifiers of others.
 3. C_1 … C_K are compared with the gradient of the augmented view, as in the code (`train_fedgm`).
 4. The code's augmented view (`train_fedgm`) is not in its repository. Here it is a crop with other colours (``view``).
 5. What the code (`train_fedgm`) lends in the first round is not in its repository. Here it is the common classifier.
 6. All sites have the same weight in the code (train.py): ``weighting: uniform``.
 7. The paper's adaptation to a target without labels is not in its code (train.py), and not here.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.data.transforms import STRONG, NamedAugmentation, strong_view
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import Samples
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.federated.lent_heads import Head, LentHeads, scores_of
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network


class MCGDM(LentHeads):
    """FedAvg of two views of each image, with gradients of the classifier that agree."""

    traits = LentHeads.traits.derive(
        name="mcgdm",
        citation="Wei & Han, AAAI 2024",
        group="unseen",
        advice="For images whose sites differ in look, with an augmentation that has some of their looks. Each site's "
        "classifier reaches the others.",
        sends="a model; its classifier reaches the other sites",
        needs_classes="it compares gradients of the cross-entropy",
        relative_cost=3.0,
        tests=MethodTests(
            options={
                "intra_weight": tries(0.0, 9.0),
                "inter_weight": tries(0.0, 9.0),
                "view": tries({"brightness": 0.3}),
            },
            golden={"view": {"brightness": 0.3, "contrast": 0.3}},
        ),
    )

    intra_weight: NonNegativeFloat = Field(0.7, description="λ₁: agreement of the gradients of two views")
    inter_weight: NonNegativeFloat = Field(0.1, description="λ₂: agreement with the gradients of others' classifiers")
    view: NamedAugmentation = Field(STRONG, description="x': a preset's name or its parts")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no augmented view")
        return super().check_samples(samples)

    def loss_beside(self, site: Site, model: Network, heads: list[Head]) -> Callable[[Batch], Tensor]:
        draws = site.generator_for("view")
        trained = [parameter for parameter in model.classifier.parameters() if parameter.requires_grad]

        def loss(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            view = strong_view(batch.inputs, self.view, site.data.preprocessing, draws)
            plain = F.cross_entropy(model.classifier(features), batch.targets)
            augmented = F.cross_entropy(model.classifier(model.features(view)), batch.targets)
            total = (plain + augmented) / 2
            if self.intra_weight == 0 and self.inter_weight == 0:
                return total
            reference = _gradients(augmented, trained)
            if self.intra_weight > 0:
                total = total + self.intra_weight * direction_gap(_gradients(plain, trained), reference)
            if self.inter_weight > 0:
                gaps = [direction_gap(self._of_head(model, head, features, batch), reference) for head in heads]
                total = total + self.inter_weight * torch.stack(gaps).mean()
            return total

        return loss

    def _of_head(self, model: Network, head: Head, features: Tensor, batch: Batch) -> list[Tensor]:
        """g_j, in the order of the classifier's parameters."""
        trained = [name for name, parameter in model.classifier.named_parameters() if parameter.requires_grad]
        moved = {name: head[name].detach().requires_grad_() for name in trained}
        scores = scores_of(model, {**head, **moved}, features)
        return _gradients(F.cross_entropy(scores, batch.targets), list(moved.values()))


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, parameters, create_graph=True))


def direction_gap(gradients: Sequence[Tensor], references: Sequence[Tensor]) -> Tensor:
    """``1 − cos(g, r)``, the mean over tensors; of a matrix the cosine is the mean over its rows (MCGDM).

    Source: Wei, Han (AAAI 2024), as in their code (weiyikang/FedGM_torch, train.py, `train_fedgm`).
    """
    gaps = []
    for gradient, reference in zip(gradients, references, strict=True):
        rows = (gradient[None], reference[None]) if gradient.dim() < 2 else (gradient.flatten(1), reference.flatten(1))
        gaps.append(1 - F.cosine_similarity(*rows, dim=1).mean())
    return torch.stack(gaps).mean()
