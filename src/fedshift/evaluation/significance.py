"""Whether two methods differ: one test for every row, with targets as clusters and seeds crossed with them.

A seed is one repeat of an experiment: it draws the split, the common start and the order of the samples. A target is a
site that others might have stood for. Differences of one target are alike whatever the seed, and those of one seed
share sites and start. So a pair (target, seed) is no independent repeat. The test is that of the mixed model

    d_ts = μ + a_t + b_s + e_ts,        a_t ~ N(0, σ²_target),  b_s ~ N(0, σ²_seed),  e_ts ~ N(0, σ²)

of the differences d at K targets with n seeds each. With the mean squares of targets MT, of seeds MS and of the rest
ME, and no variance below 0,

    SE² = (ME + max(MT − ME, 0) + max(MS − ME, 0)) / (K n),        t = mean(d) / SE
    degrees of freedom = (Σ c M)² / Σ (c M)²/f, f = K − 1, n − 1, (K−1)(n−1) for M = MT, MS, ME, whose factors c in SE²
        are 0 or ±1 (Satterthwaite, Biometrics Bulletin 2, 1946), not below the smaller of K − 1 and n − 1

Where seeds shift nothing in common (MS ≤ ME ≤ MT), SE² = MT/(K n) with K − 1 degrees of freedom: Student's t on the
targets' means. For balanced data, which these are, it is the test of the mixed model by REML; readers and cases of a
diagnostic study are tested likewise (Hillis, Statistics in Medicine 26, 2007). Claims on methods are made by this test.
Of 100 differences that are chance it calls at most 5 more than chance (simulated), with two seeds up to 9.

The second view is Student's paired t-test over seeds, each averaged over the targets. It speaks of these targets only.
With a single target there is no other. Targets that share sites, such as pairs, are no clusters: they have it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.summary import Value, mean_and_standard_error


@dataclass(frozen=True)
class TTest:
    """The result of a two-sided t-test."""

    n: int  # number of repeats
    mean: float  # mean difference
    standard_error: float | None  # of the mean; None for one repeat
    p: float | None  # two-sided, by Student's distribution; None for one repeat, and where all differences are equal
    freedom: float | None = None  # degrees of freedom; None where there is no test

    @property
    def t(self) -> float | None:
        """mean / standard error; None where there is no test."""
        return None if self.p is None or not self.standard_error else self.mean / self.standard_error


@dataclass(frozen=True)
class Comparison:
    """One method minus another."""

    # the test of this module, by which methods are claimed to differ; its n is the number of targets. None for one
    # target, for pairs of sites, and where fewer than two seeds have every common target
    clustered: TTest | None
    # test over seeds of the mean over targets, for these targets only; None where no seed has every common target
    seeds: TTest | None
    targets: Mapping[str, TTest]  # test over seeds at each target that both methods have

    @property
    def test(self) -> TTest | None:
        """The test that a claim rests on: `clustered`; where there is none, that over seeds, of these targets only."""
        return self.clustered or self.seeds


def t_test(differences: Sequence[float]) -> TTest:
    """Student's t-test of paired differences against 0.

    For differences 2, 4, 6: mean 4, standard error 2/√3, so t = 2√3; with 2 degrees of freedom p = 1 − t/√(t² + 2).

    Raises:
        ValueError: there is no difference.

    Example:
        >>> found = t_test([2.0, 4.0, 6.0])
        >>> found.n, found.mean, round(found.t, 4), round(found.p, 4)
        (3, 4.0, 3.4641, 0.0742)
    """
    mean, error = mean_and_standard_error(differences)
    return _t_test(len(differences), mean, error, len(differences) - 1)


def cluster_test(differences: Sequence[Sequence[float]]) -> TTest:
    """The test of this module: of differences against 0, with targets as clusters and seeds crossed with them.

    Args:
        differences: for each of K ≥ 2 targets its differences, of the same n ≥ 2 seeds in the same order.

    Raises:
        ValueError: fewer than two targets or seeds, or targets with unequal numbers of seeds.

    Example:
        Seeds shift nothing in common, so this is Student's t on the targets' means 3 and 5:

        >>> found = cluster_test([[2.0, 4.0], [6.0, 4.0]])
        >>> found.n, found.mean, found.standard_error, found.freedom, round(found.p, 4)
        (2, 4.0, 1.0, 1.0, 0.156)
    """
    targets, seeds = len(differences), len(differences[0]) if differences else 0
    if targets < 2 or seeds < 2 or any(len(line) != seeds for line in differences):
        raise ValueError("the test needs two targets, and the same two seeds or more at each of them")
    by_target, by_seed = [fmean(line) for line in differences], [fmean(line) for line in zip(*differences, strict=True)]
    mean = fmean(by_target)
    residuals = (
        value - at_target - of_seed + mean
        for line, at_target in zip(differences, by_target, strict=True)
        for value, of_seed in zip(line, by_seed, strict=True)
    )
    free = targets - 1, seeds - 1, (targets - 1) * (seeds - 1)
    rest = sum(value**2 for value in residuals) / free[2]
    above = [square if square > rest else 0.0 for square in (seeds * variance(by_target), targets * variance(by_seed))]
    parts = *above, (1 - sum(square > 0 for square in above)) * rest
    total = sum(parts)
    spread = sum(part**2 / of for part, of in zip(parts, free, strict=True))
    freedom = max(total**2 / spread, min(free)) if spread else 0.0
    return _t_test(targets, mean, math.sqrt(total / (targets * seeds)), freedom)


def _t_test(n: int, mean: float, error: float | None, freedom: float) -> TTest:
    # Equal differences have a spread of rounding errors only, whose t would mean nothing.
    if error is None or error < 1e-12 * max(1.0, abs(mean)):
        return TTest(n, mean, error, None)
    from scipy.special import stdtr  # takes a second to import, and only this function needs it

    return TTest(n, mean, error, float(2.0 * stdtr(freedom, -abs(mean) / error)), freedom)


def compare(
    first: Iterable[RunResult], second: Iterable[RunResult], select: Selection = "last", value: Value = RunResult.score
) -> Comparison | None:
    """``first`` minus ``second`` in percentage points; None where they share no (target, seed).

    Args:
        first: results of one method, each (target, seed) once.
        select: the selection rule whose round is taken.
        value: what is compared. A result for which it is None does not count.

    Example:
        >>> def result(method, seed, accuracy):
        ...     selected = {"last": {"round": 1, "accuracy": accuracy}}
        ...     fixed = {"target": "a", "classes": ["0", "1"], "rounds": 1, "seconds": 1.0, "mini_batches": 1}
        ...     return RunResult(method=method, seed=seed, selected=selected, threads=1, device="cpu", **fixed)
        >>> ours = [result("ours", seed, accuracy) for seed, accuracy in enumerate([72.0, 74.0, 76.0])]
        >>> theirs = [result("theirs", seed, 70.0) for seed in range(3)]
        >>> found = compare(ours, theirs)
        >>> found.clustered, found.seeds.mean, round(found.seeds.p, 4)
        (None, 4.0, 0.0742)
    """
    first = list(first)
    by_target, other = _by_target(first, select, value), _by_target(second, select, value)
    differences: dict[str, dict[int, float]] = {}
    for target in [target for target in by_target if target in other]:
        seeds = sorted(by_target[target].keys() & other[target].keys())
        if seeds:
            differences[target] = {seed: by_target[target][seed] - other[target][seed] for seed in seeds}
    if not differences:
        return None
    complete = sorted(set[int].intersection(*map(set, differences.values())))
    means = [fmean(by_seed[seed] for by_seed in differences.values()) for seed in complete]
    clusters = [[by_seed[seed] for seed in complete] for by_seed in differences.values()]
    independent = not share_sites(first)
    return Comparison(
        cluster_test(clusters) if len(clusters) > 1 and len(complete) > 1 and independent else None,
        t_test(means) if means else None,
        {target: t_test(list(by_seed.values())) for target, by_seed in differences.items()},
    )


def share_sites(results: Iterable[RunResult]) -> bool:
    """Whether targets have sites in common, as pairs of sites do: they are no clusters, and none is a new draw.

    Example:
        >>> share_sites([])
        False
    """
    targets_of: dict[str, set[str]] = {}
    for result in results:
        if result.labelled:
            return True
        for measured in result.sites:
            if measured.part == "target":
                targets_of.setdefault(measured.site, set()).add(result.target)
    return any(len(targets) > 1 for targets in targets_of.values())


def _by_target(results: Iterable[RunResult], select: Selection, value: Value) -> dict[str, dict[int, float]]:
    by_target: dict[str, dict[int, float]] = {}
    for result in results:
        number = value(result, select)
        if number is not None:
            by_target.setdefault(result.target, {})[result.seed] = number
    return by_target


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction of p-values that are looked at together. None, for no test, stays None and does not count.

    The smallest of m is multiplied by m, the next by m − 1, and so on. None may fall below the one before it or rise
    above 1. The chance of one or more false positives then stays below the level that all are compared with.

    Example:
        >>> holm([0.01, 0.04, None, 0.03])
        [0.03, 0.06, None, 0.06]
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[index] = highest
    return corrected
