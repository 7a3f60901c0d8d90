"""RSC: representation self-challenging, which mutes the features that decide most.

Huang, Wang, Xing, Huang: Self-Challenging Improves Cross-Domain Generalization. ECCV 2020, arXiv 2007.02454.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

z are the features of a sample, h the classifier, y its label:
    g = ∂ h(z)_y / ∂z                                                                              (1)
    m = 0 where g is in the largest ``feature_share`` of a sample, else 1                          (2)
    s = h(z ⊙ m)                                                                                   (3, 4)
    muted are the ``batch_share`` of samples with the largest softmax(h(z))_y − softmax(s)_y       (section 3.3)
    θ ← θ − η ∇ CE(h(z ⊙ m) for those, h(z) for the others)                                        (5)

Where papers and code differ, and what was chosen. DomainBed: `RSC` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The authors' code (DeLightCMU/RSC, Domain_Generalization/models/resnet.py, ResNet.forward) mutes whole channels or
    whole positions of feature maps, by chance. Here and in DomainBed (facebookresearch/DomainBed,
    domainbed/algorithms.py, RSC) it is entries of the pooled features that the classifier reads.
 2. Both shares are 1/3, as in DomainBed. A share ends at the linearly interpolated percentile, which stays muted.
 3. The method does not ask for domains. ``setting: domainbed`` draws a batch of every domain, as DomainBed does.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.1, PACS 85.2, OfficeHome 65.5,
TerraIncognita 46.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.weights import Weights

Share = Annotated[float, Field(ge=0, le=1)]


class RSC(DeepAll):
    """Cross-entropy without the features that decide most."""

    traits = DeepAll.traits.derive(
        name="rsc",
        citation="Huang et al., ECCV 2020",
        group="pooled",
        advice="For networks that rest on few features; wide features suit it.",
        settings={"domainbed": {"domain_batches": "full"}},
        tasks=("classification",),
        needs_classes="it mutes what decides for the class",
        unfit_plug_ins=dict.fromkeys(("mixup", "cutmix"), "which mutes features by one label"),
        thaws=False,
        relative_cost=1.3,
        own_gradients=True,
        tests=MethodTests(options={"feature_share": tries(0.0, 0.7)}),
    )

    feature_share: Share = Field(1 / 3, description="share of a sample's features that is muted")
    batch_share: Share = Field(1 / 3, description="share of the samples whose features are muted")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)

        def loss_of(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            challenged = challenged_features(
                features, batch.targets, model.classifier, self.feature_share, self.batch_share
            )
            return site.objective.loss(model.classifier(challenged), batch.targets)

        loss = site.minimise_over(self.of_all(site, steps), loss_of, model, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)


def challenged_features(
    features: Tensor, labels: Tensor, classifier: Callable[[Tensor], Tensor], feature_share: float, batch_share: float
) -> Tensor:
    """Features without those that decide most for the label, of the samples that this mask hurts most.

    Source: RSC (Huang et al., ECCV 2020), equations 1 to 4 and section 3.3. A share ends at the linearly interpolated
    percentile; what lies at or above it is muted.
    """
    probe, true_class = features.detach().requires_grad_(True), labels[:, None]
    logits = classifier(probe)
    (by_feature,) = torch.autograd.grad(logits.gather(1, true_class).sum(), probe)
    with torch.no_grad():
        unmuted = by_feature < by_feature.quantile(1 - feature_share, dim=1, keepdim=True)
        hurt = logits.softmax(1).gather(1, true_class) - classifier(features * unmuted).softmax(1).gather(1, true_class)
        unhurt = hurt < hurt.quantile(1 - batch_share)
    return features * (unmuted | unhurt)
