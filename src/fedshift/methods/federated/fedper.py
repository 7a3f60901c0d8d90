"""FedPer: the classifier is each site's own, all below it is averaged.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. arXiv 1912.00818, 2019,
Algorithms 1 and 2.

Setting: the sites that take part; each has labels of its own kind. A new site gets nothing: the common body alone does
not predict, and the classifier beside it is that of the common start.
Wire: FedAvg's without the classifier, both ways, 2·K·S(body). The classifier never leaves.

    θ_i, h_i ← E local epochs of the loss from (θ, h_i)    body θ and classifier h_i are trained together
    θ ← Σ_i (N_i / ΣN)·θ_i                                 h_i stays at site i and predicts there

Where papers and code differ, and what was chosen
 1. The paper tries heads of one to four blocks; here it is the network's classifier, as in PFLlib (TsingZ0/PFLlib,
    system/flcore/clients/clientper.py, `clientPer`).
 2. All sites begin with the same classifier, as in PFLlib (system/flcore/servers/serverper.py, `FedPer`); the paper
    leaves it open.
 3. A site predicts with the body of the last mean and the classifier of its last training, as PFLlib measures it
    (`clientPer.set_parameters`).

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 91.6 and 92.0 (two seeds); FedAvg has 87.2
and 87.1 there.
"""

from __future__ import annotations

from dataclasses import replace

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.base import PERSONAL, State
from fedshift.methods.federated.fedavg import FedAvg, Finished
from fedshift.models.network import Network
from fedshift.weights import Weights

HEAD = "classifier"
"""The part of a network that is each site's own; the rest is the body."""


class FedPer(FedAvg):
    """FedAvg of the body; each site has a classifier of its own."""

    traits = FedAvg.traits.derive(
        name="fedper",
        citation="Arivazhagan et al., 2019",
        group="personal",
        advice="For sites that take part and whose labels differ: the classifier is each site's own. It has no model "
        "for a new site.",
        sends="a model without its classifier",
        keeps="its classifier",
        no_new_site=True,
        memory_names=("optimizer", PERSONAL),
    )

    def check(self, network: Network) -> None:
        if not list(network.features.parameters()):
            raise UserError(f"{self.name} averages what is below the classifier: choose a network with layers there")

    def personal(self, weights: Weights) -> set[str]:
        return set(weights.select(HEAD))

    def round(self, federation: Federation, state: State) -> State:
        mean = super().round(federation, replace(state, weights=state.weights.without(HEAD)))
        return replace(mean, weights=state.weights.merge(mean.weights))

    def personalise(self, federation: Federation, weights: Weights) -> None:
        super().personalise(federation, weights.without(HEAD))

    def tune(self, site: Site, weights: Weights) -> Finished:
        return super().tune(site, site.weights_of(site.network).merge(weights))

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common body and the site's own classifier."""
        return self._without_head(site, super().fit(site, self._whole(site, weights)))

    def _whole(self, site: Site, body: Weights) -> Weights:
        """The common body with the site's own classifier, at first that of the common start."""
        return self.own_weights(site.weights_of(site.network).merge(body), site.memory)

    def _without_head(self, site: Site, update: Update) -> Update:
        """What leaves the site of a trained model. The classifier is kept."""
        site.memory[PERSONAL] = update.weights.select(HEAD)
        return replace(update, weights=update.weights.without(HEAD))
