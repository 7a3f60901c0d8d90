"""Whole rounds of federated methods on a linear network with full batches: the models of the authors' own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from authors_numbers import Reference, references
from tiny import LINEAR, federation, step_on

from fedshift.data.domain import Domain
from fedshift.methods import registry
from fedshift.weights import Weights

REFERENCES = references("federated")
AS_RELEASED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "feddyn_4": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "feddyn_5": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "scaffold_3": ({"name": "scaffold"}, {}),
    "fediir_4": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_5": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_6": ({"name": "fediir", "ema": 0.0, "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fedomg_6": ({"name": "fedomg", "setting": "released"}, {}),
    "feddg-ga_4": ({"name": "feddg_ga", "setting": "released", "local_epochs": 1}, {}),
    "fedsam_2": ({"name": "fedsam"}, {}),
    "fedasam_2": ({"name": "fedsam", "setting": "asam_released"}, {}),
    "fedprox_2": ({"name": "fedprox", "proximal_weight": 0.3}, {}),
    "fednova_6": ({"name": "fednova", "local_epochs": 1}, {"batch_size": 4}),
    "fednova_7": ({"name": "fednova", "local_epochs": 1}, {"batch_size": 4, "momentum": 0.9}),
    "fednova_8": (
        {"name": "fednova", "local_epochs": 1, "proximal_weight": 0.5, "effective_steps": "steps"},
        {"batch_size": 4},
    ),
}
"""The method and the training that an entry's parameters mean."""


def start_of(reference: Reference) -> Weights:
    """The common model before the first round."""
    parts = {f"classifier.{name}": reference.tensors[name].float() for name in ("weight", "bias")}
    return Weights(parts)


def sites_of(reference: Reference) -> list[Domain]:
    """The sites: of FedNova with as many equal samples as make its batches, else with the samples of the entry."""
    if reference.method == "FedNova":
        labels = reference.inputs["label of site 0, 1, 2"]
        return [
            Domain(f"site{k}", reference.tensors[f"the sample of site {k}"].float().expand(n, 3).numpy(), np.full(n, y))
            for k, (n, y) in enumerate(zip(reference.parameters["samples"], labels, strict=True))
        ]
    return [
        Domain(f"site{k}", reference.tensors[f"x{k}"].float().numpy(), np.array(reference.inputs[f"labels{k}"]))
        for k in range(3)
    ]


def models_of(reference: Reference, method: Mapping[str, Any], training: Mapping[str, Any]) -> list[Weights]:
    """The common model after each round."""
    found, rounds = sites_of(reference), len(reference.outputs["models"])
    made = registry.parse({"local_epochs": 2, **method})
    options = {"lr": reference.parameters["lr"], "momentum": 0.0, "batch_size": 64, **training}
    where = federation(made, found, LINEAR, rounds=rounds, **options)
    state = made.start(where, start_of(reference))
    where.settle()
    models = []
    for _ in range(rounds):
        state = step_on(made, where, state)
        models.append(state.weights)
    return models


@pytest.mark.parametrize("entry", AS_RELEASED)
def test_the_models_are_those_of_the_authors_code(entry: str) -> None:
    reference = REFERENCES[entry]
    method, training = AS_RELEASED[entry]
    for number, model in enumerate(models_of(reference, method, training)):
        for name in ("weight", "bias"):
            theirs = np.array(reference.outputs["models"][number][name])
            gap = np.abs(model[f"classifier.{name}"].double().numpy() - theirs).max()
            assert gap <= reference.tolerance, f"{entry}: {name} after round {number + 1} is {gap:.2g} away"
