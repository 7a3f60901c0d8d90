"""Averages over rounds, by hand: which rounds are in the mean, with which weights, and what is kept until then."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedshift.methods.composition.averages import EMA, SWA, SWAD, Averaging, Kept, LastRounds, dense_window
from fedshift.methods.composition.options import Composed
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights


def model(number: float) -> Weights:
    return Weights({"w": torch.tensor([float(number)]), "bn.num_batches_tracked": torch.tensor(int(number))})


def played(averaging: Averaging, numbers: list[float], losses: list[float] | None = None) -> list[float | None]:
    """What is handed out after each round, whose model is that number; the loss is of its held-out parts."""
    kept, handed_out = Kept(), []
    for place, number in enumerate(numbers):
        last = place == len(numbers) - 1
        kept = averaging.after(kept, model(number), (place + 1) / len(numbers))
        mean = averaging.handed_out(kept, last=last)
        handed_out.append(None if mean is None else mean["w"].item())
        if losses is not None and not last:
            kept = averaging.judge(kept, {"a": 100 - losses[place] - 1, "b": 100 - losses[place] + 1})
    return handed_out


def test_swa_is_the_mean_of_the_last_quarter() -> None:
    numbers = [float(n) for n in range(8)]
    assert played(SWA(), numbers) == [None] * 6 + [6.0, 6.5]
    assert played(SWA(start=0.5), numbers) == [None] * 4 + [4.0, 4.5, 5.0, 5.5]
    assert played(SWA(start=0.0), [3.0]) == [3.0]


def test_ema_forgets_the_start() -> None:
    """d is 0, 1/2, 2/3 and then 0.7."""
    assert played(EMA(decay=0.7), [1.0, 3.0, 8.0, 0.0]) == pytest.approx([1.0, 2.0, 4.0, 2.8])


def test_the_last_rounds() -> None:
    assert played(LastRounds(rounds=2), [1.0, 3.0, 8.0]) == [1.0, 2.0, 5.5]
    assert played(LastRounds(rounds=1), [1.0, 3.0]) == [None, None]


LOSSES = [9.0, 5.0, 6.0, 5.5, 8.0, 9.0, 1.0, 1.0]
"""With N_s = 3 the window begins at the second (5, 6, 5.5: mean 5.5); with N_e = 2 it ends before 8 and 9."""


def test_swad_finds_its_window() -> None:
    assert dense_window(LOSSES, 3, 2, 1.3) == (1, 4)
    assert dense_window(LOSSES[:5], 3, 2, 1.3) == (1, None)
    assert dense_window(LOSSES[:3], 3, 2, 1.3) == (None, None)
    assert dense_window(LOSSES, 3, 2, 1.5) == (1, None)  # 8 is no more than 1.5 · 5.5
    assert dense_window(LOSSES, 3, 3, 1.3) == (1, None)  # never three in a row


def test_swad_averages_its_window_and_measures_every_round_by_itself() -> None:
    numbers = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    swad = SWAD(settled=3, patience=2)
    assert played(swad, numbers, LOSSES) == pytest.approx([None] * 7 + [14 / 3])
    assert played(swad, numbers[:5], LOSSES) == pytest.approx([None] * 4 + [30 / 4])  # still open
    assert played(swad, numbers[:3], LOSSES) == [None] * 3  # not begun: the last round's own model


def test_a_round_that_no_source_measured_counts_like_the_one_before() -> None:
    swad = SWAD()
    kept = swad.judge(swad.after(Kept(), model(1), 0.1), {"a": 90.0, "b": 80.0})
    assert swad.judge(swad.after(kept, model(2), 0.2), {}).losses == (15.0, 15.0)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (FedAvg(), "fedavg"),
        (FedAvg(average="swa", server="adam"), "fedavg+adam+swa"),
        (CSAC(setting="released", robust="median", average_rounds=3), "csac-released+median+mean3"),
        (CSAC(label="mine", average="ema"), "mine"),
    ],
)
def test_names_follow_from_the_composition(method: Composed, name: str) -> None:
    assert method.display == name


def test_names_differ() -> None:
    options = [{}, {"average": "swa"}, {"average": "ema"}, {"average": "swad"}, {"average_rounds": 2}]
    names = [FedAvg(**left, **right).display for left, right in itertools.product(options, [{}, {"server": "yogi"}])
             if left or right]  # fmt: skip
    assert len(set(names)) == len(names)
