"""FedRep: first the site's own classifier on the common body, then the body below that classifier.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning. ICML
2021, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets nothing, as with FedPer.
Wire: FedPer's: the body both ways. The classifier never leaves.

    h_i ← τ epochs of the loss at (φ, h), φ fixed, from h_i       (classifier)
    φ_i ← E epochs of the loss at (φ, h_i), h_i fixed, from φ     (body)
    φ ← the mean of φ_i

Where paper and code differ, and what was chosen
 1. τ is 10, as in the paper's experiments; PFLlib (TsingZ0/PFLlib, system/flcore/clients/clientrep.py, `clientRep`) has
    one: ``head_epochs: 1``.
 2. The paper's mean has equal shares, which is ``weighting: uniform``; PFLlib (system/flcore/servers/serverbase.py,
    `Server.receive_models`) weights by samples, as here.
 3. Classifier and body have an optimiser each. Their momentum begins anew in each round.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 92.0 and 91.0 (two seeds, one epoch each).
"""

from __future__ import annotations

from pydantic import Field, PositiveInt
from torch import nn

from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedper import FedPer
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedRep(FedPer):
    """FedPer whose classifier and body take turns."""

    traits = FedPer.traits.derive(
        name="fedrep",
        citation="Collins et al., ICML 2021",
        group="personal",
        advice="As fedper, with more passes over the classifier alone.",
        sends="a model without its classifier",
        keeps="its classifier",
        no_new_site=True,
        memory_names=(PERSONAL,),
        small={"head_epochs": 2},
        tests=MethodTests(options={"head_epochs": tries(1, 3)}),
    )

    head_epochs: PositiveInt = Field(10, description="τ: passes that train the classifier alone, before the body")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return super().mini_batches(batches_per_epoch, rounds) + rounds * self.head_epochs * batches_per_epoch

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the site's own classifier, then the body."""
        model = site.model(self._whole(site, weights))
        self._train(site, model, model.classifier, self.head_epochs, None)
        loss = self._train(site, model, model.features, self.local_epochs, self.steps_per_round)
        return self._without_head(site, Update(site.weights_of(model), site.samples, loss))

    def _train(self, site: Site, model: Network, part: nn.Module, epochs: int, steps: int | None) -> float:
        """Train one part of the model; the mean loss."""
        model.requires_grad_(False)
        part.requires_grad_(True)
        loss_of = self.loss_at(site, model, Weights({}))
        return site.minimise(loss_of, model, epochs=epochs, steps=steps, optimizers=[site.optimizer(part)])
