"""Whole rounds of federated methods on a linear network with full batches: the models of the authors' own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from authors_numbers import Reference, compares
from tiny import LINEAR, federation, step_on
from torch import Tensor

from fedshift.data.domain import Domain
from fedshift.methods import registry
from fedshift.methods.base import State
from fedshift.weights import Weights

AS_RELEASED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "feddyn_4": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "feddyn_5": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "scaffold_3": ({"name": "scaffold"}, {}),
    "fediir_4": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_5": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_6": ({"name": "fediir", "ema": 0.0, "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fedomg_6": ({"name": "fedomg", "setting": "released"}, {}),
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


def states_of(reference: Reference, method: Mapping[str, Any], training: Mapping[str, Any]) -> list[State]:
    """What the server knows after each round."""
    found, rounds = sites_of(reference), len(reference.outputs["models"])
    made = registry.parse({"local_epochs": 2, **method})
    options = {"lr": reference.parameters["lr"], "momentum": 0.0, "batch_size": 64, **training}
    where = federation(made, found, LINEAR, rounds=rounds, **options)
    state = made.start(where, start_of(reference))
    where.settle()
    states = []
    for _ in range(rounds):
        state = step_on(made, where, state)
        states.append(state)
    return states


def numbers_of(states: list[State]) -> list[dict[str, Tensor]]:
    """The common models, as they stand in an entry."""
    return [{name: state.weights[f"classifier.{name}"] for name in ("weight", "bias")} for state in states]


@compares("federated", *AS_RELEASED)
def test_the_models_are_those_of_the_authors_code(reference: Reference) -> None:
    reference.agree("models", numbers_of(states_of(reference, *AS_RELEASED[reference.id])))


@compares("federated", "feddg-ga_4")
def test_generalization_adjustment_s_models_and_weights(reference: Reference) -> None:
    released = {"name": "feddg_ga", "setting": "released", "local_epochs": 1}
    states = states_of(reference, released, {})
    reference.agree("models", numbers_of(states))
    used = [list(state.report["aggregation_weights"].values()) for state in states]
    reference.agree("weights_used_in_round", used)
    earlier = states_of(reference, {**released, "late_step": False}, {})
    reference.agree("models_of_the_code_with_fedshifts_steps", numbers_of(earlier))
