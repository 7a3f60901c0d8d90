"""Rows of which an estimate knows less than their number says: copies of other rows, and rows unlike all in training.

A copied row brings no evidence of its own, so a file in which ten patients stand fifty times is as good as ten rows. Of
a row with an unknown category, or a value far outside the training data, the left-out sites say nothing: it may be
answered rightly or wrongly, and the interval has room for both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def share_of_copies(rows: ArrayLike) -> float:
    """The probability that two rows (n, …), drawn without replacement, are equal.

    Source: Simpson, Measurement of diversity, Nature 1949. It does not depend on how many rows there are.

    Example:
        >>> share_of_copies([[1.0], [2.0], [3.0]]), share_of_copies([[1.0], [1.0]])
        (0.0, 1.0)
    """
    flat = np.ascontiguousarray(np.asarray(rows)).reshape(len(np.asarray(rows)), -1)
    if len(flat) < 2:
        return 0.0
    whole: NDArray[np.void] = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
    counts = np.unique(whole, return_counts=True)[1].astype(np.float64)
    return float(counts @ (counts - 1) / (len(flat) * (len(flat) - 1)))


def worth(rows: int, copied: float) -> float:
    """As how many different rows so many count, two of which are copies with this probability.

    Example:
        >>> round(worth(500, share_of_copies([[row % 10] for row in range(500)])), 1), worth(500, 0.0)
        (10.0, 500.0)
    """
    return rows / (1 + copied * (rows - 1)) if rows and copied > 0 else float(rows)


def with_room(low: float, high: float, share: float) -> tuple[float, float]:
    """Ends of an interval, as shares, with room for a share of rows of which nothing is known.

    Source: Manski, Nonparametric bounds on treatment effects, American Economic Review 1990.

    Example:
        >>> with_room(0.5, 0.9, 0.25)
        (0.375, 0.925)
    """
    return low * (1 - share), high + (1 - high) * share


def of_whole_rows(low: float, high: float, rows: float) -> tuple[float, float]:
    """Ends of an interval for a share of so many rows: where less than half a row lacks, an end is 0 or 1.

    Example:
        >>> of_whole_rows(0.51, 0.98, 10), of_whole_rows(0.51, 0.98, 100)
        ((0.51, 1.0), (0.51, 0.98))
    """
    return (0.0 if low * rows < 0.5 else low), (1.0 if (1 - high) * rows < 0.5 else high)
