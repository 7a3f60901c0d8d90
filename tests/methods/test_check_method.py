"""`fedshift.check_method` passes methods that keep the contract, and names each promise that another breaks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift
from fedshift.errors import UserError
from fedshift.methods import FedAvg, Federation, Method, Site, State, Update, Weights

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from own_loss import ConfidencePenalty
from trimmed_mean import TrimmedMean

from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.pooled.mdan import MDAN

NORMED = {"name": "mlp", "hidden": [8], "batch_norm": True}


class Shaken(FedAvg):
    """Draws numbers that no seed gives."""

    def fit(self, site: Site, weights: Weights) -> Update:
        update = super().fit(site, weights)
        return Update(_changed(update.weights, np.random.default_rng().random()), update.samples, update.loss)


class Ordered(FedAvg):
    """Takes the first site's model."""

    def round(self, federation: Federation, state: State) -> State:
        first, *_ = list(federation.ask(self.fit, to=federation.sources, weights=state.weights))
        return state.advance(first.weights)


class Idle(FedAvg):
    """Trains and does not use it."""

    def round(self, federation: Federation, state: State) -> State:
        federation.ask(self.fit, to=federation.sources, weights=state.weights).drain()
        return state.advance(state.weights)


class Lazy(FedAvg):
    """Says that it trains twice as much as it does."""

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return 2 * super().mini_batches(batches_per_epoch, rounds)


class Broken(FedAvg):
    """Fails."""

    def round(self, federation: Federation, state: State) -> State:
        raise RuntimeError("no")


class Returning(FedAvg):
    """Returns a model in place of a state."""

    def round(self, federation: Federation, state: State) -> State:
        return state.weights  # type: ignore[return-value]


class NoRound(Method):
    """Lacks what every method has."""


class NoName(FedAvg):
    """Has no name."""

    traits = Method.traits


def _changed(weights: Weights, by: float) -> Weights:
    return Weights(
        {name: tensor + by * 1e-3 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedAvg, {}), (TrimmedMean, {}), (ConfidencePenalty, {"beta": 0.2}), (KD3A, {"network": NORMED}), (MDAN, {})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_method_that_keeps_the_contract_passes(kind: Any, options: dict[str, Any]) -> None:
    fedshift.check_method(kind, **options)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Shaken, "same seed, same weights: two runs of one seed differ"),
        (Ordered, "the order of sites does not matter: the order in which sites are asked changes"),
        (Idle, "a round returns a new model: a round leaves the model as it was"),
        (Idle, "it learns: after 6 rounds its loss"),
        (Lazy, "as much work as announced: site 'large' trained on 10 mini-batches, mini_batches\\(\\) says 20"),
    ],
)
def test_a_broken_promise_is_a_line_of_its_own(kind: type[FedAvg], promise: str) -> None:
    with pytest.raises(UserError, match=rf"^{kind.__name__} breaks \d of 7 promises\n(.*\n)*{promise}"):
        fedshift.check_method(kind)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        (int, {}, "takes a class that derives from fedshift.Method, got <class 'int'>"),
        ("fedavg", {}, "takes a class that derives from fedshift.Method, got 'fedavg'"),
        (FedAvg(), {}, "got an object of FedAvg: give the class"),
        (NoRound, {}, "NoRound has no mini_batches and no round: write them, or derive from"),
        (NoName, {}, "NoName has no name: write traits ="),
        (FedAvg, {"weightin": "uniform"}, "FedAvg.weightin: there is no such field; did you mean 'weighting'"),
        (FedAvg, {"weighting": "half"}, "FedAvg.weighting: "),
        (FedAvg, {"network": "digit_cn"}, "did you mean 'digit_cnn'"),
        (Broken, {}, r"Broken keeps no promise: RuntimeError \(test_check_method.py, line \d+\): no"),
        (Returning, {}, r"Returning keeps no promise: FedshiftError: fedavg: round\(\) must return"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_no_whole_method_is_one_line(kind: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as told:
        fedshift.check_method(kind, **options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tasks": ("clasification",)}, "mine.tasks: there is no 'clasification'; did you mean 'classification'"),
        ({"target": "unlabeled"}, "mine.target: there is no 'unlabeled'; did you mean 'unlabelled'"),
        ({"server_reads": "sum"}, "mine.server_reads: there is no 'sum'; did you mean 'sums'"),
        ({"pool": True}, "there is no 'pool'; did you mean 'pooled'"),
    ],
)
def test_a_trait_that_does_not_exist_is_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        FedAvg.traits.derive(name="mine", **changes)
