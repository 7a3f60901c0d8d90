"""Whole rounds of methods with a model of each site's own: common models and sites' own, by PFLlib's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from authors_numbers import Reference, compares
from tiny import federation, step_on
from torch import Tensor

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.rounds import finish_run
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
        self.where, self.state = where, State(start)

    def rounds(self, number: int = 3) -> Iterator[Weights]:
        """The common model after each."""
        for _ in range(number):
            self.state = step_on(self.method, self.where, self.state)
            yield self.state.weights

    def finish(self) -> None:
        finish_run(self.method, self.where, self.state.weights)

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
