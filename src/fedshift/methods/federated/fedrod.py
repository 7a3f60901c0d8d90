"""FedROD: a common classifier that treats classes alike, and at each site a second one for its own labels.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common model.
Wire: FedAvg's. The second classifier and how many samples of each class a site has stay there.

With z = f(x; θ), a common classifier ψ and the site's own φ_i:
    θ, ψ:   −log( n_y^γ e^{ψ_y(z)} / Σ_c n_c^γ e^{ψ_c(z)} )       balanced softmax, n_c the site's samples of class c
    φ_i:    CE( ψ(z) + φ_i(z), y )                                 z and ψ(z) constant; empirical risk
    θ, ψ averaged (FedAvg)                                         a site predicts with ψ(z) + φ_i(z)

Where papers and code differ, and what was chosen
 1. No code of the authors is known to us. γ = 1, as in the paper and in PFLlib (TsingZ0/PFLlib,
    system/flcore/clients/clientrod.py, `clientROD.train`).
 2. φ_i is a linear classifier; the paper's other one, which a network makes of the class sizes, is not written.
 3. φ_i begins as a copy of ψ, as in PFLlib (`clientROD.__init__`).
 4. The sum of two linear classifiers is one. With it a site predicts, and with it ``fine_tune`` begins.
 5. A class without a sample has n_c = 0 and leaves the sum.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 92.5 and 92.1 (two seeds).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.federation.messages import Content, Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedavg import FedAvg, Finished
from fedshift.methods.federated.fedper import HEAD
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedROD(FedAvg):
    """FedAvg on a balanced loss, and a second classifier at each site."""

    traits = FedAvg.traits.derive(
        name="fedrod",
        citation="Chen & Chao, ICLR 2022",
        group="personal",
        advice="For sites whose classes differ: a common model for new sites, and at each site one that knows its "
        "classes, at hardly more than FedAvg's cost.",
        tasks=("classification",),
        needs_classes="its loss is balanced by the numbers of classes",
        keeps="a second classifier",
        memory_names=("optimizer", PERSONAL),
        tests=MethodTests(options={"balance": tries(0.0, 0.5)}),
    )

    balance: NonNegativeFloat = Field(1.0, description="γ: how far the common classifier is balanced; 0: not at all")

    def check(self, network: Network) -> None:
        check_linear(self.name, network)

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights:
        added = memory.get(PERSONAL)
        return _plus(weights, added, 1.0) if isinstance(added, Weights) else weights

    def tune(self, site: Site, weights: Weights) -> Finished:
        finished = super().tune(site, weights)
        site.memory[PERSONAL] = _plus(site.memory.weights(PERSONAL), weights, -1.0)
        return finished

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common model on the balanced loss, and beside it the site's own classifier."""
        model = site.model(weights)
        personal = copy.deepcopy(model.classifier)
        if PERSONAL in site.memory:
            kept = site.memory.weights(PERSONAL)
            personal.load_state_dict({name.removeprefix(f"{HEAD}."): value for name, value in kept.items()})
        update = self._train_with(site, self._loss_of_both(site, model, personal), model, personal)
        site.memory[PERSONAL] = Weights({f"{HEAD}.{name}": value for name, value in site.weights_of(personal).items()})
        return update

    def _loss_of_both(self, site: Site, model: Network, personal_head: nn.Module) -> Callable[[Batch], Tensor]:
        """The balanced loss, and with the same steps the plain one as a function of the site's own classifier."""
        counts = torch.bincount(site.data.labels, minlength=site.classes)

        def loss(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            scores = model.classifier(features)
            balanced = site.objective.loss(balanced_scores(scores, counts, self.balance), batch.targets)
            personal = site.objective.loss(scores.detach() + personal_head(features.detach()), batch.targets)
            return balanced + (personal - personal.detach())

        return loss


def check_linear(name: str, network: Network) -> None:
    """Check that the classifier is linear in the features. Raises UserError: it is not."""
    if not isinstance(network.classifier, nn.Linear):
        raise UserError(f"{name} needs a network whose classifier is one linear layer: without adapters")


def _plus(weights: Weights, added: Weights, factor: float) -> Weights:
    """``weights + factor · added`` in those tensors that both have."""
    return Weights({name: value + factor * added[name] if name in added else value for name, value in weights.items()})


def balanced_scores(scores: Tensor, counts: Tensor, strength: float = 1.0) -> Tensor:
    """``f_c + γ·log n_c``: cross-entropy of these is the balanced softmax loss, in which classes count alike.

    Sources: Ren et al. (NeurIPS 2020); FedROD (Chen and Chao, ICLR 2022).
    """
    return scores if strength == 0 else scores + strength * counts.to(scores.dtype).log()
