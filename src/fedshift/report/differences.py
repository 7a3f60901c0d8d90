"""Differences between methods, tested over seeds: the table in a report and in the benchmarks' pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.significance import Comparison, TTest, compare, holm
from fedshift.evaluation.summary import Value
from fedshift.report.measures import Measure
from fedshift.report.table import MISSING
from fedshift.text import in_unit, printable

LEVEL = 0.05
"""A target's difference is marked if its p is below this after Holm's correction."""


@dataclass(frozen=True)
class Difference:
    """One method minus another.

    Attributes:
        name: "first − second".
        comparison: the tests of the average and of each target.
        corrected: p of the average after Holm's correction over all differences of the table.
        marked: targets whose p is below `LEVEL` after Holm's correction over the targets of this difference.
    """

    name: str
    comparison: Comparison
    corrected: float | None
    marked: frozenset[str]


def differences(
    results: Iterable[RunResult],
    pairs: Iterable[tuple[str, str]],
    select: Selection = "last",
    value: Value = RunResult.score,
) -> list[Difference]:
    """Compare pairs of methods.

    Args:
        results: finished runs.
        pairs: (first, second) names of methods, for the difference first − second.
        select: the selection rule whose round is taken.
        value: what is compared.

    Returns:
        A difference for each pair that shares a target and a seed, in the order of ``pairs``.
    """
    by_method: dict[str, list[RunResult]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    found = [
        (f"{first} − {second}", comparison)
        for first, second in pairs
        if (comparison := compare(by_method.get(first, ()), by_method.get(second, ()), select, value)) is not None
    ]
    corrected = holm([None if one.average is None else one.average.p for _, one in found])
    return [Difference(name, one, p, frozenset(_marked(one))) for (name, one), p in zip(found, corrected, strict=True)]


def _marked(comparison: Comparison) -> Iterable[str]:
    corrected = holm([test.p for test in comparison.targets.values()])
    return (target for target, p in zip(comparison.targets, corrected, strict=True) if p is not None and p < LEVEL)


def head(targets: Sequence[str], measure: Measure) -> list[str]:
    """The names of the table's columns."""
    return ["difference", "average", f"{measure.repeat}s", "t", "p", "p (Holm)", *targets]


def line(difference: Difference, targets: Sequence[str], unit: str = "%") -> list[str]:
    """The cells of one difference as plain text, in the order of `head`; ``unit``: as in `Measure`."""
    average, by_target = difference.comparison.average, difference.comparison.targets
    cells = [difference.name, _mean(average, unit), str(average.n) if average else MISSING]
    cells.append(MISSING if average is None or average.t is None else _signed(average.t))
    cells += [p_value(average.p if average else None), p_value(difference.corrected)]
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
    columns = "pairs of sites" if measure.repeat == "split" else "targets"
    return (
        f"{unit}, mean ± standard error over {repeats}. t and p: Student's paired t-test over "
        f"{repeats} of the average over {columns} ({repeats} − 1 degrees of freedom, two-sided); p (Holm) is corrected "
        f"for all differences of this table. * p < {LEVEL} by the same test in that column alone, Holm's correction "
        "over the columns of a line."
    )


def _mean(test: TTest | None, unit: str) -> str:
    if test is None:
        return MISSING
    error = test.standard_error
    if not unit:
        like = max(abs(test.mean), error or 0.0)
        sign = "−" if test.mean < 0 else "+"
        return f"{sign}{in_unit(abs(test.mean), like)}" + ("" if error is None else f" ± {in_unit(error, like)}")
    return _signed(test.mean) + ("" if error is None else f" ± {error:.2f}")


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # + 0.0 turns −0 into 0


def markdown(found: Sequence[Difference], targets: Sequence[str], measure: Measure) -> str:
    """The table in Markdown."""
    names = head(targets, measure)
    lines = [
        names,
        ["---", *("---:" for _ in names[1:])],
        *(line(difference, targets, measure.unit) for difference in found),
    ]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in cells) + " |" for cells in lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\|*_`<[" else letter for letter in printable(text))
