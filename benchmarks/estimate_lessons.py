"""What federations of public data sets teach about estimates elsewhere: learns the corrections of `…estimate.prior`.

Each site of a data set in turn is one without labels, as it is, under the changes by which an estimate is taught
(`fedshift.evaluation.estimate.changes`), and drawn again in other class frequencies. `estimate.py` judges a data set by
what the others taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.estimate.combination import Cases, LeftOut, looks
from fedshift.evaluation.estimate.correction import Correction, standard
from fedshift.evaluation.estimate.prior import beside

RIDGE, CASES = 60.0, 300.0
"""The penalty on squared coefficients, and as many cases each data set counts for."""
SITE_OFFSET = 0.3
"""The variance of what a case's odds are off that no feature foretells."""


@dataclass(frozen=True)
class Lesson:
    """One case of one site.

    Attributes:
        features: see `beside`.
        off: log-odds of its accuracy less those of the median.
        weight: how much it counts.
    """

    features: NDArray[np.float64]
    off: float
    weight: float


def lessons(sites: Mapping[str, LeftOut]) -> Iterator[Lesson]:
    """The cases of each site, of which the others are what an estimate knows."""
    for seed, (name, site) in enumerate(sites.items()):
        others = {other: cases_of_site for other, cases_of_site in sites.items() if other != name}
        cases = Cases.of(others)
        assert cases.taught is not None
        assert cases.taught.usual is not None
        known = [look.to_case(cases.unexplained) for look in looks(cases.whole, site, seed)]
        looked_at = len(site.looked_at)
        for number, known_case in enumerate(known):
            assert known_case.signs is not None
            right, wrong = (
                known_case.accuracy * known_case.samples + 0.5,
                (1 - known_case.accuracy) * known_case.samples + 0.5,
            )
            yield Lesson(
                beside(known_case.signs, cases.taught.usual),
                known_case.case.off,
                (1.0 if 0 < number < looked_at else 2.0) / (1 / right + 1 / wrong + SITE_OFFSET),
            )


def learn_correction(taught: Mapping[str, Sequence[Lesson]]) -> Correction:
    """The table from data sets' lessons."""
    every = [case for some in taught.values() for case in some]
    features, off = np.stack([case.features for case in every]), np.array([case.off for case in every])
    weights = np.concatenate([_balance([case.weight for case in some], CASES) for some in taught.values()])
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-6
    rows = standard(features, mean, deviation)
    square = (rows * weights[:, None]).T @ rows + RIDGE * np.eye(rows.shape[1])
    return Correction(mean, deviation, np.linalg.solve(square, rows.T @ (weights * off)))


def _balance(weights: Sequence[float], together: float) -> NDArray[np.float64]:
    """Weights whose sum is ``together``, or 0."""
    given = np.asarray(weights, dtype=np.float64)
    return np.asarray(given * (together / max(float(given.sum()), 1e-9)))
