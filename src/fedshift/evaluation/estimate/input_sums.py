"""Samples of which only sums are known: how far others are from them, and what values are usual there.

A labelled site tells of each value of its samples the sum and the sum of squares. These add up over sites, and a site
without labels compares its own samples with them by itself: `fedshift.evaluation.estimate.distances` needs means and
deviations, but for the nearest samples, and so do changes and answers nearby (`fedshift.evaluation.estimate.changes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.estimate.changes import Usual
from fedshift.evaluation.estimate.distances import (
    COMPARED,
    LEAST,
    MOST_SKEWED,
    Apart,
    likeness,
    skewnesses,
    values_apart,
)
from fedshift.evaluation.estimate.sums import Numbers

MOST_VALUES = 12_288
"""Values of a sample of which sums are told: a colour image of 64 by 64 pixels has so many."""


@dataclass(frozen=True)
class Moments:
    """Sums over samples.

    Attributes:
        samples: how many there are.
        total, squares: of each value its sum and the sum of its squares (d,).
        cubes: the sum of its cubes; None where that is not known.
    """

    samples: int
    total: Numbers
    squares: Numbers
    cubes: Numbers | None = None

    @classmethod
    def of(cls, inputs: NDArray[Any], least: int = 1) -> Moments:
        """Of samples (n, …) of numbers or bytes.

        Args:
            inputs: the samples.
            least: a value that differs from the usual one in fewer samples is told as the usual one in all of them; as
                0 where too few samples have that.

        Example:
            >>> rows = np.array([[1.0, 0.0]] * 11 + [[3.0, 1.0]])
            >>> Moments.of(rows).total.tolist(), Moments.of(rows, least=2).total.tolist()
            ([14.0, 1.0], [12.0, 0.0])
        """
        rows = inputs.reshape(len(inputs), -1).astype(np.float64)
        usual = np.sort(rows, axis=0)[len(rows) // 2]
        same = (rows == usual).sum(axis=0)
        few = (len(rows) - same > 0) & (len(rows) - same < least)
        rows = np.where(few, np.where(same >= least, usual, 0.0), rows)
        return cls(len(rows), rows.sum(axis=0), np.square(rows).sum(axis=0), (rows**3).sum(axis=0))

    def __add__(self, other: Moments) -> Moments:
        cubes = None if self.cubes is None or other.cubes is None else self.cubes + other.cubes
        return Moments(self.samples + other.samples, self.total + other.total, self.squares + other.squares, cubes)

    @property
    def mean(self) -> Numbers:
        """Of each value (d,)."""
        return self.total / self.samples

    @property
    def deviation(self) -> Numbers:
        """Of each value (d,)."""
        return np.asarray(np.sqrt(np.maximum(self.squares / self.samples - self.mean**2, 0.0)))

    @property
    def skewness(self) -> Numbers | None:
        """Of each value (d,), cut at 3; 0 of a constant. None where cubes are not known.

        Example:
            >>> Moments.of(np.array([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0]])).skewness.round(2).tolist()
            [0.71, 0.0]
        """
        if self.cubes is None:
            return None
        mean, deviation = self.mean, self.deviation
        with np.errstate(over="ignore", invalid="ignore"):
            third = self.cubes / self.samples - 3 * mean * self.squares / self.samples + 2 * mean**3
            varied = deviation > np.maximum(1e-6 * np.abs(mean), 1e-30)
            scaled = np.divide(third, deviation**3, out=np.zeros_like(third), where=varied)
        return np.asarray(np.clip(np.nan_to_num(scaled), -MOST_SKEWED, MOST_SKEWED))

    def usual(self, shape: Sequence[int]) -> Usual:
        """What is usual, of samples of this shape; images have three sizes and one deviation of all their values.

        Example:
            >>> Moments.of(np.array([[0.0], [2.0]])).usual((1,)).deviation.tolist()
            [1.0]
        """
        mean = self.mean.reshape(*shape).astype(np.float32)
        if len(shape) < 3:
            return Usual(mean, self.deviation.reshape(*shape).astype(np.float32))
        whole = self.squares.mean() / self.samples - self.mean.mean() ** 2
        return Usual(mean, np.asarray(np.sqrt(max(whole, 0.0)), dtype=np.float32))

    def apart(self, inputs: NDArray[Any]) -> Apart:
        """How far samples (n, …) are: `Samples.apart`, but for the nearest.

        Example:
            >>> draw = np.random.default_rng(0)
            >>> there = Moments.of(draw.normal(size=(300, 4)))
            >>> there.apart(3 * draw.normal(size=(300, 4))).spread > 0.9
            True
        """
        varied = self.deviation[self.deviation > 0]
        least = LEAST * (float(np.median(varied)) if len(varied) else 1.0)
        rows = inputs.reshape(len(inputs), -1)[:COMPARED].astype(np.float64)
        apart, skewness = values_apart(rows, self.mean, self.deviation + least, least), self.skewness
        return apart if skewness is None else replace(apart, skewed=likeness(skewnesses(rows), skewness))
