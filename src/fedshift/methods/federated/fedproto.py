"""FedProto: sites share the mean features of each class, and no model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients. AAAI 2022,
Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets nothing: there is no common model.
Wire: no model. Up and down the prototypes, C·d numbers; up also how many samples of each class a site has. A prototype
is a mean of features over a site's samples of a class: with few samples it tells of each of them, and the numbers tell
which classes a site has. A class of fewer than ``smallest_class`` samples is left out, prototype and number.

    C_i^j = mean of f_i(x) over site i's samples of class j                                                    (3)
    C̄^j = Σ_i n_ij C_i^j / Σ_i n_ij                                              at the server                  (6)
    L_i = CE + λ·mean over samples and features of (f_i(x) − C̄^y)²              classes without C̄ add nothing  (7)
    ŷ = argmin_j ‖f_i(x) − C̄^j‖                                                  a site's prediction            (5)

Where paper and code differ, and what was chosen
 1. The distance in the loss is a mean square in the code (yuetan031/fedproto, lib/update.py, `update_weights_het`), a
    norm in the paper. λ = 1, the code's.
 2. The code's C̄ has equal shares of the sites that have the class (lib/utils.py, `proto_aggregation`), as in PFLlib:
    ``weighting: uniform``.
 3. The code gathers C_i^j while it trains (`update_weights_het`); here they are of the trained model in evaluation
    mode, as in the paper.
 4. The code (`update_weights_het`) and PFLlib (system/flcore/clients/clientproto.py, `clientProto.train`) send
    prototypes of single samples, ``smallest_class: 1``.
 5. ŷ is the class with the largest 2 f·C̄ − ‖C̄‖², a linear classifier, which a site's body predicts with.
 6. All sites have one architecture here, and begin with the same weights.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 90.6 and 90.8 (two seeds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Statistics
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.clustering import class_means
from fedshift.methods.base import PERSONAL, Method, State
from fedshift.methods.federated.fedper import HEAD
from fedshift.methods.federated.fedrod import check_linear
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class Prototypes(Reply):
    """The mean features of each class (C, d), of how many samples each is (C,), and the mean loss."""

    prototypes: Statistics
    counts: Statistics
    loss: float


class FedProto(Method):
    """A model at each site, drawn to the mean features of all sites' classes."""

    traits = Traits(
        name="fedproto",
        citation="Tan et al., AAAI 2022",
        group="personal",
        advice="For sites that take part and may share no model: the mean features of each class travel. It has no "
        "model for a new site.",
        sends="the mean features of each class, and how many samples it has; no model",
        keeps="its whole model",
        no_new_site=True,
        needs_classes="it compares features with those of classes",
        memory_names=("optimizer", PERSONAL, HEAD),
        tests=MethodTests(
            options={"prototype_weight": tries(0.0, 5.0, where="three rounds"), "smallest_class": tries(1, 4)},
        ),
    )

    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")
    prototype_weight: NonNegativeFloat = Field(1.0, description="λ: how strongly features are drawn to C̄")
    smallest_class: PositiveInt = Field(2, description="fewest samples of a class whose prototype leaves a site")
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="shares of sites in C̄: by their samples of the class (paper), or alike (code)"
    )

    def check(self, network: Network) -> None:
        check_linear(self.name, network)

    def bounds(self, call: str, about: About) -> Bounds:
        classes, width = about.classes, about.network.embedding_size
        return {
            "prototypes": Tensors({"mean": (classes, width)}),
            "counts": Tensors({"number": (classes,)}, low=0, high=about.samples),
        }

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def start(self, federation: Federation, weights: Weights) -> State:
        zero = torch.zeros_like(weights[f"{HEAD}.weight"])
        none = {"prototypes": Statistics({"mean": zero}), "counts": Statistics({"number": zero[:, 0].clone()})}
        return State(weights, parts=none)

    def round(self, federation: Federation, state: State) -> State:
        replies = federation.ask(self.fit, to=federation.sources, **state.parts)
        known = cast(Statistics, state.parts["prototypes"])["mean"], cast(Statistics, state.parts["counts"])["number"]
        means, weighed = (
            torch.zeros_like(known[0], dtype=torch.float64),
            torch.zeros_like(known[1], dtype=torch.float64),
        )
        losses: dict[str, float] = {}
        for site, reply in replies.items():
            losses[site], number = reply.loss, reply.counts["number"].double()
            weight = number if self.weighting == "samples" else (number > 0).double()
            means, weighed = means + weight[:, None] * reply.prototypes["mean"].double(), weighed + weight
        seen = weighed > 0
        mean = torch.where(seen[:, None], (means / weighed.clamp_min(1)[:, None]).to(known[0].dtype), known[0])
        number = torch.where(seen, weighed.to(known[1].dtype), known[1])
        classifier = nearest_mean_classifier(mean, number > 0)
        named = Weights({f"{HEAD}.{name}": value for name, value in zip(("weight", "bias"), classifier, strict=True)})
        return state.advance(
            state.weights.merge(named),
            parts={"prototypes": Statistics({"mean": mean}), "counts": Statistics({"number": number})},
            report={"losses": losses},
        )

    def fit(self, site: Site, prototypes: Statistics, counts: Statistics) -> Prototypes:
        """Train the site's model near the prototypes; send those of its classes."""
        known = site.memory.weights(PERSONAL).merge(site.memory.weights(HEAD)) if PERSONAL in site.memory else None
        model = site.model(known)
        loss = site.minimise(
            self._loss_near(site, model, prototypes["mean"].to(site.device), counts["number"].to(site.device) > 0),
            model,
            epochs=self.local_epochs,
            remember="optimizer",
        )
        trained = site.weights_of(model)
        site.memory[PERSONAL], site.memory[HEAD] = trained.without(HEAD), trained.select(HEAD)
        return Prototypes(*self._prototypes(site, model.eval()), loss)

    def _loss_near(self, site: Site, model: Network, means: Tensor, known: Tensor) -> Callable[[Batch], Tensor]:
        """The loss (7) of a mini-batch."""

        def loss(batch: Batch) -> Tensor:
            features: Tensor = model.features(batch.inputs)
            gaps = (features - means[batch.targets]) * known[batch.targets, None]
            plain = site.objective.loss(model.classifier(features), batch.targets)
            return plain + self.prototype_weight * gaps.square().mean()

        return loss

    def _prototypes(self, site: Site, model: Network) -> tuple[Statistics, Statistics]:
        """Prototypes and numbers of the classes of which there are enough samples."""
        with torch.no_grad():
            pairs = [(model.features(batch.inputs).cpu(), batch.targets.cpu()) for batch in site.all_batches()]
        features, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        means, _ = class_means(features, labels, site.classes)
        counts = torch.bincount(labels, minlength=site.classes).to(means.dtype)
        enough = counts >= self.smallest_class
        return (
            Statistics({"mean": torch.where(enough[:, None], means, 0.0)}),
            Statistics({"number": torch.where(enough, counts, 0.0)}),
        )


def nearest_mean_classifier(means: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """A linear classifier whose largest score is that of the nearest mean: ``2 m_j·z − ‖m_j‖²``.

    It is ``‖z‖² − ‖z − m_j‖²``, and ‖z‖² is the same for all classes.
    """
    return 2 * means * present[:, None], torch.where(present, -means.square().sum(1), -1e9)
