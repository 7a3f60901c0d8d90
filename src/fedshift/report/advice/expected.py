"""What to expect at the next site."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean, variance

from fedshift.evaluation.summary import AVERAGE, Row
from fedshift.report.table import Table

_EDGE = 0.05
"""Percent from which a share counts as 0 or 100: a logit has neither."""
_NORMAL = NormalDist().inv_cdf(0.975)
ByTarget = Mapping[str, Row]


@dataclass(frozen=True)
class Expected:
    """What a model that is trained likewise reaches at one more site, in percent."""

    mean: float  # the method's average over the targets, without those of few samples
    low: float | None  # 95 % prediction interval for one more site; None where the targets cannot give one
    high: float | None  # likewise
    sites: int  # number of targets behind it
    few: tuple[str, ...]  # the targets that it leaves out, since too few samples tell there whether a model is right
    average: float  # the average over all targets, as the table has it


def next_site(method: str, able: Sequence[str], table: Table, few: Collection[str] = ()) -> Expected:
    """What ``method`` reaches at the next site: its average, and an interval for one more target.

    With k targets of values zᵢ and n seeds, half the interval is
    t₀.₉₇₅(k−1) √(max(s²(z), v̄)(1 + 1/k) + (1 − 1/n) s²(seeds)): one more target, of one training. Shares are taken as
    logits, as meta-analyses of prediction models do (Snell et al., 2018), so no interval is cut at 0 or 100 %. v̄ is the
    mean variance over the samples of a target, from its interval: targets of few samples that agree by chance promise
    no more than their samples can. The targets had a part in the choice of the method, so its average is a little too
    good. The interval also covers the average that the choice reaches at targets which had no part in it.

    ``able``: the methods among which it was chosen; ``few``: targets whose numbers rest on so few samples that the
    average leaves them out, unless all do.
    """
    targets = [target for target in table.columns[:-1] if target not in few] or list(table.columns[:-1])
    rows = {name: _rows_of(table, name, targets) for name in able}
    chosen, average = rows[method], table.cells[method][AVERAGE]
    assert average is not None
    left = tuple(target for target in table.columns[:-1] if target not in targets)
    mean = fmean(row.mean for row in chosen.values()) if left and chosen else average.row.mean
    k = len(chosen)
    if k < 2 or table.measure.share_sites:  # no target is a new draw
        return Expected(mean, None, None, k, left, average.row.mean)
    share = table.measure.unit == "%"
    best = min if table.measure.less_is_better else max
    elsewhere = []
    sums = {name: sum(Fraction(row.mean) for row in line.values()) for name, line in rows.items()}
    for target in chosen:
        others = {name: _mean_without(target, line, sums[name]) for name, line in rows.items()}
        elsewhere.append(_to_scale(rows[best(others, key=others.__getitem__)][target].mean, share))
    ends = fmean(_to_scale(row.mean, share) for row in chosen.values()), fmean(elsewhere)
    half = _half(list(chosen.values()), share)
    low, high = _from_scale(min(ends) - half, share), _from_scale(max(ends) + half, share)
    return Expected(mean, max(0.0, min(low, mean)), max(high, mean), k, left, average.row.mean)


def _mean_without(target: str, line: ByTarget, whole: Fraction | int) -> float:
    """The mean of a method's numbers at the other targets, from their exact sum: of thousands, none is added twice."""
    left = whole - (Fraction(line[target].mean) if target in line else 0)
    return float(left) / (len(line) - (target in line))


def _rows_of(table: Table, method: str, targets: Sequence[str]) -> ByTarget:
    cells = ((target, table.cells[method][target]) for target in targets)
    return {target: cell.row for target, cell in cells if cell}


def _half(rows: Sequence[Row], share: bool) -> float:
    """Half the interval, on the scale of `_to_scale`."""
    from scipy.special import stdtrit  # takes a second to import, and only this function needs it

    k, n = len(rows), max(row.n for row in rows)
    spread = variance([_to_scale(row.mean, share) for row in rows])
    of_samples = [
        ((_to_scale(row.interval[1], share) - _to_scale(row.interval[0], share)) / (2 * _NORMAL)) ** 2
        for row in rows
        if row.interval is not None
    ]
    within = [variance([_to_scale(seed, share) for seed in row.seeds]) for row in rows if row.n > 1]
    whole = max(spread, fmean(of_samples) if of_samples else 0.0) * (1 + 1 / k)
    whole += (1 - 1 / n) * fmean(within) if within else 0.0
    return float(stdtrit(k - 1, 0.975)) * math.sqrt(whole)


def _to_scale(number: float, share: bool) -> float:
    """The logit of a share in percent; other numbers as they are."""
    if not share:
        return number
    inside = min(max(number, _EDGE), 100.0 - _EDGE)
    return math.log(inside / (100.0 - inside))


def _from_scale(number: float, share: bool) -> float:
    return 100.0 / (1.0 + math.exp(-min(max(number, -700.0), 700.0))) if share else number
