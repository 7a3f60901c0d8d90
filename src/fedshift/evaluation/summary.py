"""From single runs to the rows of a table: mean and standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fedshift.evaluation.records import RunResult, Selection, SiteMetric, SiteMetrics
from fedshift.section import Section

AVERAGE = "average"


Value = Callable[[RunResult, Selection], float | None]
"""What a table reports: a number of a finished run in the selected round; None where there is none."""


class Row(Section):
    """One method at one target, or (target "average") the mean over its targets. Accuracies in percent.

    ``seeds`` holds the value of every seed, in the order of the seeds' numbers: the accuracy, or what else the table
    reports, such as a Dice coefficient in percent or a Hausdorff distance in pixels. ``n``, ``mean`` and
    ``standard_error`` follow from it. ``interval`` is over the target's samples, the mean of its bounds over seeds, and
    ``majority`` the share of the target's most frequent class, for other tasks ``baseline`` what a model without
    inputs reaches; None where records do not say.
    """

    method: str
    target: str
    select: Selection
    n: int
    mean: float
    standard_error: float | None
    seeds: list[float]
    interval: tuple[float, float] | None = None
    majority: float | None = None
    baseline: float | None = None

    def plain(self) -> dict[str, Any]:
        """The fields for a file; without ``interval`` and baselines where they are not known."""
        return {
            name: value
            for name, value in self.model_dump(mode="json").items()
            if value is not None or name not in ("interval", "majority", "baseline")
        }


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of ``values`` and its standard error s/√n, with s over n−1; None instead of the error for n = 1.

    Raises:
        ValueError: there is no value.

    Example:
        >>> mean, error = mean_and_standard_error([94.0, 95.0, 96.0])
        >>> mean, round(error, 6)
        (95.0, 0.57735)
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

    The average is taken per seed, unweighted over all targets at which the method has results. Its n counts the seeds
    that have every target. A method without any such seed has no row "average". Results without a round selected by
    ``select`` do not count.

    Args:
        results: finished runs; a (method, target, seed) may occur once.
        select: the selection rule whose round is taken.
        methods: their order. Methods that are not named follow in the order of first appearance.
        value: what is tabulated. A result for which it is None does not count.

    Raises:
        ValueError: a (method, target, seed) occurs twice.

    Example:
        >>> def result(target, seed, accuracy):
        ...     selected = {"last": {"round": 1, "accuracy": accuracy}}
        ...     fixed = {"method": "fedavg", "classes": ["0", "1"], "rounds": 1, "seconds": 1.0, "mini_batches": 1}
        ...     return RunResult(target=target, seed=seed, selected=selected, threads=1, device="cpu", **fixed)
        >>> for row in rows([result("a", 0, 70.0), result("a", 1, 72.0), result("b", 0, 90.0)]):
        ...     print(row.target, row.n, row.mean, row.seeds)
        a 2 71.0 [70.0, 72.0]
        b 1 90.0 [90.0]
        average 1 80.0 [80.0]
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

    values = []
    for method, by_target in table.items():
        for target in order:
            if target in by_target:
                values.append(row_of(method, target, select, _in_order(by_target[target])))
        complete = set[int].intersection(*map(set, by_target.values())) if by_target else set()
        if complete:
            means = {seed: fmean(by_seed[seed] for by_seed in by_target.values()) for seed in complete}
            values.append(row_of(method, AVERAGE, select, _in_order(means)))
    return values


def _in_order(by_seed: Mapping[int, float]) -> list[float]:
    return [by_seed[seed] for seed in sorted(by_seed)]


def with_samples(table_rows: Iterable[Row], results: Iterable[RunResult], metric: SiteMetric) -> list[Row]:
    """The rows with their intervals over samples and the majority classes of their targets, where results have them.

    Example:
        >>> limits = {"auroc": (60.0, 80.0)}
        >>> site = SiteMetrics(site="a", part="target", samples=10, support=[9, 1], values={}, intervals=limits)
        >>> run = RunResult.model_construct(method="fedavg", target="a", sites=[site])
        >>> (row,) = with_samples([row_of("fedavg", "a", "last", [70.0])], [run], "auroc")
        >>> row.interval, row.majority
        ((60.0, 80.0), 90.0)
    """
    by_place: dict[tuple[str, str], list[SiteMetrics]] = {}
    of_round = False  # whether the metric is what rounds are measured by, of which the baselines are
    for result in results:
        of_round = result.metric == metric
        if len(result.targets) == 1:
            by_place.setdefault((result.method, result.target), []).append(result.targets[0])
    out = []
    for row in table_rows:
        sites = by_place.get((row.method, row.target), []) if row.select == "last" else []
        limits = [site.intervals[metric] for site in sites if metric in site.intervals]
        shares = [site.majority for site in sites if site.majority is not None]
        more: dict[str, Any] = {}
        if limits:
            more["interval"] = fmean(low for low, _ in limits), fmean(high for _, high in limits)
        if shares:
            more["majority"] = fmean(shares)
        without_inputs = [site.baseline for site in sites if site.baseline is not None] if of_round else []
        if without_inputs:
            more["baseline"] = fmean(without_inputs)
        out.append(row.model_copy(update=more))
    return out


def row_of(method: str, target: str, select: Selection, seeds: Sequence[float]) -> Row:
    """A row with the mean and standard error of the seeds' values.

    Raises:
        ValueError: there is no value.

    Example:
        >>> row = row_of("fedavg", "a", "last", [70.0, 72.0])
        >>> row.n, row.mean, round(row.standard_error, 6)
        (2, 71.0, 1.0)
    """
    mean, error = mean_and_standard_error(seeds)
    return Row(
        method=method, target=target, select=select, n=len(seeds), mean=mean, standard_error=error, seeds=list(seeds)
    )
