"""Whole rounds of methods with a model of each site's own: common models and sites' own, by PFLlib's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from authors_numbers import Reference, compares
from tiny import federation, step_on
from torch import Tensor

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Statistics
from fedshift.federation.site import Batch, Site
from fedshift.federation.site_memory import SiteMemory
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL, Method
from fedshift.methods.composition.fine_tune import FineTune
from fedshift.methods.federated.apfl import APFL
from fedshift.methods.federated.per_fedavg import PerFedAvg
from fedshift.methods.rounds import finish_run
from fedshift.models import registry as models
from fedshift.weights import Weights

NETWORK: dict[str, object] = {"name": "mlp", "hidden": [4]}
BODY = {"features.weight": "features.hidden1.0.weight", "features.bias": "features.hidden1.0.bias"}
HEAD = {"classifier.weight": "classifier.weight", "classifier.bias": "classifier.bias"}
WHOLE = BODY | HEAD
SITES = ("site0", "site1", "site2")


def part(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Some tensors of a model, under the names of an entry."""
    return {name: weights[ours] for name, ours in names.items()}


class Played:
    """The rounds of an entry; every site begins with the entry's model."""

    def __init__(self, reference: Reference, method: Mapping[str, Any], **training: Any) -> None:
        found = [
            Domain(site, reference.tensors[f"x{k}"].float().numpy(), np.array(reference.inputs[f"labels{k}"]))
            for k, site in enumerate(SITES)
        ]
        parameters = reference.parameters
        self.method: Method = registry.parse({"local_epochs": parameters["local_epochs"], **method})
        options = {"lr": parameters["lr"], "momentum": 0.0, "batch_size": 64, **training}
        where = federation(self.method, found, NETWORK, rounds=3, budget=10_000, **options)
        assert isinstance(where, LocalFederation)
        start = Weights({ours: reference.tensors[name].float() for name, ours in WHOLE.items()})
        for runner in where._runners.values():
            runner.site.network.load_state_dict(dict(start))
        self.where, self.state = where, self.method.start(where, start)

    def rounds(self, number: int = 3) -> Iterator[Weights]:
        """The common model after each."""
        for _ in range(number):
            self.state = step_on(self.method, self.where, self.state)
            yield self.state.weights

    def finish(self) -> None:
        finish_run(self.method, self.where, self.state.weights)

    @property
    def memories(self) -> list[SiteMemory]:
        return [self.where._runners[site].site.memory for site in SITES]

    def own(self, names: Mapping[str, str]) -> list[dict[str, Tensor]]:
        """What predicts at each site."""
        return [part(self.where.own_weights(site, self.state.weights), names) for site in SITES]


@compares("federated", "fedper_1", "fedrep_1")
def test_bodies_and_classifiers(reference: Reference) -> None:
    named = {"name": reference.method.lower()}
    more = {"head_epochs": reference.parameters["plocal_epochs"]} if reference.method == "FedRep" else {}
    played = Played(reference, {**named, **more})
    bodies, classifiers = zip(*((part(model, BODY), played.own(HEAD)) for model in played.rounds()), strict=True)
    reference.agree("bodies", list(bodies))
    reference.agree("classifiers", list(classifiers))


@compares("federated", "fedbabu_1")
def test_a_fixed_classifier_and_fine_tuning_at_the_end(reference: Reference) -> None:
    epochs = reference.parameters["fine_tuning_epochs"]
    played = Played(reference, {"name": "fedbabu", "fine_tune": {"epochs": epochs}})
    reference.agree("bodies", [part(model, BODY) for model in played.rounds()])
    played.finish()
    reference.agree("tuned", played.own(WHOLE))


@compares("federated", "ditto_1")
def test_common_models_and_those_of_the_sites(reference: Reference) -> None:
    mu, epochs = reference.parameters["mu"], reference.parameters["plocal_epochs"]
    played = Played(reference, {"name": "ditto", "proximal_weight": mu, "personal_epochs": epochs})
    models, own = zip(*((part(model, WHOLE), played.own(WHOLE)) for model in played.rounds()), strict=True)
    reference.agree("models", list(models))
    reference.agree("own", list(own))


@compares("federated", "fedala_1")
def test_starts_between_the_common_model_and_a_sites_last(reference: Reference) -> None:
    options = {"shares_rate": reference.parameters["eta"], "mixed_tensors": reference.parameters["layer_idx"]}
    played = Played(reference, {"name": "fedala", "sampled": reference.parameters["rand_percent"] / 100, **options})
    reference.agree("models", [part(model, WHOLE) for model in played.rounds()])
    played.finish()
    reference.agree("own", played.own(WHOLE))
    reference.agree("shares", [part(memory.weights("shares"), HEAD) for memory in played.memories])


@compares("federated", "fedrod_1")
def test_a_balanced_classifier_and_one_beside_it(reference: Reference) -> None:
    played = Played(reference, {"name": "fedrod"})
    models, classifiers = [], []
    for model in played.rounds():
        models.append(part(model, WHOLE))
        classifiers.append([part(memory.weights(PERSONAL), HEAD) for memory in played.memories])
    reference.agree("models", models)
    reference.agree("classifiers", classifiers)


@compares("federated", "fedproto_1")
def test_prototypes_and_the_models_near_them(reference: Reference) -> None:
    options = {"prototype_weight": reference.parameters["lamda"], "weighting": "uniform", "smallest_class": 1}
    played = Played(reference, {"name": "fedproto", **options})
    prototypes, bodies, classifiers = [], [], []
    for _ in played.rounds():
        prototypes.append(cast(Statistics, played.state.parts["prototypes"])["mean"])
        bodies.append(played.own(BODY))
        classifiers.append([part(memory.weights("classifier"), HEAD) for memory in played.memories])
    reference.agree("prototypes", prototypes)
    reference.agree("bodies", bodies)
    reference.agree("classifiers", classifiers)


@compares("federated", "pfedme_1")
def test_models_near_the_common_one(reference: Reference) -> None:
    options = {
        "proximal_weight": reference.parameters["lamda"],
        "inner_steps": reference.parameters["K"],
        "inner_rate": reference.parameters["personal_learning_rate"],
    }
    decay = reference.parameters["weight_decay"]
    played = Played(reference, {"name": "pfedme", **options}, weight_decay=decay)
    models, own = zip(*((part(model, WHOLE), played.own(WHOLE)) for model in played.rounds()), strict=True)
    reference.agree("models", list(models))
    reference.agree("own", list(own))


@compares("federated", "perfedavg_1")
def test_common_models_that_are_judged_after_a_step(reference: Reference) -> None:
    alpha = {"fine_tune": {"steps": 1, "lr": reference.parameters["alpha"]}}
    passes = {"local_epochs": 2 * reference.parameters["local_epochs"]}
    played = Played(reference, {"name": "per_fedavg", **alpha, **passes})
    reference.agree("models", [part(model, WHOLE) for model in played.rounds()])


@compares("federated", "perfedavg_2")
def test_the_same_with_a_difference_of_gradients(reference: Reference) -> None:
    """In float64: the difference of two gradients a thousandth apart has too few digits in float32."""
    method = PerFedAvg(
        order="hessian_free",
        difference=reference.parameters["delta"],
        fine_tune=FineTune(steps=1, lr=reference.parameters["alpha"]),
    )
    network = models.build(models.parse(NETWORK), (3,), 3, 0).double()
    site = cast(Site, SimpleNamespace(objective=network.objective))
    common = {ours: reference.tensors[name] for name, ours in WHOLE.items()}
    played = []
    for _ in range(3):
        trained = []
        for k in range(3):
            labels = torch.tensor(reference.inputs[f"labels{k}"])
            batch = Batch(reference.tensors[f"x{k}"], labels, torch.zeros(6), torch.arange(6))
            network.load_state_dict(common)
            loss_after = method._loss_after(site, network)
            for _ in range(reference.parameters["local_epochs"]):
                network.zero_grad()
                loss_after((batch, batch, batch)).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for value in network.parameters():
                        assert value.grad is not None
                        value -= reference.parameters["lr"] * value.grad
            trained.append({name: value.clone() for name, value in network.state_dict().items()})
        common = {name: torch.stack([one[name] for one in trained]).mean(0) for name in common}
        played.append(part(common, WHOLE))
    reference.agree("models", played)


@compares("federated", "apfl_1")
def test_a_step_of_a_mixture(reference: Reference) -> None:
    """One step of a linear model, for which a mixture of weights is one of outputs."""
    method = APFL(share=reference.parameters["alpha"])
    rate = reference.parameters["lr"]
    labels = torch.tensor(reference.inputs["labels"])
    own, common = (models.build(models.parse({"name": "linear"}), (3,), 3, 0).double() for _ in range(2))
    for name, network in (("own", own), ("common", common)):
        network.load_state_dict({f"classifier.{key}": reference.tensors[f"{name}.{key}"] for key in ("weight", "bias")})
    share = torch.tensor(method.share, dtype=torch.float64)
    losses = []

    def noted(scores: Tensor, targets: Tensor) -> Tensor:
        losses.append(own.objective.loss(scores, targets))
        return losses[-1]

    site = cast(Site, SimpleNamespace(objective=SimpleNamespace(loss=noted), learning_rate=rate))
    method._loss_of_both(site, common, own, share)(
        Batch(reference.tensors["x"], labels, torch.zeros(6), torch.arange(6))
    ).backward()  # type: ignore[no-untyped-call]
    reference.agree("personal_loss", losses[0])
    reference.agree("alpha", share)
    stepped = {name.removeprefix("classifier."): value - rate * value.grad for name, value in own.named_parameters()}  # type: ignore[operator]
    reference.agree("own", stepped)
