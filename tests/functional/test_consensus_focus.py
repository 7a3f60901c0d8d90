"""Consensus focus: worked numbers, Shapley values over all orders, invariants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.methods.federated import kd3a
from fedshift.methods.federated.kd3a import UNSUPPORTED, FocusTally, knowledge_vote

NEGATIVE = torch.tensor([[[0.95, 0.05, 0.0]], [[0.0, 0.91, 0.09]]], dtype=torch.float64)
BALLOTS = st.sampled_from(["rows", "top1"])


def random_teachers(teachers: int, samples: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(teachers, samples, classes, generator=generator, dtype=torch.float64)).softmax(2)


def focus_of(predictions: Tensor, gate: float, **options: Any) -> Tensor:
    tally = FocusTally(len(predictions), gate, **options)
    tally.add(predictions)
    return tally.focus()


shapley_focus = partial(focus_of, rule="shapley")
leave_one_out_focus = partial(focus_of, rule="leave_one_out")


def coalition_quality(predictions: Tensor, gate: float, coalition: Sequence[int], **options: Any) -> float:
    """Q of a coalition, to which the Shapley values among its members sum."""
    return shapley_focus(predictions[list(coalition)], gate, **options).sum().item() if coalition else 0.0


def naive_quality(predictions: Tensor, gate: float, coalition: tuple[int, ...], ballots: str) -> float:
    """Q by the vote itself, which has its own reference."""
    if not coalition:
        return 0.0
    consensus = knowledge_vote(predictions[sorted(coalition)], gate, ballots=ballots)  # type: ignore[arg-type]
    support = consensus.support if ballots == "rows" else consensus.support.floor()
    return (support * consensus.probabilities.amax(1)).sum().item()


def naive_shapley(predictions: Tensor, gate: float, ballots: str) -> list[float]:
    """The mean gain of every teacher over all K! orders."""
    teachers = len(predictions)
    focus = [0.0] * teachers
    for order in itertools.permutations(range(teachers)):
        for place, teacher in enumerate(order):
            with_it = naive_quality(predictions, gate, order[: place + 1], ballots)
            focus[teacher] += with_it - naive_quality(predictions, gate, order[:place], ballots)
    return [value / math.factorial(teachers) for value in focus]


@pytest.mark.parametrize("ballots", ["rows", "top1"])
def test_who_is_as_sure_as_the_gate_does_not_pass(ballots: Any) -> None:
    """As in the released code: only a confidence above the gate counts."""
    at_the_gate = torch.tensor([[[0.75, 0.25]], [[0.875, 0.125]]], dtype=torch.float64)
    assert coalition_quality(at_the_gate, 0.75, (0, 1), ballots=ballots) == pytest.approx(0.875)
    assert coalition_quality(at_the_gate, 0.75, (0,), ballots=ballots) == pytest.approx(
        0.75 * UNSUPPORTED if ballots == "rows" else 0
    )


def test_focus_can_be_negative() -> None:
    assert coalition_quality(NEGATIVE, 0.9, [0]) == pytest.approx(0.95)
    assert coalition_quality(NEGATIVE, 0.9, [1]) == pytest.approx(0.91)
    assert coalition_quality(NEGATIVE, 0.9, [0, 1]) == pytest.approx(0.91)
    focus = leave_one_out_focus(NEGATIVE, 0.9)
    assert focus.tolist() == pytest.approx([0, -0.04], abs=1e-12)


def test_only_who_passes_the_gate_votes() -> None:
    rows = [[0.55, 0.45, 0.0, 0.0], [0.0, 0.45, 0.55, 0.0], [0.45, 0.0, 0.15, 0.4]]
    predictions = torch.tensor(rows, dtype=torch.float64)[:, None]
    # The first two elect class 1, nobody's first; with the third's row it would be class 0.
    assert coalition_quality(predictions, 0.5, [0, 1, 2]) == pytest.approx(0.001 * 1.0 / 3)
    assert coalition_quality(predictions, 0.5, [0, 1]) == pytest.approx(0.001 * 0.9 / 2)


@given(
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from([0, 0.4, 0.6]),
    BALLOTS,
    st.integers(0, 999),
)
@settings(max_examples=15)
def test_focus_against_all_orders(
    teachers: int, samples: int, classes: int, gate: float, ballots: str, seed: int
) -> None:
    predictions = random_teachers(teachers, samples, classes, seed)
    everyone = tuple(range(teachers))
    for coalition in (everyone, everyone[1:], everyone[::2]):
        found = coalition_quality(predictions, gate, coalition, ballots=ballots)
        assert found == pytest.approx(naive_quality(predictions, gate, coalition, ballots), abs=1e-12)
    total = naive_quality(predictions, gate, everyone, ballots)
    expected = [
        total - naive_quality(predictions, gate, tuple(k for k in everyone if k != out), ballots) for out in everyone
    ]
    found = leave_one_out_focus(predictions, gate, ballots=ballots)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    focus = shapley_focus(predictions, gate, ballots=ballots)
    assert focus.dtype == torch.float64
    assert focus.tolist() == pytest.approx(naive_shapley(predictions, gate, ballots), abs=1e-12)


@given(st.integers(1, 6), st.integers(0, 999), BALLOTS, st.randoms(use_true_random=False))
def test_what_holds_for_any_teachers(teachers: int, seed: int, ballots, random) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(teachers, 30, 4, seed)
    focus = shapley_focus(predictions, 0.6, ballots=ballots)
    total = naive_quality(predictions, 0.6, tuple(range(teachers)), ballots)
    assert focus.sum().item() == pytest.approx(total, abs=1e-12)
    order = random.sample(range(teachers), teachers)
    torch.testing.assert_close(shapley_focus(predictions[order], 0.6, ballots=ballots), focus[order])
    alone = leave_one_out_focus(predictions, 0.6, ballots=ballots)
    torch.testing.assert_close(leave_one_out_focus(predictions[order], 0.6, ballots=ballots), alone[order])
    # Batches add up.
    halves = [shapley_focus(half, 0.6, ballots=ballots) for half in (predictions[:, :11], predictions[:, 11:])]
    torch.testing.assert_close(halves[0] + halves[1], focus)
    if ballots == "top1":
        assert min(alone.min().item(), focus.min().item()) >= -1e-12


@given(st.integers(1, 8), st.integers(0, 999), BALLOTS)
def test_identical_teachers_have_equal_focus(teachers: int, seed: int, ballots) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(1, 20, 3, seed).expand(teachers, -1, -1)
    for focus in (
        shapley_focus(predictions, 0.7, ballots=ballots),
        leave_one_out_focus(predictions, 0.7, ballots=ballots),
    ):
        assert (focus.max() - focus.min()).item() < 1e-12


def test_sampled_orders() -> None:
    # Two orders of two teachers are all orders.
    pair = random_teachers(2, 40, 3, 0)
    for permutations in (2, 10):
        torch.testing.assert_close(shapley_focus(pair, 0.6, permutations=permutations), shapley_focus(pair, 0.6))
    predictions = random_teachers(5, 200, 4, 1)
    exact = shapley_focus(predictions, 0.6)
    sampled = shapley_focus(predictions, 0.6, permutations=2000, generator=torch.Generator().manual_seed(0))
    assert (sampled - exact).abs().max() < 0.02 * exact.max()
    assert sampled.sum().item() == pytest.approx(exact.sum().item(), abs=1e-9)
    again = shapley_focus(predictions, 0.6, permutations=2000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampled, again)
    odd = shapley_focus(predictions, 0.6, permutations=3, generator=torch.Generator().manual_seed(0))
    assert odd.sum().item() == pytest.approx(exact.sum().item(), abs=1e-9)


@pytest.mark.parametrize("ballots", ["rows", "top1"])
def test_many_teachers_are_sampled(ballots, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(11, 30, 3, 0)
    predictions[1] = predictions[0]
    total = naive_quality(predictions, 0.6, tuple(range(11)), ballots)
    with monkeypatch.context() as patch:
        patch.setattr(kd3a, "EXACT_UP_TO", 11)
        exact = shapley_focus(predictions, 0.6, ballots=ballots)
    focus = shapley_focus(predictions, 0.6, ballots=ballots, generator=torch.Generator().manual_seed(0))
    assert focus.sum().item() == pytest.approx(total, abs=1e-9)
    assert (focus - exact).abs().max() < 0.15 * exact.max()
    assert not torch.equal(focus, exact)


@pytest.mark.parametrize("ballots", ["rows", "top1"])
def test_pieces_do_not_matter(ballots, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(4, 50, 6, 3)
    whole = shapley_focus(predictions, 0.5, ballots=ballots)
    monkeypatch.setattr(kd3a, "_CHUNK", 100)
    torch.testing.assert_close(shapley_focus(predictions, 0.5, ballots=ballots), whole)


@given(st.integers(1, 5), st.lists(st.integers(0, 30), min_size=1, max_size=4), BALLOTS, st.integers(0, 99))
@settings(max_examples=30)
def test_batches_add_up(teachers: int, sizes: list[int], ballots, seed: int) -> None:  # type: ignore[no-untyped-def]
    predictions = random_teachers(teachers, sum(sizes), 3, seed)
    tallies = {
        "exact": (FocusTally(teachers, 0.6, ballots=ballots), {}),
        "sampled": (
            FocusTally(teachers, 0.6, ballots=ballots, permutations=5, generator=torch.Generator().manual_seed(1)),
            {"permutations": 5, "generator": torch.Generator().manual_seed(1)},
        ),
    }
    for tally, options in tallies.values():
        for batch in predictions.split(sizes, dim=1):
            tally.add(batch)
        torch.testing.assert_close(tally.focus(), shapley_focus(predictions, 0.6, ballots=ballots, **options))
    tally = FocusTally(teachers, 0.6, rule="leave_one_out", ballots=ballots)
    for batch in predictions.split(sizes, dim=1):
        tally.add(batch)
    torch.testing.assert_close(tally.focus(), leave_one_out_focus(predictions, 0.6, ballots=ballots))
