"""The test of every row with targets as clusters, the seeds' view beside it, and the correction of both."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedshift.evaluation.records import RunResult, SelectedRound, SiteMetrics
from fedshift.evaluation.significance import TTest, cluster_test, compare, holm, t_test

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
    assert t_test([10.0]) == TTest(1, 10.0, None, None)
    assert t_test([10.0]).t is None
    assert t_test([0.1 + 0.2, 0.3]).p is None  # equal but for rounding
    with pytest.raises(ValueError, match="values"):
        t_test([])


PENICILLIN = """
27 23 26 23 23 21  27 23 26 23 23 21  25 21 25 24 24 20  26 23 25 23 23 20  25 22 26 22 23 20  24 22 25 23 22 19
24 20 23 21 22 19  26 22 26 24 24 21  24 21 24 22 22 20  24 21 24 23 22 19  26 23 26 24 24 21  25 22 26 24 24 20
26 24 26 24 25 22  26 23 26 23 23 20  26 23 25 24 24 22  25 22 25 23 23 20  25 21 24 23 23 20  25 22 24 23 23 19
24 21 23 21 21 19  26 23 26 24 24 21  25 21 24 22 22 18  25 22 25 22 22 20  24 21 24 22 24 19  24 21 24 22 21 18
"""
"""Diameters on 24 plates of 6 samples (Davies and Goldsmith, Statistical Methods in Research and Production, 1972;
lme4, data set Penicillin; numbers from vincentarelbundock/Rdatasets, csv/lme4/Penicillin.csv)."""


def test_the_mixed_model_of_lme4_and_statsmodels_has_these_numbers() -> None:
    # lme4, lmer(diameter ~ 1 + (1 | plate) + (1 | sample)), REML: intercept 22.9722, standard error 0.8086.
    numbers = list(map(float, PENICILLIN.split()))
    plates = [numbers[start : start + 6] for start in range(0, len(numbers), 6)]
    found = cluster_test(plates)
    assert (round(found.mean, 4), round(found.standard_error or 0, 4), found.n) == (22.9722, 0.8086, 24)
    turned = cluster_test(list(zip(*plates, strict=True)))
    assert (turned.n, turned.p, turned.freedom) == (6, pytest.approx(found.p), pytest.approx(found.freedom))
    assert turned.freedom == pytest.approx(reml(np.array(plates))[1], rel=1e-3)
    # statsmodels 0.15.0, MixedLM with the variance components of targets and seeds, REML: 3.3 with 1.3489.
    table = [[7.1, 5.9, 6.4], [2.2, 1.0, 2.1], [4.9, 3.5, 4.6], [1.3, 0.4, 0.2]]
    found = cluster_test(table)
    assert (found.mean, found.standard_error) == (pytest.approx(3.3), pytest.approx(1.3489, abs=1e-4))


def reml(table: np.ndarray) -> tuple[float, float]:
    """Standard error and Satterthwaite's degrees of freedom of the crossed mixed model, from its likelihood alone.

    The restricted likelihood of the dense covariance is maximised numerically; the degrees of freedom are 2 SE⁴ over
    the variance of SE² that its curvature gives (Kuznetsova et al., Journal of Statistical Software 82, 2017).
    """
    of_target, of_seed = np.divmod(np.arange(table.size), table.shape[1])
    same = [np.equal.outer(one, one).astype(float) for one in (of_target, of_seed)] + [np.eye(table.size)]
    y, ones = table.ravel() - table.mean(), np.ones(table.size)

    def square_error(logs: np.ndarray) -> float:
        inverse = np.linalg.inv(np.einsum("i,ijk->jk", np.exp(logs), np.array(same)))
        return float(1 / (ones @ inverse @ ones))

    def deviance(logs: np.ndarray) -> float:
        covariance = np.einsum("i,ijk->jk", np.exp(logs), np.array(same))
        inverse = np.linalg.inv(covariance)
        weight = ones @ inverse @ ones
        residual = y - (ones @ inverse @ y) / weight
        return float(np.linalg.slogdet(covariance)[1] + np.log(weight) + residual @ inverse @ residual)

    start = np.log(np.full(3, table.var() / 3))
    best = optimize.minimize(deviance, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}).x
    step = np.eye(3) * 1e-3
    curvature = np.array(
        [
            [
                sum(a * b * deviance(best + a * one + b * other) for a in (1, -1) for b in (1, -1)) / 4e-6
                for other in step
            ]
            for one in step
        ]
    )
    slope = np.array([(square_error(best + one) - square_error(best - one)) / 2e-3 for one in step])
    squared = square_error(best)
    return squared**0.5, float(2 * squared**2 / (slope @ np.linalg.inv(curvature / 2) @ slope))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_mixed_model_by_restricted_likelihood(seed: int) -> None:
    """Where both variances are above 0, as lmerTest has it: the same standard error and degrees of freedom."""
    draw = np.random.default_rng(seed)
    table = 1 + draw.normal(0, 2, (5, 1)) + draw.normal(0, 2, (1, 4)) + draw.normal(0, 0.7, (5, 4))
    found = cluster_test(table.tolist())
    error, freedom = reml(table)
    assert found.standard_error == pytest.approx(error, rel=1e-4)
    assert found.freedom == pytest.approx(max(freedom, 3), rel=1e-2)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.mean / error), max(freedom, 3)), rel=2e-2)


def test_degrees_of_freedom_stay_within_those_of_its_parts() -> None:
    """Satterthwaite's can fall to nearly 0 where differences of mean squares cancel."""
    draw = np.random.default_rng(1)
    for _ in range(200):
        freedom = cluster_test(draw.normal(0, 1, (4, 3)).tolist()).freedom
        assert 2 <= freedom <= 6


def test_without_a_common_shift_it_is_students_t_on_the_means_of_targets() -> None:
    table = [[7.0, 5.0, 6.0], [1.0, 2.0, 3.0], [4.0, 4.5, 3.5], [9.0, 8.0, 7.0]]
    reference = stats.ttest_1samp([fmean(line) for line in table], 0)
    found = cluster_test(table)
    assert (found.freedom, found.p, found.t) == (3, pytest.approx(reference.pvalue), pytest.approx(reference.statistic))
    # Where targets differ by no more than chance, and seeds shift all of them, it is the test over seeds.
    turned = cluster_test(list(zip(*table, strict=True)))
    assert (turned.freedom, turned.p) == (found.freedom, pytest.approx(found.p))


@pytest.mark.parametrize("sd", [(1.0, 0.0, 1.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (2.0, 0.3, 0.5)])
def test_chance_is_called_more_than_chance_in_at_most_one_of_twenty(sd: tuple[float, float, float]) -> None:
    """Four targets and three seeds, with spreads of targets, seeds and the rest: also where seeds shift all targets."""
    draw, draws = np.random.default_rng(0), 1500
    wrong = 0
    for _ in range(draws):
        table = draw.normal(0, sd[0], (4, 1)) + draw.normal(0, sd[1], (1, 3)) + draw.normal(0, sd[2], (4, 3))
        p = cluster_test(table.tolist()).p
        wrong += p is not None and p < 0.05
    assert wrong / draws < 0.05 + 2.5 * (0.05 * 0.95 / draws) ** 0.5


def test_what_has_no_clusters() -> None:
    for table in ([], [[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 2.0], [3.0]]):
        with pytest.raises(ValueError, match="two targets"):
            cluster_test(table)
    assert cluster_test([[1.0, 1.0], [1.0, 1.0]]) == TTest(2, 1.0, 0.0, None)
    one = compare(results({("a", 0): 60.0, ("a", 1): 62.0}), results({("a", 0): 50.0, ("a", 1): 50.0}))
    assert (one.clustered, one.test) == (None, t_test([10.0, 12.0])), "one target: of that target only"
    both = {("a-b", 0): 60.0, ("a-b", 1): 61.0, ("b-a", 0): 50.0, ("b-a", 1): 53.0}
    pairs = [result.model_copy(update={"labelled": ["a"]}) for result in results(both)]
    at_x = SiteMetrics(site="x", part="target", samples=9, support=[4, 5], values={})
    shared = [result.model_copy(update={"sites": [at_x]}) for result in results(both)]
    sides = [pair.model_copy(update={"selected": {"last": SelectedRound(round=1, accuracy=40.0)}}) for pair in pairs]
    value = lambda result, select: result.accuracy(select)  # noqa: E731
    found = compare(pairs, sides, value=value)
    assert (found.clustered, found.test) == (None, found.seeds), "pairs of sites share sites"
    found = compare(shared, results(dict.fromkeys(both, 40.0)))
    assert (found.clustered, found.test) == (None, found.seeds), "one site is measured for both targets"


def test_targets_are_no_repeats() -> None:
    """Two targets that differ the same way in each of two seeds: the spread between targets is not chance."""
    first = {("a", 0): 60.0, ("a", 1): 61.0, ("b", 0): 50.0, ("b", 1): 53.0}
    second = {("a", 0): 50.0, ("a", 1): 50.0, ("b", 0): 60.0, ("b", 1): 60.0}
    found = compare(results(first), results(second))
    # a: 10 and 11; b: −10 and −7; averages of the seeds: 0 and 2.
    assert found.targets["a"] == t_test([10.0, 11.0])
    assert found.targets["b"] == t_test([-10.0, -7.0])
    assert found.seeds == t_test([0.0, 2.0])
    assert (found.seeds.n, found.seeds.mean, found.seeds.t) == (2, 1.0, pytest.approx(1.0))
    assert found.clustered == cluster_test([[10.0, 11.0], [-10.0, -7.0]])
    assert found.test == found.clustered
    assert found.test.standard_error == pytest.approx(9.5, abs=0.5), "the targets' means are 10.5 and −8.5"


def test_what_is_compared() -> None:
    first = {("a", 0): 60.0, ("a", 1): 62.0, ("b", 1): 70.0, ("c", 0): 99.0}
    second = {("a", 0): 50.0, ("a", 1): 50.0, ("a", 2): 1.0, ("b", 1): 50.0, ("d", 0): 99.0}
    found = compare(results(first), results(second))
    assert found.targets == {"a": t_test([10.0, 12.0]), "b": t_test([20.0])}
    assert found.seeds == t_test([16.0])  # seed 1 alone has both targets
    assert found.clustered is None, "one seed says nothing of what seeds shift in common"
    apart = compare(results({("a", 0): 1.0, ("b", 1): 2.0}), results({("a", 0): 2.0, ("b", 1): 4.0}))
    assert apart.seeds is None
    assert apart.test is None
    assert compare(results(first), results({("d", 0): 1.0})) is None
    assert compare(results(first), []) is None
    first, second = results({("a", 0): 60.0, ("a", 1): 64.0}), results({("a", 0): 50.0, ("a", 1): 50.0})
    oracle = compare(first, second, "oracle")
    assert oracle.seeds == t_test([5.0, 7.0])
    assert compare(first, second, "source") is None
    twice = compare(first, second, value=lambda result, select: 2 * (result.score(select) or 0.0))
    assert twice.seeds == t_test([20.0, 28.0])


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
    seeds = range(len(next(iter(grid.values()))))
    tests = [
        (found.seeds, [[fmean(pairs[seed][side] for pairs in grid.values()) for seed in seeds] for side in (0, 1)])
    ]
    tests += [
        (found.targets[target], [[pair[side] for pair in pairs] for side in (0, 1)]) for target, pairs in grid.items()
    ]
    for test, (one, other) in tests:
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
    assert back.test.mean == pytest.approx(-there.test.mean)
    assert back.test.p == (None if there.test.p is None else pytest.approx(there.test.p))
    assert reordered.test.mean == pytest.approx(there.test.mean)
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
