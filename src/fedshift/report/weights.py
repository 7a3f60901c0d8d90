"""Each site's weight in the aggregate, round by round, from the records of methods that report it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from fedshift.evaluation.records import RoundRecord
from fedshift.report.plots import Curve

_MOVES = 0.02
"""Weights that change by no more than this are treated as constant and are not plotted."""


def weights_over_rounds(runs: Sequence[Sequence[RoundRecord]]) -> dict[str, Curve]:
    """Curves of the sites' weights at one target.

    Args:
        runs: the rounds of each seed.

    Returns:
        Site → (rounds, mean over seeds, standard deviation over seeds), for the rounds that all seeds report. Empty if
        the method does not report one number per site.
    """
    series = [_numbers(rounds) for rounds in runs]
    if not series or not all(series):
        return {}
    common = sorted(set[int].intersection(*(set(weights) for weights in series)))
    sites = dict.fromkeys(site for weights in series for number in common for site in weights[number])
    curves: dict[str, Curve] = {}
    for site in sites:
        values = [[weights[number].get(site, 0.0) for weights in series] for number in common]
        spread = [stdev(seeds) for seeds in values] if len(series) > 1 else None
        curves[site] = (common, [fmean(seeds) for seeds in values], spread)
    return curves


def moving(curves: Iterable[Curve]) -> bool:
    """Whether any weight changes by more than 0.02 during training."""
    return any(max(mean) - min(mean) > _MOVES for _, mean, _ in curves if len(mean))


def mean_weights(runs: Sequence[Sequence[RoundRecord]], site: str, number: int) -> float | None:
    """The mean weight of ``site`` in round ``number`` over the ``runs`` that report it; None if none does."""
    found = [weights[number][site] for weights in map(_numbers, runs) if site in weights.get(number, {})]
    return fmean(found) if found else None


def _numbers(rounds: Sequence[RoundRecord]) -> dict[int, dict[str, float]]:
    out: dict[int, dict[str, float]] = defaultdict(dict)
    for record in rounds:
        for site, weight in record.aggregation_weights.items():
            if isinstance(weight, int | float):
                out[record.round][site] = float(weight)
    return out
