"""MOON: a site's features stay near the common model's and away from those of its own last model.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021, Algorithm 1.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's; the model is larger by the projection head. A site's last model stays there.

    L = CE + μ · −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )        (3, 4)
z is what the projection head makes of a sample's features, under the model that trains, the common model and the site's
model of the round before. In a site's first round both are the common model, and the term is the constant μ ln 2.

Where papers and code differ, and what was chosen
 1. The head has two layers, as wide as the features and 256; the classifier reads its output (paper and code: model.py,
    `ModelFedCon`). ``projection: null`` leaves it out, as PFLlib does (system/flcore/clients/clientmoon.py,
    `clientMOON.train`).
 2. μ = 1, τ = 0.5 (the paper tunes μ among 0.1, 1, 5, 10).
 3. The common and the last model answer in evaluation mode, as in the code (QinbinLi/MOON, main.py,
    `local_train_net_fedcon` and the main loop).

Should reproduce: no published table of this setting is known to us; with μ = 0 it is FedAvg on the same network.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.heads import with_block
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class Moon(FedAvg):
    """FedAvg with a contrast between three models' features."""

    traits = FedAvg.traits.derive(
        name="moon",
        citation="Li et al., CVPR 2021",
        group="rivals",
        advice="For sites whose features drift apart. With its default weight −2.56 to FedAvg on SURF (p = 1.000) "
        "and −2.31 on PACS features (p = 0.759).",
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer", "previous"),
        relative_cost=1.7,
        tests=MethodTests(
            options={"contrastive_weight": tries(0.0, 5.0), "temperature": tries(0.1), "projection": tries(4)},
        ),
    )

    contrastive_weight: NonNegativeFloat = Field(1.0, description="μ")
    temperature: PositiveFloat = Field(0.5, description="τ")
    projection: PositiveInt | None = Field(
        256, description="width of the projection head's output; none: no head, z is the features (PFLlib)"
    )

    def adapt_network(self, network: Network, sources: int) -> Network:
        size = self.projection
        if size is None:
            return network

        def head(width: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))

        return with_block(network, head, size=size, classifier=nn.Linear)

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train, and remember the trained model for the next round."""
        update = super().fit(site, weights)
        site.memory["previous"] = update.weights
        return update

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        if self.contrastive_weight == 0:
            return super().loss_at(site, model, weights)
        last = site.memory.weights("previous") if "previous" in site.memory else weights
        common, previous = (site.model(item).eval().requires_grad_(False) for item in (weights, last))

        def loss(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            with torch.no_grad():
                references = common.features(batch.inputs), previous.features(batch.inputs)
            contrast = model_contrastive_loss(features, *references, self.temperature)
            return site.objective.loss(model.classifier(features), batch.targets) + self.contrastive_weight * contrast

        return loss


def model_contrastive_loss(features: Tensor, common: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """``−log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )``, the mean over samples.

    ``sim`` is the cosine. Source: MOON (Li, He, Song, CVPR 2021, equation 3).
    """
    near = F.cosine_similarity(features, common) / temperature
    far = F.cosine_similarity(features, previous) / temperature
    return F.softplus(far - near).mean()
