"""Differences between methods, each by the test of `fedshift.evaluation.significance`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.significance import Comparison, TTest, compare, holm
from fedshift.evaluation.summary import Value
from fedshift.report.measures import MISSING, Measure
from fedshift.text import escape_markdown, in_unit, pipes

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


def head(targets: Sequence[str], measure: Measure) -> list[str]:
    """The names of the table's columns."""
    return ["difference", "average", "t", "df", "p", "p (Holm)", f"{measure.repeat}s", "p here (Holm)", *targets]


def line(difference: Difference, targets: Sequence[str], unit: str = "%") -> list[str]:
    """The cells of one difference as plain text, in the order of `head`; ``unit``: as in `Measure`."""
    comparison, by_target = difference.comparison, difference.comparison.targets
    clustered, seeds = comparison.clustered, comparison.seeds
    cells = [difference.name, _mean(comparison.test, unit)]
    cells.append(MISSING if clustered is None or clustered.t is None else with_sign(clustered.t))
    cells.append(MISSING if clustered is None or clustered.freedom is None else f"{clustered.freedom:.1f}")
    cells += [p_value(clustered.p if clustered else None), p_value(difference.corrected)]
    cells += [str(seeds.n) if seeds else MISSING, p_value(difference.here)]
    return cells + [
        _mean(by_target.get(target), unit) + ("*" if target in difference.marked else "") for target in targets
    ]


def p_value(p: float | None) -> str:
    """p with three decimals.

    Example:
        >>> p_value(0.0483), p_value(0.00002), p_value(None)
        ('0.048', '< 0.001', '–')
    """
    return MISSING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def note(measure: Measure) -> str:
    """A sentence below the table that explains its numbers."""
    repeats = f"{measure.repeat}s"
    unit = "Percentage points" if measure.unit else "In the label's unit"
    here = f"p here: Student's paired t-test over {repeats} of the average over the columns, which speaks of these only"
    test = (
        "t, df and p are those of no row, since columns share sites"
        if measure.share_sites
        else f"t, df and p: one test for every row, a mixed model with targets as clusters and {repeats} crossed with "
        f"them; it needs two targets and two {repeats}"
    )
    return (
        f"{unit}, mean ± standard error. {test}. {here}. Holm: corrected for all differences of this table. "
        f"* p < {LEVEL} over {repeats} in that column alone, Holm's correction over the columns of a line."
    )


def _mean(test: TTest | None, unit: str) -> str:
    if test is None:
        return MISSING
    error = test.standard_error
    if not unit:
        like = max(abs(test.mean), error or 0.0)
        sign = "−" if test.mean < 0 else "+"
        return f"{sign}{in_unit(abs(test.mean), like)}" + ("" if error is None else f" ± {in_unit(error, like)}")
    return with_sign(test.mean) + ("" if error is None else f" ± {error:.2f}")


def with_sign(value: float) -> str:
    """A number with its sign and two decimals.

    Example:
        >>> with_sign(-0.281), with_sign(-0.001)
        ('−0.28', '+0.00')
    """
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # + 0.0 turns −0 into 0


def markdown(tests: Sequence[Difference], targets: Sequence[str], measure: Measure) -> str:
    """The table in Markdown."""
    lines = [head(targets, measure), *(line(difference, targets, measure.unit) for difference in tests)]
    names, *rows = ([escape_markdown(cell) for cell in cells] for cells in lines)
    return pipes(names, rows) + "\n"
