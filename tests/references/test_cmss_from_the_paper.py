"""CMSS, which has no public code, against a derivation from the paper alone: `cmss_by_hand`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cmss_by_hand as paper
import pytest
import torch
from linear_pool import batch, linear, network, pool
from torch import Tensor, nn

from fedshift.federation.site import Site
from fedshift.methods.pooled import cmss
from fedshift.methods.pooled.cmss import CMSS, curriculum_weights, weighted_adversarial_loss
from fedshift.weights import Weights

pytestmark = pytest.mark.usefixtures("double")

RATE = 0.1
LABELS = [0, 2, 1, 1, 0]
SOURCES = [[0.5 * math.sin(0.37 * i + 0.71 * j + 0.2) for j in range(3)] for i in range(5)]
TARGET = [[0.5 * math.cos(0.53 * i + 0.29 * j + 0.4) + 0.1 for j in range(3)] for i in range(4)]
NETWORKS = paper.Networks(
    features=[[0.6 * math.cos(0.9 * i + 0.4 * j) for j in range(3)] for i in range(2)],
    classifier=[[0.5 * math.sin(0.8 * i + 1.1 * j + 0.3) for j in range(2)] for i in range(3)],
    domains=[0.7, -0.9],
    curriculum=[1.3, -0.8, 0.5],
)
AT_START = paper.losses(NETWORKS, SOURCES, LABELS, TARGET)


class Parts(nn.Module):
    """D and the curriculum network, each a linear layer."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.discriminator = linear(torch.tensor([NETWORKS.domains]))
        self.curriculum = linear(torch.tensor([NETWORKS.curriculum]))


def test_the_derivatives_are_those_of_the_losses() -> None:
    """Of the derivation itself: central differences of its own losses."""
    for name in ("features", "classifier", "domains", "curriculum"):
        gradient = getattr(AT_START.by_domain, name), getattr(AT_START.by_classification, name)
        value = getattr(NETWORKS, name)
        nested = isinstance(value[0], list)
        for place in range(len(value[0]) if nested else len(value)):
            ends = []
            for shift in (1e-6, -1e-6):
                row = list(value[0] if nested else value)
                row[place] += shift
                moved = replace(NETWORKS, **{name: [row, *value[1:]] if nested else row})
                ends.append(paper.losses(moved, SOURCES, LABELS, TARGET))
            rises = ends[0].domain - ends[1].domain, ends[0].classification - ends[1].classification
            expected = [(part[0] if nested else part)[place] for part in gradient]
            assert [rise / 2e-6 for rise in rises] == pytest.approx(expected, abs=1e-9), name


def test_the_weights_and_the_domain_loss() -> None:
    inputs, target = torch.tensor(SOURCES), torch.tensor(TARGET)
    scores = (inputs @ torch.tensor(NETWORKS.curriculum)).unsqueeze(1)
    weights = curriculum_weights(scores)
    domains = torch.tensor(NETWORKS.features).T @ torch.tensor(NETWORKS.domains).unsqueeze(1)
    loss = weighted_adversarial_loss(inputs @ domains, target @ domains, weights)
    assert weights.flatten().tolist() == pytest.approx(AT_START.weights, abs=1e-12)
    assert loss.item() == pytest.approx(AT_START.domain, abs=1e-12)
    # The same numbers of the derivation's first program, so that both cannot be changed together.
    assert AT_START.domain == pytest.approx(1.3084703534176558, abs=1e-12)
    assert AT_START.classification == pytest.approx(1.0936769016407355, abs=1e-12)


def stepped(method: CMSS, monkeypatch: pytest.MonkeyPatch) -> tuple[float, paper.Networks]:
    """The loss and all weights after a step of the method, of two mini-batches of sources and one of the target."""
    monkeypatch.setattr(cmss, "Parts", Parts)
    model = network(linear(torch.tensor(NETWORKS.features)), linear(torch.tensor(NETWORKS.classifier)), 2, 3)
    sources = (batch(torch.tensor(SOURCES[:2]), LABELS[:2]), batch(torch.tensor(SOURCES[2:]), LABELS[2:], domain=1))
    target = batch(torch.tensor(TARGET), None, domain=2)
    site, weights = pool(method, model, sources, RATE, parts=Parts())
    site.domain_batches = lambda steps, split: iter([(sources, target)])  # type: ignore[method-assign]
    update = method.fit(site, weights, 1)
    return update.loss, networks(update.weights, site)


def networks(weights: Weights, site: Site) -> paper.Networks:
    beside = site.memory.weights("parts")

    def numbers(tensor: Tensor) -> Any:
        return tensor.tolist()

    return paper.Networks(
        numbers(weights["features.weight"]),
        numbers(weights["classifier.weight"]),
        numbers(beside["discriminator.weight"][0]),
        numbers(beside["curriculum.weight"][0]),
    )


@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_a_step(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, after = stepped(CMSS(reversal=strength), monkeypatch)
    expected = paper.step(NETWORKS, AT_START, RATE, strength, of_domains=1.0)
    for name in ("features", "classifier"):
        for row, right in zip(getattr(after, name), getattr(expected, name), strict=True):
            assert row == pytest.approx(right, abs=1e-12), name
    assert after.domains == pytest.approx(expected.domains, abs=1e-12)
    assert after.curriculum == pytest.approx(expected.curriculum, abs=1e-12)
    assert loss == pytest.approx(AT_START.classification + AT_START.domain, abs=1e-12)


def test_where_the_paper_and_a_layer_that_turns_the_gradient_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the paper's one objective λ scales D's step, too. A layer that turns the gradient leaves D its whole step."""
    _, after = stepped(CMSS(reversal=0.3), monkeypatch)
    in_the_paper = paper.step(NETWORKS, AT_START, RATE, 0.3, of_domains=0.3)
    moved, there = (
        [new - old for new, old in zip(net.domains, NETWORKS.domains, strict=True)] for net in (after, in_the_paper)
    )
    assert [0.3 * move for move in moved] == pytest.approx(there, abs=1e-12)
