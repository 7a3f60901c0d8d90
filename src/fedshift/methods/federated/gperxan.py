"""gPerXAN: personalised, explicitly assembled normalisation, guided by the common classifier.

Le, Phan Nguyen, Tran et al.: Efficiently Assemble Normalization Layers and Regularization for Federated Domain
Generalization. CVPR 2024.

Setting: domain generalization with networks that have BatchNorm.
Wire: FedAvg's, the assembly weights included; see 2 for BatchNorm.

Every BatchNorm layer becomes an assembly of two normalisations,
    XAN(x) = ω·BN(x) + (1 − ω)·IN(x),     0 ≤ ω ≤ 1, learnt
of which BatchNorm is personal, a site's own, and all else is averaged. A site trains
    L = CE(g_k(f_k(x)), y) + β · CE(ḡ(f_k(x)), y)
f_k its features, g_k its classifier, ḡ the common classifier that came, held fixed: the guide.

Where papers and code differ, and what was chosen (code: lhkhiem28/gPerXAN)
 1. ω is as in the code (source/models/modules/normalization.py, `eXplicitOptimizedNorm2d`): the softmax of two scores
    of each layer, at first 1/2; BN and IN have a scale and a shift each. Where BatchNorm has loaded weights, both begin
    with its scale and shift. Vectors have no InstanceNorm: on them personal BatchNorm and the guide are left.
 2. Personal is what has "batchnorm" in its name in the code (source/main/client.py, `Client.fit`): BatchNorm's scale,
    shift and statistics and one of the two scores. The code uploads and averages it all the same
    (source/strategies.py, `FedAvg.aggregate_fit`), which an unseen site needs. ``unseen: mean`` does as the code, but
    a site goes on with its own; ``unseen: target`` sends none of it, and measures statistics at the new site.
 3. β = 0.5.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.site import Batch, Site
from fedshift.methods.federated.fedbn import FedBN
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.models.normalisation import AssembledNorm2d, with_norms
from fedshift.weights import Weights


class GPerXAN(FedBN):
    """Two normalisations assembled, one of them personal."""

    traits = FedBN.traits.derive(
        name="gperxan",
        citation="Le et al., CVPR 2024",
        group="rivals",
        advice="For convolutional networks with BatchNorm at sites that differ in style; on vectors no gain "
        "(50.58 on SURF, where FedAvg has 51.06).",
        tasks=WITHOUT_MASKS,
        relative_cost=1.2,
        tests=MethodTests(
            where="normed images",
            options={"guide_weight": tries(0.0, 3.0)},
        ),
    )

    guide_weight: NonNegativeFloat = Field(0.5, description="β: weight of the common classifier's loss")

    def adapt_network(self, network: Network, sources: int) -> Network:
        return with_norms(network, AssembledNorm2d)

    def personal(self, weights: Weights) -> set[str]:
        return super().personal(weights) | {name for name in weights if name.endswith("score_batchnorm")}

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        guide = site.model(weights).classifier.eval().requires_grad_(False)

        def loss(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            own_loss = site.objective.loss(model.classifier(features), batch.targets)
            if self.guide_weight == 0:
                return own_loss
            return own_loss + self.guide_weight * site.objective.loss(guide(features), batch.targets)

        return loss
