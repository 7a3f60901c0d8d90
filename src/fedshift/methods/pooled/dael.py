"""DAEL: domain adaptive ensemble learning.

Zhou, Yang, Qiao, Xiang: Domain Adaptive Ensemble Learning. IEEE TIP 2021.

Setting: domain adaptation, *not private*: K labelled sources and a target without labels, all in one place. Without the
target's term (``unlabelled_weight: 0``) it is the version for domain generalization, and the target takes no part.
Wire: every training sample once, also the target's (the ledger counts them as raw data); nothing after that.

Common features and one expert p_k (linear, softmax) per source. a(x) is a weak view of a sample, A(x) a strong one.
    L_x  = mean_k E CE(y, p_k(a(x^k)))                                          every expert on its own domain
    L_cr = mean_k E ‖mean_{j≠k} p_j(A(x^k)) − p_k(a(x^k))‖²                     p_k constant for back-propagation
    L_u  = E 1[max p ≥ 0.95] · CE(ŷ, mean_k p_k(A(x^T)))               ŷ: class of the most confident expert on a(x^T)
    min L_x + L_cr + w · L_u
The prediction is the mean of the experts. With one source there is no other expert, and no L_cr.

Where papers and code differ. Code: KaiyangZhou/Dassl.pytorch, dassl/engine/da/dael.py, `DAEL.forward_backward`, unless
another is named
* ``training.augmentation`` makes the weak view, and ``strong`` makes the strong view from it: a crop and changes of
  colour. The paper and its code (configs/trainers/da/dael/domainnet.yaml) use RandAugment with two operations,
  on some data sets also cutout.
* Vectors have no strong view: both views are equal except for the network's dropout. L_cr and L_u are then plain
  consistency and pseudo-labels, which the paper does not test.
* ε = 1e-5 inside logarithms, and the pseudo-labels' forward pass in training mode, which also moves BatchNorm's running
  statistics: as in the code.
* One optimiser for features and experts, the experiment's; the code has one of the same settings for each
  (`DAEL.build_model`).
* Equal work: an optimiser step counts K + 1 mini-batches, one of each source and one of the target, although each has
  two views. With ``domain_batches: split`` these are the parts of one.

Should reproduce (as printed by KD3A): DomainNet 48.7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.data.transforms import STRONG, NamedAugmentation, strong_view
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods import heads
from fedshift.methods.heads import (
    Experts,
    expert_cross_entropy,
    with_experts,
)
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.adaptation import PooledAdaptation
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


class DAEL(PooledAdaptation):
    """One expert per source, trained on its domain and by the other experts; the most confident labels the target."""

    traits = PooledAdaptation.traits.derive(
        name="dael",
        citation="Zhou et al., IEEE TIP 2021",
        group="pooled",
        advice="For images: 66.37 on PACS features, +5.05 over FedAvg (p = 0.375); vectors have no strong view: "
        "−1.77 on Amazon Review (p = 1.000).",
        needs_classes="experts learn from each other's probabilities and from guessed classes",
        unfit_plug_ins={
            **PooledAdaptation.traits.unfit_plug_ins,
            "dropout": "which has a classifier for every source",
        },
        relative_cost=2.0,
        tests=MethodTests(
            where="fast",
            options={
                "threshold": tries(0.3),
                "unlabelled_weight": tries(0.0, 2.0, threshold=0.3),
                "strong": tries({"brightness": 0.1}),
            },
            golden={"threshold": 0.4},
            rates=(0.025, 0.005),
        ),
    )

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(0.95, description="least probability of a pseudo-label")
    unlabelled_weight: NonNegativeFloat = Field(
        0.5, description="w: weight of the target's loss; 0 = version for domain generalization, without target"
    )
    consensus_weight: NonNegativeFloat = Field(1.0, description="weight of L_cr; 0 = without (ablation)")
    strong: NamedAugmentation = Field(STRONG, description="strong view of images: a preset's name or its parts")

    def adjust_traits(self, traits: Traits) -> Traits:
        """The target's samples are in the pool if they have a weight."""
        return replace(traits, target="unlabelled" if self.unlabelled_weight > 0 else "unseen")

    def adapt_network(self, network: Network, sources: int) -> Network:
        return with_experts(network, sources)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        draws = site.generator_for("strong view")

        def loss_of(batches: tuple[tuple[Batch, ...], Batch | None]) -> Tensor:
            sources, target = batches
            views = [strong_view(batch.inputs, self.strong, site.data.preprocessing, draws) for batch in sources]
            loss = self.source_loss(model, sources, views)
            if target is None:
                return loss
            view = strong_view(target.inputs, self.strong, site.data.preprocessing, draws)
            return loss + self.unlabelled_weight * self.target_loss(model, target, view)

        return self.train(site, self.of_each(site, steps), loss_of, model)

    def source_loss(self, model: Network, sources: tuple[Batch, ...], strong: list[Tensor]) -> Tensor:
        """L_x + L_cr."""
        experts = cast(Experts, model.classifier)
        losses = []
        for number, (batch, view) in enumerate(zip(sources, strong, strict=True)):
            predicted = experts.heads[number](model.features(batch.inputs)).softmax(1)
            losses.append(expert_cross_entropy(predicted, batch.targets).mean())
            if len(sources) > 1 and self.consensus_weight > 0:
                probabilities = experts.probabilities(model.features(view))
                losses.append(self.consensus_weight * consensus_regularisation(probabilities, predicted, number))
        return torch.stack(losses).sum() / len(sources)

    def target_loss(self, model: Network, target: Batch, strong: Tensor) -> Tensor:
        """L_u."""
        experts = cast(Experts, model.classifier)
        with torch.no_grad():
            labels, sure = heads.confident_pseudo_labels(
                experts.probabilities(model.features(target.inputs)), self.threshold
            )
        return heads.unlabelled_ensemble_loss(experts.probabilities(model.features(strong)), labels, sure)


def consensus_regularisation(
    expert_probabilities_strong: Tensor, teacher_probabilities_weak: Tensor, domain: int
) -> Tensor:
    """Consistency loss of domain k, ``E ‖mean_{j≠k} p_j(strong view) − p_k(weak view)‖²``, a scalar (DAEL's L_cr).

    The squared error is summed over classes and averaged over the batch. The caller averages over k.
    """
    experts = len(expert_probabilities_strong)
    others = [expert for expert in range(experts) if expert != domain]
    consensus = expert_probabilities_strong[others].mean(0)
    return (consensus - teacher_probabilities_weak.detach()).square().sum(1).mean()
