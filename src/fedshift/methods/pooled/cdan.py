"""CDAN and CDAN+E: conditional adversarial domain adaptation.

Long, Cao, Wang, Jordan: Conditional Adversarial Domain Adaptation. NeurIPS 2018.

Setting: domain adaptation, *not private*: labelled sources and a target without labels, all in one place.
Wire: every training sample once, also the target's (the ledger counts them as raw data); nothing after that.

Features f, predictions p = softmax(h(f)), a domain classifier D on features conditioned on predictions:
    D reads p ⊗ f, p detached; if C·d is large, a random projection (f R_f ⊙ p R_p)/√m instead
    w = 1 + e^(−H(p)), divided by their sum on each side (+E);  equal without entropy conditioning
    L_adv = −½ Σ_s w·log D − ½ Σ_t w·log(1 − D)
    D minimises L_adv, the features maximise it (gradient reversal of strength 2/(1 + e^(−10p)) − 1, with p the share
    of the work that is done);
    features and h minimise CE on the sources

Where papers and code differ. The defaults are the paper's; ``setting: released`` is the authors' code (thuml/CDAN,
pytorch/train_image.py, `train`, unless another is named).
 1. In the paper p is the training's progress from 0 to 1. In the code (pytorch/network.py, `calc_coeff`) p is 1 after
    10,000 of 100,000 iterations. Here p is divided by ``ramp_share``.
No setting changes these:
 2. In the code (pytorch/loss.py, `CDAN`) the weights have a gradient, reversed like the features'. Here, too.
 3. The paper projects at random if C·d > 4096 (``projection: auto``). In the code it is a flag.
 4. The paper has one source. Here the batches of all sources together are the source side.
 5. SGD with Nesterov momentum 0.9, weight decay 5e-4, new layers 10 times faster, a schedule in iterations; ten crops
    in testing (code; `image_classification_test`). Here: the experiment's optimiser, schedule and inputs, as for every
    method.
 6. D is not in the saved model, which is the ordinary network.
Equal work: an optimiser step counts K + 1 mini-batches, one of each source and one of the target. With
``domain_batches: split`` these are the parts of one.

Should reproduce (as run by MDFNet, ACC_s / ACC_t): Image-CLEF 84.50 / 85.36; Office-Home 75.75 / 61.42.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.adversarial import reverse_gradient
from fedshift.functional.losses import entropy
from fedshift.functional.schedules import ramp
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.adaptation import DomainBatches, PooledAdaptation
from fedshift.weights import Weights

_LARGEST_PRODUCT = 4096


class CDAN(PooledAdaptation):
    """Features that fool a domain classifier, which reads features and predictions together."""

    traits = PooledAdaptation.traits.derive(
        name="cdan",
        citation="Long et al., NeurIPS 2018",
        group="pooled",
        advice="For image features: 66.24 in win-win on PACS features, +9.39 over Source-only (p here = 0.025); "
        "it loses 5.83 on SURF (p here = 0.004).",
        settings={"released": {"ramp_share": 0.1}},
        needs_classes="its domain classifier reads the probabilities of classes",
        relative_cost=1.6,
        tests=MethodTests(
            where="mlp",
            beside={"width": 16, "projected": 32},
            options={"ramp_share": tries(0.1, 0.5), "projected": tries(64, projection="random"), "width": tries(8)},
            elsewhere={"projection": ("outer",)},
            golden={"width": 64, "setting": "released"},
            rates=(0.02, 0.005),
        ),
    )

    entropy_conditioning: bool = Field(True, description="+E: confident predictions have more weight; false: CDAN")
    adversarial_weight: NonNegativeFloat = Field(1.0, description="weight of L_adv")
    ramp_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the work after which the reversal has its full strength (code: 0.1)"
    )
    projection: Literal["auto", "outer", "random"] = Field(
        "auto", description="p ⊗ f, a random projection of it, or the latter where C·d > 4096"
    )
    projected: PositiveInt = Field(1024, description="m: width of the random projection")
    width: PositiveInt = Field(1024, description="units of both hidden layers of D")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="dropout after both hidden layers of D")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(self, model.embedding_size, model.classes))

        def loss_of(batches: DomainBatches) -> Tensor:
            sources, target = batches
            strength = ramp(self.progress(site) / self.ramp_share)
            labels = torch.cat([batch.targets for batch in sources])
            features = model.features(torch.cat([batch.inputs for batch in sources]))
            logits = model.classifier(features)
            at_target = model.features(target.inputs)
            source = self._discriminate(parts, features, logits, strength)
            other = self._discriminate(parts, at_target, model.classifier(at_target), strength)
            adversarial = conditional_adversarial_loss(source[0], other[0], source[1], other[1])
            return F.cross_entropy(logits, labels) + self.adversarial_weight * adversarial

        return self.train(site, self.with_target(site, steps), loss_of, model, parts)

    def _discriminate(self, parts: Parts, features: Tensor, logits: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """D's logits of one side, and the weights of its samples."""
        probabilities = logits.softmax(1)
        reversed_features = reverse_gradient(features, strength)
        judged = parts.discriminator(condition(reversed_features, probabilities.detach(), parts.projections))
        if not self.entropy_conditioning:
            return judged, features.new_full((len(features),), 1 / len(features))
        return judged, certainty_weights(reverse_gradient(entropy(probabilities), strength))


class Parts(nn.Module):
    """The domain classifier D, which trains besides the model, and the random projection, which does not train."""

    def __init__(self, method: CDAN, embedding: int, classes: int) -> None:
        super().__init__()
        random = method.projection == "random" or (
            method.projection == "auto" and embedding * classes > _LARGEST_PRODUCT
        )
        inputs = method.projected if random else embedding * classes
        if random:
            self.register_buffer("of_features", torch.randn(embedding, inputs))
            self.register_buffer("of_predictions", torch.randn(classes, inputs))
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Linear(inputs, method.width), nn.ReLU(), nn.Dropout(method.dropout)]
            inputs = method.width
        self.discriminator = nn.Sequential(*layers, nn.Linear(inputs, 1))

    @property
    def projections(self) -> tuple[Tensor, Tensor] | None:
        """R_f and R_p, if there are any."""
        result = dict(self.named_buffers(recurse=False))
        return (result["of_features"], result["of_predictions"]) if result else None


def condition(features: Tensor, probabilities: Tensor, projections: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Condition features on predictions: the outer product ``p ⊗ f``, flattened.

    Source: CDAN (Long et al., NeurIPS 2018).
    """
    if projections is None:
        return (probabilities[:, :, None] * features[:, None, :]).flatten(1)
    of_features, of_predictions = projections
    projected: Tensor = (features @ of_features) * (probabilities @ of_predictions) / math.sqrt(of_features.shape[1])
    return projected


def certainty_weights(entropies: Tensor) -> Tensor:
    """Weight each sample by its certainty: ``1 + e^(−H)``, divided by the sum over the batch.

    Before the division the weight is 2 for a certain prediction and 1 + 1/C for a uniform one. Source: CDAN+E (Long et
    al., NeurIPS 2018).
    """
    weights = 1 + (-entropies).exp()
    return weights / weights.sum().detach()


def conditional_adversarial_loss(
    source_logits: Tensor, target_logits: Tensor, source_weights: Tensor, target_weights: Tensor
) -> Tensor:
    """Domain loss with weights on both sides, ``−½ Σ_s w·log D(s) − ½ Σ_t w·log(1 − D(t))``, a scalar.

    It is ln 2 where D answers ½. Source: CDAN (Long et al., NeurIPS 2018).
    """
    source, target = -F.logsigmoid(source_logits).flatten(), -F.logsigmoid(-target_logits).flatten()
    return ((source_weights * source).sum() + (target_weights * target).sum()) / 2
