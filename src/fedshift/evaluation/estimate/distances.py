"""How far samples are from those of labelled sites: three numbers, beside what the labelled sites have of each other.

A shift that costs accuracy mostly shows in the samples before it shows in a model's scores: noise spreads them, a unit
puts them where no sample was, an offset moves their means. Sites differ by nature, too. So what counts is by how much
more these samples are apart than each labelled site is from the others.

Values are measured by the means and deviations at the labelled sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]

LEAST = 0.05
"""Deviations are taken for larger by this part of the usual one, so that constant values count for little."""
COMPARED, _KNOWN = 400, 600
"""Samples that are compared, and with how many."""
_STILL = 0.02
"""By this a mean distance of means is taken for larger: without it the logarithm of none has no end."""
FLOOR = 0.4
"""By this the deviation of the left-out sites' distances is taken for larger: they are few."""
MOST = 4.0
"""Distances count for no more."""
MOST_SKEWED = 3.0
"""Skewnesses count for no more: a rare value has a large one."""
ALIKE, TURNED = 0.3, 0.4
"""Where skewnesses of left-out sites are alike from the first, those of samples that have not this part of it are not.
Chosen on benchmarks/estimate.md's data sets: no site that keeps its accuracy is so."""


@dataclass(frozen=True)
class Apart:
    """How far samples are from those of some sites.

    Attributes:
        spread: mean logarithm of a value's deviation here by that there.
        nearest: logarithm of the median distance to the nearest sample there, by that among the samples there; None
            where only sums over the samples are known.
        moved: logarithm of the mean distance of a value's mean from that there, in deviations.
        skewed: how alike the values' skewnesses are to those there, from −1 (mirrored) to 1; None where not known.
    """

    spread: float
    nearest: float | None
    moved: float
    skewed: float | None = None


@dataclass(frozen=True)
class Samples:
    """Samples of labelled sites to compare with.

    Attributes:
        mean, deviation: of each value (d,), the latter larger by `least`.
        least: 0.05 of the median deviation.
        known: some of the samples, standardised (k, d).
        usual: the median distance to the nearest among them.
        skewness: of each value (d,).
    """

    mean: Rows
    deviation: Rows
    least: float
    known: Rows
    usual: float
    skewness: Rows

    @classmethod
    def of(cls, sites: Sequence[NDArray[Any]]) -> Samples:
        """Of the samples of labelled sites, each (n, …) of numbers or bytes; together two or more."""
        rows = _flat(np.concatenate(list(sites)))
        deviation = rows.std(axis=0)
        varied = deviation[deviation > 0]
        least = LEAST * (float(np.median(varied)) if len(varied) else 1.0)
        deviation = deviation + np.float32(least)
        some = np.random.default_rng(0).permutation(len(rows))[:_KNOWN]
        mean = rows.mean(axis=0)
        known = (rows[some] - mean) / deviation
        half = len(known) // 2
        usual = float(np.median(_nearest(known[:half], known[half:])))
        return cls(mean, deviation, least, known, usual, skewnesses(rows))

    def apart(self, inputs: NDArray[Any]) -> Apart:
        """How far samples (n, …) are.

        Example:
            >>> draw = np.random.default_rng(0)
            >>> there = Samples.of([draw.normal(size=(300, 4))])
            >>> alike, wide = there.apart(draw.normal(size=(300, 4))), there.apart(3 * draw.normal(size=(300, 4)))
            >>> abs(alike.spread) < 0.1, wide.spread > 0.9, wide.nearest > alike.nearest + 0.5
            (True, True, True)
        """
        rows = _flat(inputs)[:COMPARED]
        scaled = (rows - self.mean) / self.deviation
        far = float(np.median(_nearest(scaled, self.known)))
        nearest = float(np.log((far + 1e-6) / (self.usual + 1e-6)))
        apart = values_apart(rows, self.mean, self.deviation, self.least, nearest)
        return replace(apart, skewed=likeness(skewnesses(rows), self.skewness))


def values_apart(
    rows: NDArray[Any], mean: NDArray[Any], deviation: NDArray[Any], least: float, nearest: float | None = None
) -> Apart:
    """How far values of samples (n, d) are.

    Args:
        rows: the samples.
        mean, deviation: of each value (d,) there, the latter larger by ``least``.
        least: as of `Samples`.
        nearest: of the result.

    Example:
        >>> values_apart(np.array([[0.0], [2.0]]), np.zeros(1), np.ones(1), 0.0).spread
        0.0
    """
    spread = float(np.log((rows.std(axis=0) + least) / deviation).mean())
    moved = float(np.log(np.abs((rows.mean(axis=0) - mean) / deviation).mean() + _STILL))
    return Apart(spread, nearest, moved)


def skewnesses(rows: NDArray[Any]) -> Rows:
    """The skewness of each value of samples (n, d), cut at 3; 0 of a constant.

    Example:
        >>> skewnesses(np.array([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0]])).round(2).tolist()
        [0.71, 0.0]
    """
    with np.errstate(over="ignore", invalid="ignore"):
        apart = rows - rows.mean(axis=0)
        deviation = apart.std(axis=0)
        scaled = np.divide(apart, deviation, out=np.zeros_like(apart), where=deviation > 0)
        return np.asarray(np.clip(np.nan_to_num((scaled**3).mean(axis=0)), -MOST_SKEWED, MOST_SKEWED))


def likeness(first: NDArray[Any], second: NDArray[Any]) -> float:
    """The cosine of two vectors (d,); 0 if one of them has no length.

    Example:
        >>> likeness(np.array([1.0, 2.0]), np.array([-1.0, -2.0])).__round__(6), likeness(np.ones(2), np.zeros(2))
        (-1.0, 0.0)
    """
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size > 0 else 0.0


def skewed_otherwise(apart: Apart | None, left_out: Sequence[Apart]) -> bool:
    """Whether values are skewed in another way than at left-out sites that are alike, as where columns are mirrored.

    Example:
        >>> there = [Apart(0.0, None, 0.0, 0.8), Apart(0.0, None, 0.0, 0.9)]
        >>> skewed_otherwise(Apart(0.0, None, 0.0, -0.8), there), skewed_otherwise(Apart(0.0, None, 0.0, 0.7), there)
        (True, False)
    """
    known = [item.skewed for item in left_out if item.skewed is not None]
    if apart is None or apart.skewed is None or not known or len(known) < len(left_out):
        return False
    return min(known) > ALIKE and apart.skewed < TURNED * min(known)


def beyond(apart: Apart, left_out: Sequence[Apart]) -> tuple[float, ...]:
    """How much farther than the left-out sites: in standard errors of one more such site, at most `MOST`.

    Args:
        apart: of the samples in question.
        left_out: of each left-out site from the others, two or more.

    Returns:
        of the spread, in either direction; of the nearest samples, unless some are not known, and of the means, where 0
        is the left-out sites' mean.

    Example:
        >>> beyond(Apart(1.0, 0.5, 0.5), [Apart(0.0, 0.5, 0.5), Apart(0.0, 0.5, 0.5)])
        (2.5, 0.0, 0.0)
    """
    nearest = all(item.nearest is not None for item in (apart, *left_out))
    names = ("spread", "nearest", "moved") if nearest else ("spread", "moved")
    here, usual = (np.array([[getattr(item, name) for name in names] for item in of]) for of in ([apart], left_out))
    error = usual.std(axis=0, ddof=1) * np.sqrt(1 + 1 / len(usual)) + FLOOR
    spread, *others = ((here[0] - usual.mean(axis=0)) / error).tolist()
    return min(MOST, abs(spread)), *(min(MOST, max(-2.0, other)) for other in others)


def _flat(inputs: NDArray[Any]) -> Rows:
    return np.asarray(inputs, dtype=np.float32).reshape(len(inputs), -1)


def _nearest(rows: Rows, others: Rows) -> Rows:
    """The distance of each row to the nearest of others (n,)."""
    squares = np.square(rows).sum(axis=1)[:, None] + np.square(others).sum(axis=1) - 2 * rows @ others.T
    return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0)))
