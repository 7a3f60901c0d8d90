"""What public data sets taught about the median of estimators, and when a shift is harmful: frozen tables.

A federation's own changed samples (`fedshift.evaluation.estimate.correction`) know its model well, but few sites, and
no site that is unlike them by nature. Other federations know how such sites do. So a ridge regression over the sites
of seven public data sets, each in turn without labels, as it is, changed and drawn again, is added in equal parts. It
reads only what the site without labels has more or less of than the left-out sites have of each other.

``python benchmarks/estimate.py`` learns the table of corrections, ``python benchmarks/alarm.py`` that of the alarm, and
both judge each data set by tables of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshift.evaluation.estimate.correction import Correction
from fedshift.evaluation.estimate.estimators import margin, matrix_norm
from fedshift.evaluation.estimate.sums import Numbers

_WIDEST = 1.5
"""Spreads count for no more than this above or below the usual one."""


def sureness(shares: Numbers) -> tuple[float, float]:
    """The mean margin and the matrix norm of probabilities (m, classes).

    Example:
        >>> sureness(np.array([[1.0, 0.0], [0.0, 1.0]]))
        (1.0, 1.0)
    """
    return margin(shares), matrix_norm(shares)


def signs(
    frequencies: float, peak: float, sure: tuple[float, float], nearby: Numbers, spread: float, calibrated: float
) -> Numbers:
    """What the prior reads of a site's samples, before the same of left-out sites is taken from it.

    Args:
        frequencies, peak: of its `Reading`.
        sure: its `sureness`.
        nearby: mean answers nearby (2 · changes,).
        spread: of the samples, see `fedshift.evaluation.estimate.distances.Apart`.
        calibrated: log-odds of the estimator `histogram_binning` less those of the median.

    Example:
        >>> signs(0.1, 0.2, (0.5, 0.7), np.ones(8), 0.3, -0.4).shape
        (14,)
    """
    return np.array([frequencies, peak, *sure, *nearby, spread, calibrated])


def beside(signs: Numbers, usual: Numbers) -> Numbers:
    """The features: signs less the usual ones of left-out sites, the size of a spread, and the calibrated estimate.

    Example:
        >>> beside(np.array([0.5, 0.1, 2.0]), np.array([0.5, 0.6, 1.0])).tolist()
        [0.0, -0.5, 0.5, 2.0]
    """
    gap = signs[:-1] - usual[:-1]
    gap[-1] = np.clip(gap[-1], -_WIDEST, _WIDEST)
    return np.array([*gap, abs(gap[-1]), signs[-1]])


@dataclass(frozen=True)
class Prior:
    """What other federations taught.

    Attributes:
        correction: of the log-odds of the median, from `beside`.
        weights: of how far samples are apart (3,), what is lost, and how odd scores are (2,), see `harm_signs`.
        alarm: a shift may be harmful where their sum is larger.
        sum_weights, sum_alarm: the same where of all samples only sums are known, so not how far the nearest are.
    """

    correction: Correction
    weights: Numbers
    alarm: float
    sum_weights: Numbers
    sum_alarm: float


@dataclass(frozen=True)
class Taught:
    """What to add to the log-odds of the median.

    Attributes:
        here: what this federation's own cases teach.
        prior: the correction that other federations taught.
        usual: the mean signs of left-out sites as they are; None if their samples were not compared.
    """

    here: Correction
    prior: Correction
    usual: Numbers | None

    def at(self, features: Numbers, signs: Numbers | None) -> float:
        """The mean of both corrections; the own one where samples cannot be compared.

        Example:
            >>> here, prior = (Correction(np.zeros(n), np.ones(n), np.full(n, 0.5)) for n in (1, 3))
            >>> taught = Taught(here, prior, np.zeros(2))
            >>> taught.at(np.array([1.0]), np.array([1.0, 1.0])), taught.at(np.array([1.0]), None)
            (1.0, 0.5)
        """
        if signs is None or self.usual is None:
            return self.here.at(features)
        return (self.here.at(features) + self.prior.at(beside(signs, self.usual))) / 2


_MOMENTS = {
    "frequencies": (0.0733, 0.2025, 0.2028),
    "peak": (0.0582, 0.1561, -0.2450),
    "margin": (-0.0256, 0.1196, 0.5397),
    "matrix norm": (-0.0207, 0.0939, 0.2210),
    "nearby 1, kept": (-0.0179, 0.0851, -0.0871),
    "nearby 1, probability": (-0.0205, 0.0954, 0.0877),
    "nearby 2, kept": (-0.0058, 0.0747, 0.1984),
    "nearby 2, probability": (-0.0138, 0.0795, -0.3267),
    "nearby 3, kept": (-0.0115, 0.0905, 0.0380),
    "nearby 3, probability": (-0.0141, 0.0824, 0.0361),
    "nearby 4, kept": (-0.0005, 0.0717, 0.0439),
    "nearby 4, probability": (-0.0091, 0.0725, -0.3924),
    "spread": (-0.0167, 0.4744, -0.1716),
    "size of the spread": (0.3593, 0.3101, -0.0625),
    "calibrated": (0.2024, 0.3878, 0.1766),
}
"""Of each feature its mean and deviation over all cases, and its coefficient."""
_WEIGHTS = {
    "spread": 1.3609,
    "nearest": 0.3879,
    "moved": 0.1916,
    "lost": 0.4611,
    "unexplained": -0.1232,
    "confidence": 0.1688,
}
"""Of the alarm."""
_SUM_WEIGHTS = {"spread": 1.4292, "moved": 0.2781, "lost": 0.5171, "unexplained": -0.0681, "confidence": 0.2210}
"""Of the alarm without the nearest samples."""
PUBLIC = Prior(
    Correction(*np.array(list(_MOMENTS.values())).T),
    np.array(list(_WEIGHTS.values())),
    1.3161,
    np.array(list(_SUM_WEIGHTS.values())),
    1.4410,
)
