"""Copies bring no evidence, and of rows unlike all in training nothing is known: intervals have room for both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.evaluation.estimate.combination import Cases, LeftOut, estimate_accuracy
from fedshift.evaluation.estimate.doubtful_rows import of_whole_rows, share_of_copies, with_room, worth


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_repeated_is_the_share_of_equal_pairs(rows: list[int]) -> None:
    pairs = [a == b for at, a in enumerate(rows) for b in rows[at + 1 :]]
    assert share_of_copies(np.array(rows)[:, None]) == pytest.approx(np.mean(pairs))


@given(st.integers(2, 30), st.integers(1, 30))
def test_copies_of_n_different_rows_count_as_n(different: int, times: int) -> None:
    rows = np.tile(np.arange(different, dtype=float)[:, None], (times, 3))
    assert worth(len(rows), share_of_copies(rows)) == pytest.approx(different)


def test_few_values_by_nature_are_no_copies() -> None:
    """Of patients with three answers of yes or no, many are equal: as many as at other sites."""
    rng = np.random.default_rng(0)
    here, there = (rng.integers(0, 2, (400, 3)) for _ in range(2))
    assert worth(400, share_of_copies(here) - share_of_copies(there)) > 100
    assert worth(400, share_of_copies(here)) < 10


@given(st.integers(0, 20), st.integers(1, 20), st.data())
def test_whatever_the_odd_rows_are_the_share_is_within(odd: int, others: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, others)) / others
    whole = (data.draw(st.integers(0, odd)) + right * others) / (odd + others)
    low, high = with_room(right, right, odd / (odd + others))
    assert low - 1e-9 <= whole <= high + 1e-9


def site(seed: int, n: int = 300) -> LeftOut:
    rng = np.random.default_rng(seed)
    second = rng.beta(0.5, 0.5, n)
    return LeftOut(np.stack([1 - second, second], axis=1), (rng.random(n) < second).astype(np.int64))


@pytest.mark.slow
def test_intervals_of_copies_cover_and_those_of_rows_that_are_taken_for_many_do_not() -> None:
    covered, narrow = [], []
    known = {name: site(at) for at, name in enumerate("abcdef")}
    cases = Cases.of(known)
    for seed in range(40):
        few = site(500 + seed, 12)
        scores, truth = np.repeat(few.scores, 40, axis=0), 100 * np.mean(few.scores.argmax(axis=1) == few.labels)
        for copied, result in ((share_of_copies(scores), covered), (0.0, narrow)):
            found = estimate_accuracy(known, scores, cases=cases, copied=copied)
            result.append(found.low is None or found.high is None or found.low <= truth <= found.high)
    assert np.mean(covered) >= 0.85
    assert np.mean(covered) > np.mean(narrow)


def test_odd_rows_widen_every_interval_and_too_many_leave_none() -> None:
    known, here = {name: site(at) for at, name in enumerate("abc")}, site(9)
    wide = [estimate_accuracy(known, here.scores, unusual="column 'age'", odd_rows=share) for share in (0.0, 0.2, 0.9)]
    assert wide[1].low < wide[0].low
    assert wide[1].high > wide[0].high
    for name, measure in wide[0].measures.items():
        assert wide[1].measures[name].low < measure.low
    assert wide[2].abstain
    assert "since column 'age'" in wide[2].reasons[0]
    assert all(measure.estimate is None for measure in wide[2].measures.values())
    scores = site(9).scores
    scores[3] = np.nan
    found = estimate_accuracy({name: site(at) for at, name in enumerate("abc")}, scores)
    assert found.abstain
    assert found.reasons == ("the model gives no probabilities for 1 of 300 samples: their values are too large",)
    assert of_whole_rows(0.5, 0.96, 10) == (0.5, 1.0)
    assert of_whole_rows(0.04, 0.5, 10) == (0.0, 0.5)
    assert of_whole_rows(0.5, 0.94, 10) == (0.5, 0.94)
