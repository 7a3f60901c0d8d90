"""Sites of odd sizes whose classes overlap, and a start that knows something: where KD3A is put to the test."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from tiny import MLP, NORMED, federation, run, step_on, vectors

from fedshift.data.domain import Domain
from fedshift.federation.federation import Federation
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A
from fedshift.weights import Weights

SITES = {"north": 41, "east": 19, "south": 9}
"""Not in the order of the alphabet, so that a mix-up of names and places shows."""
BUDGET = 20
RATE = 0.3
# Between them lie the confidences of the tiny teachers: some samples have three voters, some none.
GATES: dict[str, Any] = {"gate_start": 0.6, "gate_end": 0.9}
RELEASED: dict[str, Any] = {"setting": "released"}


def kd3a(**options: Any) -> KD3A:
    return KD3A(**{**GATES, **options})


def shifted(name: str, number: int) -> Domain:
    """Vectors whose classes overlap, elsewhere at each site; in the east every label is one too high."""
    plain, draws = vectors(name, number), np.random.default_rng(number)
    noise = 0.8 * draws.normal(size=(number, 5)) + 0.3 * draws.normal(size=5)
    labels = (plain.labels + (name == "east")) % 3
    return Domain(name, (np.asarray(plain.inputs) + noise).astype(np.float32), labels)


def around(
    method: KD3A,
    sites: Mapping[str, int] = SITES,
    network: Mapping[str, object] = NORMED,
    rounds: int = 2,
    **options: Any,
) -> Federation:
    """Shifted sources and a shifted target."""
    found = [*(shifted(name, number) for name, number in sites.items()), shifted("target", 14)]
    whole: dict[str, Any] = {"lr": RATE, "budget": BUDGET, "roles": {"target": "target"}, **options}
    return federation(method, found, network, rounds=rounds, **whole)


@functools.cache
def warm_start(batch_norm: bool = True) -> Weights:
    """A common start that knows something, so that what a source adds to it shows."""
    found = [shifted("north", 41), shifted("south", 9)]
    return run(FedAvg(), found, NORMED if batch_norm else MLP, rounds=6, lr=0.1, momentum=0.9)[0].weights


def rounds_of(method: KD3A, rounds: int = 2, batch_norm: bool = True, **options: Any) -> tuple[list[State], Federation]:
    """The states after each round from the warm start, and the federation."""
    where = around(method, network=NORMED if batch_norm else MLP, rounds=rounds, **options)
    states = [method.start(where, warm_start(batch_norm))]
    for _ in range(rounds):
        states.append(step_on(method, where, states[-1]))
    return states[1:], where
