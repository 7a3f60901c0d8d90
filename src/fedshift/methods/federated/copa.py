"""COPA: collaborative optimization and aggregation.

Wu, Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and Adaptation. ICCV 2021.

Setting: domain generalization; the target is never seen. With ``adaptation: true`` domain adaptation; a target without
labels takes part.
Wire: per round every site's feature extractor up and the mean down, 2·K·S(F); K classifiers up and K·(K − 1) down,
K·K·|C|, which the server need not read; N_k and the mean loss up. A target receives S(F) and K classifiers and returns
S(F) and three numbers.

F is common. The classifiers C_1 … C_K are not averaged: the server collects them, and every site receives the others'.
    site k: min over F, C_k of  CE(C_k(F(x)), y) + Σ_{j≠k} CE(C_j(F(x)), y),   C_j frozen
    F ← Σ_k α_k F_k,  α_k = N_k/ΣN
    prediction: the mean of all classifiers' softmax on F
Adaptation, at the target, from the mean of the sources' F with all classifiers frozen:
    ŷ = argmax of the mean softmax of C_1 … C_K on a weak view,  used if its probability ≥ 0.95
    min over F of −log of the mean softmax's ŷ on a strong view
    F ← Σ_k α_k F_k + α_T F_T,  α_T = N_T/(ΣN + N_T)

Where the paper and a re-implementation differ (no public code of the authors found, 2026-11-28; WenkeHuang/MarsFL,
Local/COPALocal.py, `COPALocal.train_net`, and Sever/COPADGSever.py, `COPADGSever.sever_update`). The defaults are the
paper's. ``setting: batch_norm`` keeps the network's BatchNorm as the re-implementation does, which suits pre-trained
weights.
 1. The paper's F has a hybrid of batch and instance normalisation, whose statistics are shared with the weights. Here
    it replaces every BatchNorm2d. Its gate is learned per channel and starts at batch normalisation. A network without
    BatchNorm2d does not change (``hybrid_normalisation``).
No setting changes these:
 2. Its server for adaptation (Sever/COPADASever.py, `COPADASever.sever_update`) computes the ensemble and never uses
    it. Here: the paper.
 3. Shares are by samples. The re-implementation also has equal shares: ``weighting: uniform``.
 4. The loss is a sum over classifiers. With equal classifiers it is K·CE, so updates grow with K: lower
    ``training.lr`` if many sites take part.
 5. ``training.augmentation`` makes the weak view, and ``strong`` makes the strong view from it. Vectors have no strong
    view.
 6. BatchNorm statistics of F are averaged like weights.
The model has all classifiers, so a model file predicts as the ensemble.

Should reproduce (as printed by CSAC): VLCS ResNet-18 71.50, 61.00, 93.83, 71.72, average 74.51.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.data.transforms import STRONG, NamedAugmentation, strong_view
from fedshift.errors import UserError
from fedshift.federation.exchange import Routed
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Count, PerSite, Reply, Share
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.averaging import MeanAccumulator
from fedshift.methods.base import Method, State
from fedshift.methods.heads import Experts, confident_pseudo_labels, unlabelled_ensemble_loss, with_experts
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.models.normalisation import BatchInstanceNorm2d, with_norms
from fedshift.weights import Weights

_HEADS = "classifier.heads"
_LARGEST = 100.0
"""The largest weight of a classifier, which goes to the other sites as it is. Those of golden runs are below 1."""


@dataclass(frozen=True)
class Part(Reply):
    """What a source sends: its feature extractor and its own classifier, N_k and the mean loss."""

    features: Weights
    classifier: Weights
    samples: Count
    loss: float


@dataclass(frozen=True)
class Adapted(Reply):
    """What the target sends: its feature extractor, N_T, the mean loss and the share of confident pseudo-labels."""

    features: Weights
    samples: Count
    loss: float
    confident: Share


class COPA(Method):
    """Features that suit every site's classifier. The prediction is the mean over all classifiers."""

    traits = Traits(
        name="copa",
        citation="Wu and Gong, ICCV 2021",
        group="unseen",
        advice="No gain shown: +0.99 over FedAvg on Rotated MNIST (p = 1.000). Each site's classifier reaches the "
        "others.",
        sends="a model; its classifier reaches the other sites",
        sites="unseen target, or one without labels",
        settings={"batch_norm": {"hybrid_normalisation": False}},
        small={"local_epochs": 2},
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer", "classifier"),
        averages={"fit": Averaged(("features",))},
        routed={
            "fit": Routed("classifier", to={"fit": "others", "adapt": "classifiers"}, readers="all", in_model=True)
        },
        reads_sealed="feature extractors",
        relative_cost=1.1,
        tests=MethodTests(
            beside={"local_epochs": 2},
            options={
                "local_epochs": tries(1, 3),
                "hybrid_normalisation": tries(False, where="normed images"),
                "adaptation": tries(True, threshold=0.2),
                "threshold": tries(0.2, adaptation=True),
                "strong": tries({"brightness": 0.1}, adaptation=True, threshold=0.2),
            },
            rates=(0.01, 0.005),
        ),
    )

    local_epochs: PositiveInt = Field(10, description="E: passes over a site's data per round")
    steps_per_round: PositiveInt | None = Field(None, description="mini-batches per round instead of whole epochs")
    weighting: Literal["samples", "uniform"] = Field("samples", description="α_k: N_k/ΣN, or 1/K")
    hybrid_normalisation: bool = Field(True, description="replace every BatchNorm2d by batch-instance normalisation")
    adaptation: bool = Field(False, description="a target without labels takes part (protocol adapt_to_one)")
    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.95, description="least probability of a pseudo-label (adaptation)"
    )
    strong: NamedAugmentation = Field(
        STRONG, description="strong view of images: a preset's name or its parts (adaptation)"
    )

    def adjust_traits(self, traits: Traits) -> Traits:
        """A target without labels takes part in ``adaptation``."""
        return replace(traits, target="unlabelled" if self.adaptation else "unseen")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * (self.steps_per_round or self.local_epochs * batches_per_epoch)

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds) if self.adaptation else 0

    def check(self, network: Network) -> None:
        if self.adaptation and network.objective.task != "classification":
            raise UserError(
                "copa: adaptation trains on the classes that the ensemble predicts at the target, and the data are for "
                f"{network.objective.task}: leave adaptation out"
            )

    def adapt_network(self, network: Network, sources: int) -> Network:
        return with_experts(with_norms(network, BatchInstanceNorm2d) if self.hybrid_normalisation else network, sources)

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "fit":
            return {}
        head_weights = cast(Experts, about.network.classifier).heads[0].state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in head_weights.items()}
        return {"classifier": Tensors(shapes, low=-_LARGEST, high=_LARGEST)}

    def personal(self, weights: Weights) -> Collection[str]:
        return weights.select("classifier")

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        names = sorted(federation.sources)
        features = state.weights.select("features")
        known = dict(zip(names, _classifiers(state.weights), strict=True))
        lent = {site: {other: known[other] for other in names if other != site} for site in names}
        parts = federation.ask(self.fit, to=federation.sources, features=features, others=PerSite(lent))
        mean, classifiers, shares = MeanAccumulator(), {}, {}
        for site, part in parts.items():
            shares[site] = self._share(part.samples)
            mean.add(part.features, shares[site], f"site '{site}'")
            classifiers[site] = part.classifier
        classifiers = {site: classifiers.get(site, known[site]) for site in names}  # a missing site's is unchanged
        losses = parts.numbers("loss")
        report: dict[str, Any] = {}
        for target in federation.targets if self.adaptation else ():
            reply = federation.ask(self.adapt, to=(target,), features=mean.result(), classifiers=classifiers).only()
            shares[target], losses[target] = self._share(reply.samples), reply.loss
            mean.add(reply.features, shares[target], f"target '{target}'")
            report = {"confident": reply.confident}
        total = sum(shares.values())
        report |= {"losses": losses, "aggregation_weights": {site: share / total for site, share in shares.items()}}
        return state.advance(_whole(mean.result(), classifiers), report=report)

    def _share(self, samples: int) -> float:
        return float(samples) if self.weighting == "samples" else 1.0

    # Source -------------------------------------------------------------------------------------------------------

    def fit(self, site: Site, features: Weights, others: Mapping[str, Weights]) -> Part:
        """Train features and the site's own classifier at a source. The others' classifiers are frozen."""
        model = site.model()
        heads = cast(Experts, model.classifier).heads
        position = sorted([*others, site.name]).index(site.name)
        # In its first round a site uses its classifier of the common start.
        kept = site.memory.weights("classifier") if "classifier" in site.memory else heads[position].state_dict()
        classifiers = {**others, site.name: Weights(kept)}
        model.load_state_dict(dict(_whole(features, classifiers)))
        for number, head in enumerate(heads):
            head.requires_grad_(number == position)

        def loss_of(batch: Batch) -> Tensor:
            features = model.features(batch.inputs)
            return torch.stack([site.objective.loss(head(features), batch.targets) for head in heads]).sum()

        loss = self._train(site, model, loss_of)
        site.memory["classifier"] = site.weights_of(heads[position])
        trained = site.weights_of(model).select("features")
        return Part(trained, site.memory.weights("classifier"), site.samples, loss)

    # Target -------------------------------------------------------------------------------------------------------

    def adapt(self, site: Site, features: Weights, classifiers: Mapping[str, Weights]) -> Adapted:
        """Train features at the target: the ensemble's prediction for a weak view is the label of the strong view."""
        model = site.model(_whole(features, classifiers))
        experts = cast(Experts, model.classifier).requires_grad_(False)
        draws = site.generator_for("strong view")
        sure: list[Tensor] = []

        def loss_of(batch: Batch) -> Tensor:
            with torch.no_grad():
                answer = experts(model.features(batch.inputs)).exp()
                labels, mask = confident_pseudo_labels(answer[None], self.threshold)
            sure.append(mask)
            view = strong_view(batch.inputs, self.strong, site.data.preprocessing, draws)
            return unlabelled_ensemble_loss(experts.probabilities(model.features(view)), labels, mask)

        loss = self._train(site, model, loss_of)
        confident = float(torch.cat(sure).float().mean()) if sure else 0.0
        return Adapted(site.weights_of(model).select("features"), site.samples, loss, confident)

    def _train(self, site: Site, model: Network, loss_of: Callable[[Batch], Tensor]) -> float:
        return site.minimise(loss_of, model, epochs=self.local_epochs, steps=self.steps_per_round, remember="optimizer")


def _classifiers(weights: Weights) -> Iterator[Weights]:
    """The classifiers of a whole model, in order. Their tensors are named as in the classifier itself."""
    number = 0
    while part := weights.select(f"{_HEADS}.{number}"):
        yield Weights({name.removeprefix(f"{_HEADS}.{number}."): tensor for name, tensor in part.items()})
        number += 1


def _whole(features: Weights, classifiers: Mapping[str, Weights]) -> Weights:
    """The whole model: features and all classifiers in the order of their sites' names."""
    return features.merge(
        {
            f"{_HEADS}.{number}.{name}": tensor
            for number, site in enumerate(sorted(classifiers))
            for name, tensor in classifiers[site].items()
        }
    )
