"""What an evaluator says of a model, by counting by hand: which rows, in which mode, by whose answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.data.site_data import SiteData
from fedshift.experiment.protocols.base import Split
from fedshift.experiment.runs.evaluator import Evaluator, predictions
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.weights import Weights


class Backwards(Network):
    """Answers with the class that a network thinks the least of."""

    def forward(self, inputs: Tensor) -> Tensor:
        return -super().forward(inputs)


class OneEach(Network):
    """At every source another column of the inputs decides."""

    def at(self, source: int) -> Network:
        return linear(torch.eye(3).roll(source, 0))


def linear(weight: Tensor, kind: type[Network] = Network) -> Network:
    plain = models.build(models.parse({"name": "linear"}), (3,), 3, 0)
    made = kind(plain.features, plain.classifier, embedding_size=3, classes=3, stages=plain.stages, alignment_stages=())
    made.load_state_dict({"classifier.weight": weight, "classifier.bias": torch.zeros(3)})
    return made


def shown(name: str, says: list[int], labels: list[int]) -> Domain:
    """Samples of which the identity says ``says``."""
    return Domain(name, np.eye(3, dtype=np.float32)[says], np.array(labels))


DATA = {
    "t": shown("t", [0, 1, 2, 2, 0], [0, 1, 2, 1, 1]),  # rows 1 … 4 are measured: 2 of 4
    "a": shown("a", [0, 0, 1, 1], [0, 1, 1, 1]),  # trains on 0, 2: held out 1, 3, of which 1 is right
    "b": shown("b", [2, 2, 2], [2, 0, 0]),  # trains on 0: held out 1, 2, of which none is right
    "c": shown("c", [0], [0]),  # holds nothing out
}
SPLIT = Split(
    {"a": np.array([0, 2]), "b": np.array([0]), "c": np.array([0])},
    {"a": np.array([1, 3]), "b": np.array([1, 2]), "c": np.array([], dtype=np.int64)},
    {"t": np.arange(1, 5)},
)


def measured(network: Network | None = None, split: Split = SPLIT) -> dict[str, Any]:
    whole = DataSet("x", DATA, ("x", "y", "z"), Preprocessing(kind="features"), Manifest(*[""] * 5))
    evaluator = Evaluator(whole, split, torch.device("cpu"), models.parse({"name": "linear"}))
    network = network or linear(torch.zeros(3, 3))
    weights = Weights({"classifier.weight": torch.eye(3), "classifier.bias": torch.zeros(3)})
    return evaluator.measure(network, weights)


def test_measures_by_hand() -> None:
    found = measured()
    assert found["target_accuracy"] == {"t": 50.0}
    assert found["source_accuracy"] == {"a": 50.0, "b": 0.0}
    # Of class y three are measured, one is right; of z one and it is right; x is not there.
    assert found["per_class"] == [None, pytest.approx(100 / 3), 100.0]
    split = Split({"c": np.array([0])}, {}, {"t": np.arange(5), "a": np.arange(4)})
    found = measured(split=split)
    assert found["target_accuracy"] == {"t": 60.0, "a": 75.0}
    # x: 1 of 1 and 1 of 1; y: 1 of 3 and 2 of 3; z: 1 of 1.
    assert found["per_class"] == [100.0, 50.0, 100.0]
    assert found["source_accuracy"] == {}
    # Backwards: the first of the two classes that are not said.
    found = measured(linear(torch.zeros(3, 3), Backwards))
    # Row by row of t: 1 → 0, 2 → 0, 2 → 0, 0 → 1; the last one is right.
    assert found["target_accuracy"] == {"t": 25.0}
    # At ``a`` the identity; at ``b`` what says z becomes x, as its held-out labels are.
    assert measured(linear(torch.zeros(3, 3), OneEach))["source_accuracy"] == {"a": 50.0, "b": 100.0}
    # Dropout of nearly everything changes no answer.
    plain = linear(torch.eye(3))
    noisy = Network(
        nn.Dropout(0.99), plain.classifier, embedding_size=3, classes=3, stages={}, alignment_stages=()
    ).train()
    assert measured(noisy)["target_accuracy"] == {"t": 50.0}
    assert not noisy.training


def test_predictions_are_in_order() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 1203)  # more than two batches
    view = SiteData(
        [(shown("x", labels.tolist(), labels.tolist()), np.arange(1203), 0)], Preprocessing(kind="features")
    )
    assert np.array_equal(predictions(linear(torch.eye(3)).eval(), view), labels)
