"""Whether two methods differ: Student's paired t-test over seeds, of the average over targets and at each target.

A seed is one repeat of an experiment: it draws the split, the common start and the order of the samples. The targets of
one seed share sites. So a test that counted every (target, seed) as a repeat would count too many independent repeats,
and take the spread between targets for chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.summary import Value, mean_and_standard_error


@dataclass(frozen=True)
class TTest:
    """The result of a two-sided t-test.

    Attributes:
        n: number of repeats.
        mean: mean difference.
        standard_error: of the mean; None for one repeat.
        p: two-sided p of Student's t-test; None for one repeat, and where all differences are equal.
    """

    n: int
    mean: float
    standard_error: float | None
    p: float | None

    @property
    def t(self) -> float | None:
        """mean / standard error, with n − 1 degrees of freedom; None where there is no test."""
        return None if self.p is None or not self.standard_error else self.mean / self.standard_error


@dataclass(frozen=True)
class Comparison:
    """One method minus another.

    Attributes:
        average: test over seeds of the mean over targets; None where no seed has every common target.
        targets: test over seeds at each target that both methods have.
    """

    average: TTest | None
    targets: Mapping[str, TTest]


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
    # Equal differences have a spread of rounding errors only, whose t would mean nothing.
    if error is None or error < 1e-12 * max(1.0, abs(mean)):
        return TTest(len(differences), mean, error, None)
    from scipy.special import stdtr  # takes a second to import, and only this function needs it

    return TTest(len(differences), mean, error, float(2.0 * stdtr(len(differences) - 1, -abs(mean) / error)))


def compare(
    first: Iterable[RunResult],
    second: Iterable[RunResult],
    select: Selection = "last",
    value: Value = RunResult.score,
) -> Comparison | None:
    """``first`` minus ``second`` in percentage points; None where they share no (target, seed).

    Args:
        first: results of one method, each (target, seed) once.
        second: results of the other.
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
        >>> found.average.mean, round(found.average.p, 4)
        (4.0, 0.0742)
    """
    one, other = _by_target(first, select, value), _by_target(second, select, value)
    differences: dict[str, dict[int, float]] = {}
    for target in [target for target in one if target in other]:
        seeds = sorted(one[target].keys() & other[target].keys())
        if seeds:
            differences[target] = {seed: one[target][seed] - other[target][seed] for seed in seeds}
    if not differences:
        return None
    complete = sorted(set[int].intersection(*map(set, differences.values())))
    means = [fmean(by_seed[seed] for by_seed in differences.values()) for seed in complete]
    targets = {target: t_test(list(by_seed.values())) for target, by_seed in differences.items()}
    return Comparison(t_test(means) if means else None, targets)


def _by_target(results: Iterable[RunResult], select: Selection, value: Value) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for result in results:
        number = value(result, select)
        if number is not None:
            found.setdefault(result.target, {})[result.seed] = number
    return found


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction of p-values that are looked at together. None, for no test, stays None and does not count.

    The smallest of m is multiplied by m, the next by m − 1, and so on. None may fall below the one before it or rise
    above 1. The chance of one or more false positives then stays below the level that all are compared with.

    Example:
        >>> holm([0.01, 0.04, None, 0.03])
        [0.03, 0.06, None, 0.06]
    """
    order = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[place] = highest
    return corrected
