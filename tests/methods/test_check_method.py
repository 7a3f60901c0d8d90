"""`fedshift.check_method` passes methods that keep the contract, and names each promise that another breaks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift
from fedshift.errors import UserError
from fedshift.methods import FedAvg, Federation, Site, State, Update, Weights

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from own_loss import ConfidencePenalty
from trimmed_mean import TrimmedMean

from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.pooled.mdan import MDAN


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


def _changed(weights: Weights, by: float) -> Weights:
    return Weights(
        {name: tensor + by * 1e-3 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedAvg, {}), (TrimmedMean, {}), (ConfidencePenalty, {"beta": 0.2}), (KD3A, {"network": "digit_cnn"}), (MDAN, {})],
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
        (Broken, "it learns: RuntimeError .*no"),
    ],
)
def test_a_broken_promise_is_a_line_of_its_own(kind: type[FedAvg], promise: str) -> None:
    with pytest.raises(UserError, match=rf"^{kind.__name__} breaks \d of 7 promises\n(.*\n)*{promise}"):
        fedshift.check_method(kind)
