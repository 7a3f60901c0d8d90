"""Differences between methods, each by the test of `fedshift.evaluation.significance`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.significance import Comparison, compare, holm
from fedshift.evaluation.summary import Value

LEVEL = 0.05
"""A target's difference is marked if its p is below this after Holm's correction."""


@dataclass(frozen=True)
class Difference:
    """One method minus another."""

    name: str  # "first − second"
    comparison: Comparison  # the tests of the average and of each target
    corrected: float | None  # p with targets as clusters, after Holm's correction over all differences of the table
    here: float | None  # p over seeds, of these targets only, likewise
    # targets whose p is below `LEVEL` after Holm's correction over the targets of this difference
    marked: frozenset[str]


def differences(
    results: Iterable[RunResult],
    pairs: Iterable[tuple[str, str]],
    select: Selection = "last",
    value: Value = RunResult.score,
) -> list[Difference]:
    """Compare pairs of methods.

    Args:
        pairs: (first, second) names of methods, for the difference first − second.
        select: the selection rule whose round is taken.

    Returns:
        A difference for each pair that shares a target and a seed, in the order of ``pairs``.
    """
    by_method: dict[str, list[RunResult]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    compared = [
        (f"{first} − {second}", comparison)
        for first, second in pairs
        if (comparison := compare(by_method.get(first, ()), by_method.get(second, ()), select, value)) is not None
    ]
    corrected, here = (
        holm([test.p if test is not None else None for test in tests])
        for tests in (
            [comparison.clustered for _, comparison in compared],
            [comparison.seeds for _, comparison in compared],
        )
    )
    return [
        Difference(name, comparison, p, p_here, frozenset(_differing_targets(comparison)))
        for (name, comparison), p, p_here in zip(compared, corrected, here, strict=True)
    ]


def _differing_targets(comparison: Comparison) -> Iterable[str]:
    corrected = holm([test.p for test in comparison.targets.values()])
    return (target for target, p in zip(comparison.targets, corrected, strict=True) if p is not None and p < LEVEL)
