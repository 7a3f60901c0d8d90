"""What to expect at the next site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fedshift.evaluation.summary import AVERAGE
from fedshift.report.table import Table


@dataclass(frozen=True)
class Expected:
    """What a model that is trained likewise reaches at one more site, in percent.

    Attributes:
        mean: the method's average over the targets, as the table has it.
        low, high: 95 % prediction interval for one more site; None where the targets cannot give one.
        sites: number of targets behind it.
    """

    mean: float
    low: float | None
    high: float | None
    sites: int


def next_site(method: str, able: Sequence[str], table: Table) -> Expected:
    """What ``method`` reaches at the next site: its average, and an interval for one more target.

    With k targets of means m and n seeds, half the interval is t₀.₉₇₅(k−1) √(s²(m)(1 + 1/k) + (1 − 1/n) s²(seeds)):
    one more target, of one training. The targets had a part in the choice of the method, so its average is a little
    too good. The interval also covers the average that the choice reaches at targets which had no part in it.
    """
    entries = [{target: table.cells[name][target] for target in table.columns[:-1]} for name in able]
    rows = {
        name: {target: cell.row for target, cell in line.items() if cell}
        for name, line in zip(able, entries, strict=True)
    }
    own = list(rows[method].values())
    average = table.cells[method][AVERAGE]
    assert average is not None
    mean, k, n = average.row.mean, len(own), max(row.n for row in own)
    if k < 2 or table.measure.repeat == "split":  # pairs share sites, so none is a new draw
        return Expected(mean, None, None, k)
    from scipy.special import stdtrit  # takes a second to import, and only this function needs it

    spread = variance([row.mean for row in own]) * (1 + 1 / k)
    within = [variance(row.seeds) for row in own if row.n > 1]
    spread += (1 - 1 / n) * fmean(within) if within else 0.0
    half = float(stdtrit(k - 1, 0.975)) * math.sqrt(spread)
    best = min if table.measure.less_is_better else max
    elsewhere = []
    for target in rows[method]:
        others = {name: fmean(row.mean for at, row in line.items() if at != target) for name, line in rows.items()}
        elsewhere.append(rows[best(others, key=others.__getitem__)][target].mean)
    low, high = min(mean, fmean(elsewhere)) - half, max(mean, fmean(elsewhere)) + half
    return Expected(mean, max(0.0, low), min(100.0, high) if table.measure.unit else high, k)
