"""SiloBN, which has no public code, against a derivation from the paper alone: `silobn_by_hand`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import silobn_by_hand as paper
import torch
from lost import kept
from tiny import LINEAR, evaluated, federation, step_on
from torch import nn

from fedshift.data.domain import Domain
from fedshift.federation.federation import Federation
from fedshift.methods.base import State
from fedshift.methods.federated.fedbn import SiloBN
from fedshift.models.network import Network
from fedshift.weights import Weights

RATE, MOMENTUM, ROUNDS = 0.3, 0.1, 3
SAMPLES = [[1.5 * math.sin(1.3 * i + 0.9 * k) + 0.6 * k for i in range(4 + k)] for k in range(3)]
LABELS = [[(i + k * i) % 3 for i in range(4 + k)] for k in range(3)]
NEW = [0.4, -1.9, 2.7, 1.1]
START = paper.Shared(w=0.8, gamma=1.2, beta=-0.3, v=(0.5, -0.9, 0.7))
NAMES = {"w": "features.0.weight", "gamma": "features.1.weight", "beta": "features.1.bias", "v": "classifier.weight"}


class OnNumbers(SiloBN):
    """SiloBN on the derivation's network."""

    traits = SiloBN.traits.derive(name="on_numbers")

    def adapt_network(self, network: Network, sources: int) -> Network:
        features = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, momentum=MOMENTUM))
        whole = network.with_parts(features, nn.Linear(1, 3, bias=False), embedding_size=1)
        return super().adapt_network(whole, sources)


def domain(name: str, samples: list[float], labels: list[int]) -> Domain:
    return Domain(name, np.array(samples, np.float32)[:, None], np.array(labels))


FOUND = [domain(f"centre{k}", SAMPLES[k], LABELS[k]) for k in range(3)]


def weights_of(net: paper.Shared) -> Weights:
    shared = {name: torch.tensor(getattr(net, part)) for part, name in NAMES.items()}
    shapes = {"w": (1, 1), "gamma": (1,), "beta": (1,), "v": (3, 1)}
    first = {NAMES[part]: shared[NAMES[part]].float().reshape(shape) for part, shape in shapes.items()}
    running = {"mean": torch.zeros(1), "var": torch.ones(1)}
    kept_there = {f"features.1.running_{name}": value for name, value in running.items()}
    return Weights({**first, **kept_there, "features.1.num_batches_tracked": torch.tensor(0)})


def test_the_derivatives_are_those_of_the_loss() -> None:
    """Of the derivation itself: central differences of its own loss."""
    found = paper.gradient(START, SAMPLES[2], LABELS[2])
    for part in ("w", "gamma", "beta"):
        ends = [
            paper.loss(replace(START, **{part: getattr(START, part) + shift}), SAMPLES[2], LABELS[2])
            for shift in (1e-6, -1e-6)
        ]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(getattr(found, part), abs=1e-8), part
    for place in range(3):
        ends = []
        for shift in (1e-6, -1e-6):
            v = tuple(value + shift * (c == place) for c, value in enumerate(START.v))
            ends.append(paper.loss(replace(START, v=v), SAMPLES[2], LABELS[2]))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(found.v[place], abs=1e-8)


def by_hand() -> tuple[paper.Shared, list[paper.Statistics]]:
    """What the server has after all rounds, and what each centre keeps."""
    net, statistics = START, [paper.Statistics()] * 3
    for _ in range(ROUNDS):
        trained = [paper.train(net, statistics[k], SAMPLES[k], LABELS[k], RATE, MOMENTUM) for k in range(3)]
        statistics = [result for _, result in trained]
        net = paper.average([each for each, _ in trained], [len(samples) for samples in SAMPLES])
    return net, statistics


def played() -> tuple[Federation, State]:
    method = OnNumbers(local_epochs=1)
    where = federation(method, FOUND, LINEAR, rounds=ROUNDS, lr=RATE, momentum=0.0, batch_size=16)
    state = method.start(where, weights_of(START))
    where.settle()
    for _ in range(ROUNDS):
        state = step_on(method, where, state)
    return where, state


def answers(network: Network, samples: Sequence[float]) -> list[float]:
    """All logits, one after the other."""
    with torch.no_grad():
        found: list[float] = network(torch.tensor(samples)[:, None]).flatten().tolist()
    return found


def wanted(net: paper.Shared, samples: Sequence[float], statistics: paper.Statistics) -> list[float]:
    return [value for row in paper.outputs(net, samples, statistics) for value in row]


def test_rounds_and_the_statistics_that_stay_at_a_centre() -> None:
    (where, state), (net, statistics) = played(), by_hand()
    for part, name in NAMES.items():
        right = np.ravel(getattr(net, part)).tolist()
        assert state.weights[name].flatten().tolist() == pytest.approx(right, abs=1e-6), part
    for number, known in enumerate(statistics):
        own = kept(where, f"centre{number}", "normalisation")
        assert own["features.1.running_mean"].item() == pytest.approx(known.mean, abs=1e-6)
        assert own["features.1.running_var"].item() == pytest.approx(known.variance, abs=1e-6)
        assert not any(name in own for name in NAMES.values()), "scale and shift are averaged"
        method = OnNumbers(unseen="mean")
        predicts = evaluated(method, method.own_weights(state.weights, {"normalisation": own}), FOUND, LINEAR)
        assert answers(predicts, SAMPLES[number]) == pytest.approx(wanted(net, SAMPLES[number], known), abs=1e-5)


def test_a_centre_that_is_new_has_statistics_of_its_samples() -> None:
    (_, state), (net, _) = played(), by_hand()
    method = OnNumbers()
    answering = evaluated(method, state.weights, FOUND, LINEAR)
    at = paper.unseen(net, NEW)
    assert answers(answering, NEW) == pytest.approx(wanted(net, NEW, at), abs=1e-5)
    # All its samples at once: a running variance, which has n − 1 below.
    of_all = paper.Statistics(at.mean, at.variance * len(NEW) / (len(NEW) - 1))
    adapted = method.at_sites((1,)).new_site.adapt(answering, lambda: [torch.tensor(NEW)[:, None]])
    assert answers(adapted, NEW) == pytest.approx(wanted(net, NEW, of_all), abs=1e-5)
