"""From single runs to the rows of a table: mean ± standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict

from fedshift.evaluation.records import RunResult, Selection

AVERAGE = "average"


Value = Callable[[RunResult, Selection], float | None]
"""What a table is about: a number of a finished run in the round that a rule chose; None where there is none."""


class Row(BaseModel):
    """One method at one target, or (target "average") the mean over its targets. Accuracies in percent.

    ``seeds`` holds the accuracy (or what else the table is about, such as a Dice coefficient in percent or a Hausdorff
    distance in pixels) of every seed, in the order of the seeds' numbers; ``n``, ``mean`` and ``standard_error`` follow
    from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    target: str
    select: Selection
    n: int
    mean: float
    standard_error: float | None
    seeds: list[float]


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of ``values`` and its standard error s/√n, with s over n−1; None in place of the latter for n = 1.

    >>> mean_and_standard_error([94.0, 95.0, 96.0])
    (95.0, 0.5773502691896258)

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no values: a mean needs at least one")
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def rows(
    results: Iterable[RunResult],
    select: Selection = "last",
    methods: Sequence[str] = (),
    targets: Sequence[str] = (),
    value: Value = RunResult.score,
) -> list[Row]:
    """One row per (method, target), and after a method's targets its row "average".

    The average is taken per seed, unweighted over all targets at which the method has results; its n counts the seeds
    that have every one of them. A method without any such seed has no row "average". Results to which ``select`` does
    not apply do not count.

    Args:
        results: finished runs; a (method, target, seed) may occur once.
        select: the selection rule whose round is taken.
        methods: their order; those that are not named follow in the order of first appearance.
        targets: their order, likewise.
        value: what is tabulated; a result of which it is None does not count.

    Raises:
        ValueError: a (method, target, seed) occurs twice.
    """
    table: dict[str, dict[str, dict[int, float]]] = {method: {} for method in methods}
    order = dict.fromkeys(targets)
    for result in results:
        by_target = table.setdefault(result.method, {})
        order.setdefault(result.target)
        found_value = value(result, select)
        if found_value is None:
            continue
        by_seed = by_target.setdefault(result.target, {})
        if result.seed in by_seed:
            raise ValueError(f"two results of {result.method} at {result.target} with seed {result.seed}")
        by_seed[result.seed] = found_value

    found = []
    for method, by_target in table.items():
        for target in order:
            if target in by_target:
                found.append(_row(method, target, select, by_target[target]))
        complete = set[int].intersection(*map(set, by_target.values())) if by_target else set()
        if complete:
            means = {seed: fmean(by_seed[seed] for by_seed in by_target.values()) for seed in complete}
            found.append(_row(method, AVERAGE, select, means))
    return found


def _row(method: str, target: str, select: Selection, by_seed: dict[int, float]) -> Row:
    seeds = [by_seed[seed] for seed in sorted(by_seed)]
    mean, error = mean_and_standard_error(seeds)
    return Row(method=method, target=target, select=select, n=len(seeds), mean=mean, standard_error=error, seeds=seeds)
