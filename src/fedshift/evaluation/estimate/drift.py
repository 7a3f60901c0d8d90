"""Whether new samples differ from those of before, by sums over each: tests with a stated level of false alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.sums import BANDS, answers_of, probabilities

_DRAWS = 9999
"""Of the test of answers; its smallest p is 1 in 10,000."""


@dataclass(frozen=True)
class ColumnSums:
    """A column's number of values, their mean and their deviation."""

    count: int
    mean: float
    std: float

    def __add__(self, other: ColumnSums) -> ColumnSums:
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        apart = self.count * other.count * (self.mean - other.mean) ** 2 / count
        squares = self.count * self.std**2 + other.count * other.std**2 + apart
        return ColumnSums(count, mean, float(np.sqrt(squares / count)))


def answers(scores: ArrayLike) -> NDArray[np.int64]:
    """How many samples get each class in each band of confidence, flattened (classes · bands,).

    Args:
        scores: probabilities (n, classes).

    Example:
        >>> answers([[0.95, 0.05], [0.4, 0.6]]).tolist()
        [0, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    """
    shares = probabilities(scores)
    predicted, bands = answers_of(shares)
    counts = np.zeros((shares.shape[1], BANDS), dtype=np.int64)
    np.add.at(counts, (predicted, bands), 1)
    return counts.reshape(-1)


def answers_differ(before: ArrayLike, now: ArrayLike, seed: int = 0) -> float:
    """p of the hypothesis that two counts over the same cells are draws of one distribution.

    The chi-squared statistic, with its distribution given both sums by simulation, so that small counts do no harm.

    Source: Patefield, An efficient method of generating random R × C tables with given row and column totals, Applied
    Statistics 1981, has the distribution.

    Args:
        before, now: counts (cells,).
        seed: of the simulation.

    Example:
        >>> answers_differ([50, 50], [25, 25]) > 0.9, answers_differ([50, 50], [45, 5]) < 0.001
        (True, True)
    """
    first, second = np.asarray(before, dtype=np.int64), np.asarray(now, dtype=np.int64)
    whole, number = first + second, int(second.sum())
    if number == 0 or first.sum() == 0:
        return 1.0
    cells = whole > 0
    expected = whole[cells] * number / whole.sum()

    def statistic(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(((counts[..., cells] - expected) ** 2 / expected).sum(axis=-1))

    drawn = np.random.default_rng([seed, 31]).multivariate_hypergeometric(whole, number, _DRAWS, method="marginals")
    return float((1 + np.count_nonzero(statistic(drawn) >= statistic(second) - 1e-9)) / (1 + _DRAWS))


def columns_differ(before: Mapping[str, ColumnSums], now: Mapping[str, ColumnSums]) -> dict[str, float]:
    """Column → p of the hypothesis that its mean is the same in both (Welch, Biometrika 1947).

    Example:
        >>> old = {"age": ColumnSums(200, 60.0, 10.0)}
        >>> columns_differ(old, {"age": ColumnSums(50, 60.5, 10.0)})["age"] > 0.5
        True
        >>> columns_differ(old, {"age": ColumnSums(50, 70.0, 10.0)})["age"] < 1e-6
        True
    """
    from scipy.stats import ttest_ind_from_stats  # takes a second to import

    result = {}
    for name, item in now.items():
        known = before.get(name)
        if known is None or min(item.count, known.count) < 2:
            continue
        if item.std == known.std == 0:
            result[name] = float(item.mean == known.mean)
            continue
        scale = [np.sqrt(each.count / (each.count - 1)) for each in (known, item)]
        test = ttest_ind_from_stats(
            known.mean, known.std * scale[0], known.count, item.mean, item.std * scale[1], item.count, equal_var=False
        )
        result[name] = float(test.pvalue)
    return result
