"""Base of MCGDM and MCSAD: FedAvg whose sites also have the classifiers that all sites had after the round before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor
from torch.func import functional_call

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.robust import Averaged
from fedshift.models.network import Network
from fedshift.weights import Weights

_OF_CLASSIFIER = "classifier."
_COMMON = "common"

Head = Mapping[str, Tensor]
"""The tensors of a classifier, named as in the classifier itself."""


class LentHeads(FedAvg):
    """A subclass says what the loss of a mini-batch is beside these classifiers."""

    traits = FedAvg.traits.derive(
        sends="a model; its classifier reaches the other sites",
        tasks=("classification",),
        averages={"fit_beside": Averaged(rules="each")},
        server_reads="models",
        own_gradients=True,
    )

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        known = cast(Mapping[str, Weights], state.parts)
        lent = known or {_COMMON: state.weights.select("classifier")}  # at first all are the common one
        updates = federation.ask(self.fit_beside, to=federation.sources, weights=state.weights, heads=dict(lent)).keep()
        trained = {site: update.weights.select("classifier") for site, update in updates.items()}
        weights, shares, losses = trained_mean(updates, by=self.weighting)
        heads = {**known, **trained}  # a missing site's is that of the last round in which it was there
        return state.advance(weights, parts=heads, report={"losses": losses, "aggregation_weights": shares})

    # Source -------------------------------------------------------------------------------------------------------

    def fit_beside(self, site: Site, weights: Weights, heads: Mapping[str, Weights]) -> Update:
        """Train from the common model beside the classifiers of all sites."""
        model = site.model(weights)
        others: list[Head] = [
            {name.removeprefix(_OF_CLASSIFIER): tensor.to(site.device) for name, tensor in heads[owner].items()}
            for owner in sorted(heads)
        ]
        return self._train_with(site, self.loss_beside(site, model, others), model)

    @abstractmethod
    def loss_beside(self, site: Site, model: Network, heads: list[Head]) -> Callable[[Batch], Tensor]:
        """The loss of a mini-batch."""


def scores_of(model: Network, head: Head, features: Tensor) -> Tensor:
    """What the network's classifier gives with the tensors of another, (n, C)."""
    return cast(Tensor, functional_call(model.classifier, dict(head), (features,)))
