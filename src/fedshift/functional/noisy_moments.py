"""Counts, sums and sums of squares of bounded columns under differential privacy: the Gaussian mechanism.

A value x of a column with the range [a, b] is u = (x - m) / h, with m = (a + b) / 2 and h = (b - a) / 2, cut off at -1
and 1. A row adds (1, u, u²) to the three sums of the column, or nothing where its value is missing. If one row changes,
the three sums change by a vector of norm 2 at most: (u - v)² (1 + (u + v)²) is largest at u = 1, v = -1, and a row that
comes or goes changes them by √3 at most. J columns together change by 2 √J.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ranges = Mapping[str, tuple[float, float]]
"""Column → its least and largest value."""
_LEAST_DEVIATION = 0.01
"""The least deviation of a column, in halves of its range: noise can make a variance negative."""


def within(values: Floats, bounds: tuple[float, float] | None) -> Floats:
    """Values of a column as numbers in [-1, 1], NaN as NaN; without ``bounds`` as they are.

    Example:
        >>> within(np.array([0.0, 50.0, 300.0]), (0, 200)).tolist()
        [-1.0, -0.5, 1.0]
    """
    if bounds is None:
        return values
    least, most = bounds
    middle, half = (least + most) / 2, (most - least) / 2
    return np.asarray(np.clip((values - middle) / half, -1.0, 1.0))


def change_of_one_row(columns: int) -> float:
    """The norm by which one row can change the three sums of so many columns: 2 √J, as derived above.

    Example:
        >>> change_of_one_row(4)
        4.0
    """
    return 2 * math.sqrt(columns)


def possible(sums: Floats, rows: int) -> Floats:
    """Noisy sums as sums that columns of so many rows can have. It looks at nothing but the noisy sums.

    ``sums``: count, total and squares of each column, (columns, 3), of values in [-1, 1]. ``rows``: number of rows,
    which is public. Returns (columns, 3). Counts are whole numbers from 1 to ``rows``.

    Example:
        >>> possible(np.array([[7.6, 9.0, -1.0]]), 10).tolist()
        [[8.0, 8.0, 8.0008]]
    """
    count = np.clip(np.round(sums[:, 0]), 1, rows)
    total = np.clip(sums[:, 1], -count, count)
    squares = np.maximum(np.minimum(sums[:, 2], count), total**2 / count + _LEAST_DEVIATION**2 * count)
    return np.stack([count, total, squares], axis=1)


def unscale(sums: Floats, least: Floats, most: Floats) -> Floats:
    """Sums of u as sums of x = m + h u, column by column; both (columns, 3).

    Example:
        >>> unscale(np.array([[2.0, 1.0, 1.0]]), np.array([0.0]), np.array([200.0])).tolist()  # of 100 and 200
        [[2.0, 300.0, 50000.0]]
    """
    count, total, squares = sums.T
    middle, half = (least + most) / 2, (most - least) / 2
    return np.stack(
        [
            count,
            middle * count + half * total,
            middle**2 * count + 2 * middle * half * total + half**2 * squares,
        ],
        axis=1,
    )
