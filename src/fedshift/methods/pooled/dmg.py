"""DMG: masks that are specific to a domain, with overlap that is discouraged.

Chattopadhyay, Balaji, Hoffman: Learning to Balance Specificity and Invariance for In and Out of Domain Generalization.
ECCV 2020.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

Each source d has mask logits m̃^d over the features. m^d ~ Bernoulli(σ(m̃^d)), straight-through gradient (1, 2):
    L = Σ_d CE(g(m^d ⊗ f(x^d)), y) + λ_O Σ_{d<e} sIoU(σ(m̃^d), σ(m̃^e))                            (3, 4)
At an unknown domain the predictions under every source's mask are averaged; there m = σ(m̃) scales the features (5).

Where papers and code differ, and what was chosen. Code: prithv1/DMG, models/supermasks.py (SuperMask).
 1. Masks act on the features that the classifier reads (the paper: on the pooled features of a ResNet, on the inputs of
    the three fully connected layers of AlexNet).
 2. sIoU is the mean over pairs of domains, with 1e-6 above and below (code). λ_O = 0.1; logits begin at U(0, 1).
 3. A batch mixes all domains, each sample under its own domain's mask, drawn per sample.
 4. Adam with 1e-4 and a decay of 0.99 an epoch (paper). Here: the experiment's optimiser and schedule.
 5. The average is over probabilities. The code (prithv1/DMG, trainers/subnetwork_supermask_trainer.py, evaluate)
    averages logits: ``together: logits`` and ``setting: released``.

Should reproduce: PACS ResNet-18 76.90, 80.38, 92.35, 75.21 (printed 81.46; these four average to 81.21).
"""

from __future__ import annotations

import itertools
from typing import Literal, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.data.tasks.objective import CLASSES, Objective
from fedshift.federation.messages import Update
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Batch, Site
from fedshift.functional.masking import draws_like, soft_interaction, straight_through_mask
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class DMG(PooledTraining):
    """A mask of the features for each source."""

    traits = PooledTraining.traits.derive(
        name="dmg",
        citation="Chattopadhyay et al., ECCV 2020",
        group="pooled",
        advice="For domains that need some features of their own; no gain on SURF (53.50, where deepall has 53.19).",
        settings={"released": {"together": "logits"}},
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer",),
        unfit_plug_ins={
            **dict.fromkeys(("mixup", "cutmix", "amplitude_mix"), "which needs samples of one domain each"),
            **dict.fromkeys(("dropout", "label_smoothing"), "which classifies every sample under a mask of its own"),
        },
        relative_cost=1.1,
        tests=MethodTests(options={"overlap_weight": tries(0.0, 3.0)}),
    )

    overlap_weight: NonNegativeFloat = Field(0.1, description="λ_O")
    together: Literal["probabilities", "logits"] = Field(
        "probabilities", description="what is averaged over the masks at an unknown domain (code: logits)"
    )

    def adapt_network(self, network: Network, sources: int) -> Network:
        with drawn_from(derive_seed(network.seed, "masks")):
            masks = torch.rand(sources, network.embedding_size)
        masked = MaskedClassifier(network.classifier, masks, network.objective, logits=self.together == "logits")
        return network.with_parts(network.features, masked)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        masked = cast(MaskedClassifier, model.classifier)

        def loss_of(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            logits = masked.under_own_mask(features, batch.domains, draws_like(features))
            loss = site.objective.loss(logits, batch.targets)
            return loss + self.overlap_weight * overlap(masked.masks.sigmoid())

        return self.train(site, self.of_all(site, steps), loss_of, model)


class MaskedClassifier(nn.Module):
    """A classifier behind one mask per source; it answers with what is said under all of them together.

    ``masks``: the logits m̃, (K, d). ``logits``: whether outputs are averaged, instead of what they say.
    """

    def __init__(
        self, classifier: nn.Module, masks: Tensor, objective: Objective = CLASSES, *, logits: bool = False
    ) -> None:
        super().__init__()
        self.objective = objective
        self.logits = logits
        self.classifier = classifier
        self.masks = nn.Parameter(masks)

    def under_own_mask(self, features: Tensor, domains: Tensor, draws: Tensor) -> Tensor:
        """Logits of training (1, 2): each sample under its domain's mask, decided by ``draws`` (n, d) in [0, 1)."""
        masks = torch.stack([straight_through_mask(mask, draws) for mask in self.masks])
        sample_masks = masks[domains, torch.arange(len(features), device=features.device)]
        logits: Tensor = self.classifier(features * sample_masks)
        return logits

    def forward(self, features: Tensor) -> Tensor:
        """The mean under every source's mask (5), (n, C). For classes its softmax is the mean of the probabilities."""
        predicted = torch.stack([self.classifier(features * mask) for mask in self.masks.sigmoid()])
        return predicted.mean(0) if self.logits else self.objective.together(predicted)


def overlap(masks: Tensor, smoothing: float = 1e-6) -> Tensor:
    """Mean sIoU over all pairs of masks (K, d); 0 for a single one."""
    pairs = [soft_interaction(item, other, smoothing) for item, other in itertools.combinations(masks, 2)]
    return torch.stack(pairs).mean() if pairs else masks.sum() * 0.0
