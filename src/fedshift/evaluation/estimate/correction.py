"""What cases with known truth teach: how far the median of estimators is off, from what is seen without labels.

Each left-out site gives many cases: its samples as they are, drawn again in other class frequencies, and changed
(`fedshift.evaluation.estimate.changes`). A ridge regression foretells log-odds of the accuracy, less those of the
median, from what all estimators say, how unlike the answers are, and whether they are kept nearby. A site's cases have
an offset in common, of which a new site knows nothing (a random effect). There is no intercept: changes are no fair
draw of what a new site may be like, so on average they must not move the estimate.

The regression reads one matrix and one vector of each site, and these add up as other sums do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedshift.evaluation.estimate.sums import Numbers

RIDGE, OFFSET = 10.0, 0.3
"""The penalty on squared coefficients, and the variance of a site's offset, in units of a case's noise."""
_FAR = 4.0
"""Features count for no more standard deviations than these."""


@dataclass(frozen=True)
class Case:
    """One case of a left-out site.

    Attributes:
        features: (f,).
        off: log-odds of its accuracy less those of the median of estimators.
        weight: how much it counts.
    """

    features: Numbers
    off: float
    weight: float = 1.0


@dataclass(frozen=True)
class Correction:
    """The coefficients, for features that are standardised over all cases.

    Attributes:
        mean, deviation, coefficients: (f,).
    """

    mean: Numbers
    deviation: Numbers
    coefficients: Numbers

    def at(self, features: Numbers) -> float:
        """What to add to the log-odds of the median.

        Example:
            >>> Correction(np.zeros(1), np.ones(1), np.array([0.5])).at(np.array([2.0]))
            1.0
        """
        return float(standard(features, self.mean, self.deviation) @ self.coefficients)


def learn(sites: Mapping[str, Sequence[Case]]) -> Correction:
    """The correction from each left-out site's cases.

    Example:
        >>> cases = {site: [Case(np.array([float(x)]), 0.5 * x) for x in (-1, 0, 1)] * 40 for site in "ab"}
        >>> round(learn(cases).at(np.array([1.0])), 2)
        0.48
    """
    every = np.stack([case.features for cases in sites.values() for case in cases])
    mean, deviation = every.mean(axis=0), every.std(axis=0) + 1e-6
    square, product = RIDGE * np.eye(every.shape[1]), np.zeros(every.shape[1])
    for cases in sites.values():
        rows = standard(np.stack([case.features for case in cases]), mean, deviation)
        off, weights = np.array([case.off for case in cases]), np.array([case.weight for case in cases])
        noise = np.linalg.inv(np.diag(1 / weights) + OFFSET)
        square += rows.T @ noise @ rows
        product += rows.T @ noise @ off
    return Correction(mean, deviation, np.asarray(np.linalg.solve(square, product), dtype=np.float64))


def standard(features: Numbers, mean: Numbers, deviation: Numbers) -> Numbers:
    """Features in deviations from the mean, at most 4.

    Example:
        >>> standard(np.array([3.0, 90.0]), np.zeros(2), np.array([2.0, 1.0])).tolist()
        [1.5, 4.0]
    """
    return np.clip((features - mean) / deviation, -_FAR, _FAR)
