"""Means over runs, for the plots and tables of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from fedshift.evaluation.records import RoundRecord, RunResult


def mean_over_targets(
    runs: Sequence[tuple[RunResult, list[RoundRecord]]],
) -> list[tuple[int, float, float, float | None]]:
    """The curve of a method over rounds: means over targets and seeds.

    It uses only seeds that have every target, and only rounds that all of these runs measured. Otherwise the curve
    would jump where a target is missing.

    Args:
        runs: the finished runs of one method with their rounds.

    Returns:
        Per round: its number, the mini-batches per site, the accuracy in percent, and the standard deviation of the
        accuracy over seeds (None for one seed).
    """
    targets, both = {result.target for result, _ in runs}, all(result.labelled for result, _ in runs)
    by_seed: dict[int, dict[str, dict[int, RoundRecord]]] = defaultdict(dict)
    for result, rounds in runs:
        by_seed[result.seed][result.target] = {record.round: record for record in rounds if record.target_accuracy}
    whole = [by_target for by_target in by_seed.values() if by_target.keys() == targets]
    if not whole:
        return []
    common = set[int].intersection(*(set(rounds) for by_target in whole for rounds in by_target.values()))
    points = []
    for number in sorted(common):
        seeds = [fmean(rounds[number].score(both) or 0.0 for rounds in by_target.values()) for by_target in whole]
        batches = fmean(rounds[number].mini_batches for by_target in whole for rounds in by_target.values())
        points.append((number, batches, fmean(seeds), stdev(seeds) if len(seeds) > 1 else None))
    return points


def mean_by_kind(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Kind → mean over runs. A run without the kind counts as 0."""
    kinds = {kind for count in counts for kind in count}
    return {kind: fmean(count.get(kind, 0) for count in counts) for kind in kinds}


def mean_per_class(runs: Sequence[RunResult]) -> dict[int, float]:
    """Class number → mean accuracy in the last round, over the runs whose target has the class."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        last = run.selected["last"]
        for index, accuracy in enumerate(last.per_class if last is not None else []):
            if accuracy is not None:
                values[index].append(accuracy)
    return {index: fmean(accuracies) for index, accuracies in values.items()}
