"""FADA, which has no public code, against a derivation from the paper alone: `fada_by_hand`."""

from __future__ import annotations

import functools
import math
from typing import Any

import fada_by_hand as paper
import numpy as np
import pytest
import torch
from tiny import MLP, run
from torch import Tensor, nn

from fedshift.federation.messages import Features
from fedshift.functional.adversarial import domain_identifier_loss
from fedshift.functional.clustering import compactness
from fedshift.methods.federated import fada
from fedshift.methods.federated.fada import FADA, DomainIdentifiers, gain_weights, generator_loss, mutual_information
from fedshift.weights import Weights

RATE, STRENGTH = 0.3, 0.7
U, B = [0.7, -0.9], 0.2
WEIGHTS = {
    name: [[0.6 * math.cos(0.9 * i + 0.4 * j + k) for j in range(3)] for i in range(2)] for k, name in enumerate("abt")
}
SAMPLES = {
    name: [[0.5 * math.sin(0.37 * i + 0.71 * j + k) for j in range(3)] for i in range(3 + k)]
    for k, name in enumerate("abt")
}
FEATURES = {name: paper.features(WEIGHTS[name], SAMPLES[name]) for name in "abt"}


def test_the_derivatives_are_those_of_the_losses() -> None:
    """Of the derivation itself: central differences of its own losses."""

    def told(u: list[float], b: float, features: dict[str, Any]) -> tuple[list[float], list[float]]:
        return paper.certainties(u, b, features["a"]), paper.certainties(u, b, features["t"])

    by_u, by_b = paper.identifier_gradient(U, B, FEATURES["a"], FEATURES["t"])
    for place, expected in enumerate([*by_u, by_b]):
        ends = []
        for shift in (1e-6, -1e-6):
            u = [value + shift * (place == c) for c, value in enumerate(U)]
            ends.append(paper.identifier_loss(*told(u, B + shift * (place == 2), FEATURES)))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(expected, abs=1e-9)
    for name in "at":
        gradient = paper.generator_gradient(U, B, WEIGHTS[name], SAMPLES[name])
        for row, column in ((0, 0), (1, 2), (0, 1)):
            ends = []
            for shift in (1e-6, -1e-6):
                moved = [list(values) for values in WEIGHTS[name]]
                moved[row][column] += shift
                changed = {**FEATURES, name: paper.features(moved, SAMPLES[name])}
                ends.append(paper.generator_loss(*told(U, B, changed)))
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[row][column], abs=1e-9)


def logits(name: str) -> Tensor:
    return torch.tensor(FEATURES[name], dtype=torch.float64) @ torch.tensor(U, dtype=torch.float64) + B


def test_the_losses_of_both_sides() -> None:
    sides = [paper.certainties(U, B, FEATURES[name]) for name in "at"]
    assert domain_identifier_loss(logits("a"), logits("t")).item() == pytest.approx(paper.identifier_loss(*sides))
    assert generator_loss(logits("a"), logits("t")).item() == pytest.approx(paper.generator_loss(*sides))


def test_mutual_information_and_the_gap_statistic() -> None:
    joint, apart = [0.3, -1.2, 0.8], [0.1, 0.9, -0.4, 2.0]
    found = mutual_information(torch.tensor(joint), torch.tensor(apart)).item()
    assert found == pytest.approx(paper.mutual_information(joint, apart), abs=1e-6)
    clusters = [0, 2, 0, 2, 2]
    rows = torch.tensor(FEATURES["t"], dtype=torch.float64)
    assert compactness(rows, torch.tensor(clusters)) == pytest.approx(paper.scatter(FEATURES["t"], clusters))


def test_identifiers_step_and_then_turn_both_generators() -> None:
    """Each source has an identifier of its own; the target hears the sum of both."""
    identifiers = DomainIdentifiers(None, name="fada", seed=0, width=1, rate=RATE, weight=STRENGTH)
    for site in "ab":
        layer = nn.Linear(2, 1)
        layer.load_state_dict({"weight": torch.tensor([U]), "bias": torch.tensor([B])})
        identifiers._modules[site] = nn.Sequential(layer)
        identifiers._optimizers[site] = torch.optim.SGD(layer.parameters(), lr=RATE)
    sent = {name: Features({"features": torch.tensor(FEATURES[name])}) for name in "abt"}
    answered = identifiers.answer(sent, "t")
    at_target = np.zeros((2, 3))
    for site in "ab":
        by_u, by_b = paper.identifier_gradient(U, B, FEATURES[site], FEATURES["t"])
        u, b = [old - RATE * slope for old, slope in zip(U, by_u, strict=True)], B - RATE * by_b
        assert identifiers.weights()[site]["0.weight"][0].tolist() == pytest.approx(u, abs=1e-6)
        assert identifiers.weights()[site]["0.bias"].item() == pytest.approx(b, abs=1e-6)
        right = STRENGTH * np.array(paper.generator_gradient(u, b, WEIGHTS[site], SAMPLES[site]))
        found = answered[site]["features"].numpy().T @ np.array(SAMPLES[site])
        assert found == pytest.approx(right, abs=1e-6)
        at_target += STRENGTH * np.array(paper.generator_gradient(u, b, WEIGHTS["t"], SAMPLES["t"]))
    assert answered["t"]["features"].numpy().T @ np.array(SAMPLES["t"]) == pytest.approx(at_target, abs=1e-6)


def test_identifiers_go_on_from_the_round_before() -> None:
    layer = {"0.weight": torch.tensor([[0.5, -0.2]]), "0.bias": torch.tensor([0.1])}
    known = {"a": Weights({**layer, "2.weight": torch.tensor([[1.5]]), "2.bias": torch.tensor([-0.3])})}
    identifiers = DomainIdentifiers(known, name="fada", seed=0, width=1, rate=RATE, weight=STRENGTH)
    identifiers.answer({name: Features({"features": torch.tensor(FEATURES[name])}) for name in "at"}, "t")

    def certain(name: str) -> list[float]:
        hidden = [max(0.0, 0.5 * f[0] - 0.2 * f[1] + 0.1) for f in FEATURES[name]]
        return [paper.sigmoid(1.5 * value - 0.3) for value in hidden]

    assert identifiers.loss() == pytest.approx(paper.identifier_loss(certain("a"), certain("t")), abs=1e-6)


def test_attention_by_gains_and_the_aggregate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gains as the paper has them. The target has no update of its own where nothing is aligned."""
    seen: list[float] = []
    sent: dict[str, Weights] = {}

    def halves(features: Tensor, clusters: int, seed: int) -> float:
        rows = features.tolist()
        seen.append(paper.scatter(rows, [index % 2 for index in range(len(rows))]))
        return seen[-1]

    plain = FADA.aggregate

    @functools.wraps(plain)
    def watched(self: FADA, site: Any, gradients: Any, models: Any) -> Any:
        sent.update(models)
        return plain(self, site, gradients, models)

    monkeypatch.setattr(fada, "dispersion", halves)
    monkeypatch.setattr(FADA, "aggregate", watched)
    method = FADA(setting="every_step", variant="II", adversarial_weight=0.0, identifier_width=2)
    state, _ = run(method, network=MLP, rounds=1, momentum=0.0)
    before, *after = seen
    shares = paper.attention(before, after)
    assert list(state.report["aggregation_weights"].values()) == pytest.approx(shares, abs=1e-6)
    assert gain_weights([before - value for value in after]) == pytest.approx(shares, abs=1e-9)
    for name, value in state.weights.items():
        right = paper.aggregate(shares, [model[name].flatten().tolist() for model in sent.values()])
        assert value.flatten().tolist() == pytest.approx(right, abs=1e-6)
