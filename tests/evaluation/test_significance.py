"""Tests over seeds: of the average over targets, at each target, and corrected for how many there are."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.evaluation.significance import TTest, compare, holm, t_test

Drawn = dict[tuple[str, int], float]


def results(drawn: Drawn) -> list[RunResult]:
    return [
        RunResult(
            method="m", target=target, seed=seed, classes=["a", "b"], rounds=2, seconds=1.0, mini_batches=2, threads=1,
            device="cpu",
            selected={
                "last": SelectedRound(round=2, accuracy=accuracy),
                "source": None,
                "oracle": SelectedRound(round=1, accuracy=accuracy / 2),
            },
        )
        for (target, seed), accuracy in drawn.items()
    ]  # fmt: skip


def test_the_worked_differences() -> None:
    # Differences 2, 4, 6: mean 4, s = 2, t = 4 / (2/√3) = 2√3; for 2 degrees of freedom p = 1 − t/√(t² + 2).
    found = t_test([2.0, 4.0, 6.0])
    assert (found.n, found.mean) == (3, 4.0)
    assert found.standard_error == pytest.approx(2 / 3**0.5)
    assert found.t == pytest.approx(12**0.5)
    assert found.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    # One degree of freedom is Cauchy's distribution: t = 1 has p = 1/2.
    assert t_test([0.0, 1.0]).p == pytest.approx(0.5)


def test_without_a_spread_there_is_no_test() -> None:
    assert t_test([10.0]) == TTest(1, 10.0, None, None)
    assert t_test([10.0]).t is None
    assert t_test([0.1 + 0.2, 0.3]).p is None  # equal but for rounding
    with pytest.raises(ValueError, match="values"):
        t_test([])


def test_targets_are_no_repeats() -> None:
    """Two targets that differ the same way in each of two seeds: the spread between targets is not chance."""
    first = {("a", 0): 60.0, ("a", 1): 61.0, ("b", 0): 50.0, ("b", 1): 53.0}
    second = {("a", 0): 50.0, ("a", 1): 50.0, ("b", 0): 60.0, ("b", 1): 60.0}
    found = compare(results(first), results(second))
    assert found is not None
    # a: 10 and 11; b: −10 and −7; averages of the seeds: 0 and 2.
    assert found.targets["a"] == t_test([10.0, 11.0])
    assert found.targets["b"] == t_test([-10.0, -7.0])
    assert found.average == t_test([0.0, 2.0])
    assert found.average is not None
    assert (found.average.n, found.average.mean, found.average.t) == (2, 1.0, pytest.approx(1.0))


def test_only_what_both_have_is_compared() -> None:
    first = {("a", 0): 60.0, ("a", 1): 62.0, ("b", 1): 70.0, ("c", 0): 99.0}
    second = {("a", 0): 50.0, ("a", 1): 50.0, ("a", 2): 1.0, ("b", 1): 50.0, ("d", 0): 99.0}
    found = compare(results(first), results(second))
    assert found is not None
    assert found.targets == {"a": t_test([10.0, 12.0]), "b": t_test([20.0])}
    assert found.average == t_test([16.0])  # seed 1 alone has both targets
    apart = compare(results({("a", 0): 1.0, ("b", 1): 2.0}), results({("a", 0): 2.0, ("b", 1): 4.0}))
    assert apart is not None
    assert apart.average is None
    assert compare(results(first), results({("d", 0): 1.0})) is None
    assert compare(results(first), []) is None


def test_the_rule_and_the_value_choose_what_is_compared() -> None:
    first, second = results({("a", 0): 60.0, ("a", 1): 64.0}), results({("a", 0): 50.0, ("a", 1): 50.0})
    oracle = compare(first, second, "oracle")
    assert oracle is not None
    assert oracle.average == t_test([5.0, 7.0])
    assert compare(first, second, "source") is None
    twice = compare(first, second, value=lambda result, select: 2 * (result.score(select) or 0.0))
    assert twice is not None
    assert twice.average == t_test([20.0, 28.0])


grids = st.integers(2, 5).flatmap(
    lambda seeds: st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=seeds,
        max_size=seeds), min_size=1
    )
)  # fmt: skip


@settings(max_examples=40)
@given(grids)
def test_scipy_agrees(grid: dict[str, list[tuple[float, float]]]) -> None:
    first = {(target, seed): pair[0] for target, pairs in grid.items() for seed, pair in enumerate(pairs)}
    second = {(target, seed): pair[1] for target, pairs in grid.items() for seed, pair in enumerate(pairs)}
    found = compare(results(first), results(second))
    assert found is not None
    seeds = range(len(next(iter(grid.values()))))
    tests = [
        (found.average, [[fmean(pairs[seed][side] for pairs in grid.values()) for seed in seeds] for side in (0, 1)])
    ]
    tests += [
        (found.targets[target], [[pair[side] for pair in pairs] for side in (0, 1)]) for target, pairs in grid.items()
    ]
    for test, (one, other) in tests:
        assert test is not None
        assert test.n == len(seeds)
        if test.p is not None and (test.standard_error or 0) > 1e-6:
            reference = stats.ttest_rel(one, other)
            assert test.p == pytest.approx(reference.pvalue, abs=1e-9)
            assert test.t == pytest.approx(reference.statistic, rel=1e-6, abs=1e-9)


@settings(max_examples=40)
@given(grids, st.randoms())
def test_order_and_sign(grid: dict[str, list[tuple[float, float]]], chance: object) -> None:
    """The order of the results does not matter, and the other way round only the sign changes."""
    first = {(target, seed): pair[0] for target, pairs in grid.items() for seed, pair in enumerate(pairs)}
    second = {(target, seed): pair[1] for target, pairs in grid.items() for seed, pair in enumerate(pairs)}
    there, back = compare(results(first), results(second)), compare(results(second), results(first))
    reordered = compare(list(reversed(results(first))), results(second))
    assert there is not None
    assert back is not None
    assert reordered is not None
    assert there.average is not None
    assert back.average is not None
    assert reordered.average is not None
    assert back.average.mean == pytest.approx(-there.average.mean)
    assert back.average.p == (None if there.average.p is None else pytest.approx(there.average.p))
    assert reordered.average.mean == pytest.approx(there.average.mean)
    assert {target: test.n for target, test in reordered.targets.items()} == {t: x.n for t, x in there.targets.items()}


def test_holm_by_hand() -> None:
    # Sorted .01 · 3, .02 · 2, .03 · 1: the third is not below the second.
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([None, 0.01]) == [None, 0.01]
    assert holm([]) == []


@settings(max_examples=100)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12))
def test_holm_corrects_upwards_and_keeps_the_order(p_values: list[float | None]) -> None:
    corrected = holm(p_values)
    pairs = [(p, q) for p, q in zip(p_values, corrected, strict=True) if p is not None and q is not None]
    assert [p is None for p in p_values] == [q is None for q in corrected]
    assert all(p <= q <= min(1.0, len(pairs) * p) or q == pytest.approx(p) for p, q in pairs)
    for (p, q), (other, corrected_other) in zip(sorted(pairs), sorted(pairs)[1:], strict=False):
        assert p <= other
        assert q <= corrected_other
    # The step-down test itself: at every level the same hypotheses fall.
    for level in (0.01, 0.05, 0.3):
        fallen = 0
        for rank, p in enumerate(sorted(p for p, _ in pairs)):
            if p * (len(pairs) - rank) > level:
                break
            fallen += 1
        assert sum(q <= level for _, q in pairs) == fallen
