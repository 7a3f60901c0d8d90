"""What federations of public data sets teach about estimates elsewhere: learns the tables of `…estimate.prior`.

Each site of a data set in turn is one without labels, as it is, under the changes by which an estimate is taught
(`fedshift.evaluation.estimate.changes`), and drawn again in other class frequencies. `estimate.py` judges a data set by
what the others taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedshift.evaluation.estimate.combination import LOSS, Cases, LeftOut, harm_signs, known_cases, logit
from fedshift.evaluation.estimate.correction import Correction, standard
from fedshift.evaluation.estimate.prior import Prior, beside

RIDGE, CASES = 60.0, 300.0
"""The penalty on squared coefficients, and as many cases each data set counts for."""
SITE_OFFSET = 0.3
"""The variance of what a case's odds are off that no feature foretells."""
LIGHTER = 3.0
"""The penalty on squared coefficients of the alarm, whose data sets count for 40 harmed and 40 unharmed cases."""
FALSE_ALARMS = 0.05
HARM, SPARED = 0.10, 0.03
"""A shift is harmful that loses so much, and moved class frequencies are not that lose less."""


@dataclass(frozen=True)
class Lesson:
    """One case of one site.

    Attributes:
        features: see `beside`.
        off: log-odds of its accuracy less those of the median.
        weight: how much it counts.
        signs: what the alarm reads.
        harmed: whether it lost much against the site as it is; None between much and little.
    """

    features: NDArray[np.float64]
    off: float
    weight: float
    signs: NDArray[np.float64]
    harmed: bool | None


def lessons(sites: Mapping[str, LeftOut]) -> Iterator[Lesson]:
    """The cases of each site, of which the others are what an estimate knows."""
    for seed, (name, site) in enumerate(sites.items()):
        others = {other: cases_of_site for other, cases_of_site in sites.items() if other != name}
        cases = Cases.of(others)
        assert cases.taught is not None
        assert cases.taught.usual is not None
        known = list(known_cases(cases.whole, site, cases.unexplained, seed))
        apart = [case.apart for case in site.looked_at]
        usual = float(
            np.mean(
                [(case_of_site.scores.argmax(axis=1) == case_of_site.labels).mean() for case_of_site in others.values()]
            )
        )
        for number, known_case in enumerate(known):
            moved, loss = number >= len(apart), known[0].accuracy - known_case.accuracy
            there = apart[0 if moved else number]
            assert known_case.signs is not None
            assert there is not None
            odds = logit(known_case.accuracy) - known_case.case.off + cases.taught.here.at(known_case.case.features)
            lost = 100 * (usual - 1 / (1 + np.exp(-odds))) / LOSS
            right, wrong = (
                known_case.accuracy * known_case.samples + 0.5,
                (1 - known_case.accuracy) * known_case.samples + 0.5,
            )
            yield Lesson(
                beside(known_case.signs, cases.taught.usual),
                known_case.case.off,
                (1.0 if 0 < number < len(apart) else 2.0) / (1 / right + 1 / wrong + SITE_OFFSET),
                harm_signs(cases, lost, there),
                True if loss >= HARM else False if number == 0 or (moved and loss < SPARED) else None,
            )


def learn_prior(taught: Mapping[str, Sequence[Lesson]]) -> Prior:
    """The tables from data sets' lessons."""
    return Prior(_correction(taught), *_alarm(taught))


def _correction(taught: Mapping[str, Sequence[Lesson]]) -> Correction:
    every = [case for some in taught.values() for case in some]
    features, off = np.stack([case.features for case in every]), np.array([case.off for case in every])
    weights = np.concatenate([_balance([case.weight for case in some], CASES) for some in taught.values()])
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-6
    rows = standard(features, mean, deviation)
    square = (rows * weights[:, None]).T @ rows + RIDGE * np.eye(rows.shape[1])
    return Correction(mean, deviation, np.linalg.solve(square, rows.T @ (weights * off)))


def _alarm(taught: Mapping[str, Sequence[Lesson]]) -> tuple[NDArray[np.float64], float]:
    """The weights of a logistic regression, and the sum that five of a hundred unharmed cases of a data set exceed."""
    known = {name: [case for case in some if case.harmed is not None] for name, some in taught.items()}
    signs = np.stack([case.signs for some in known.values() for case in some])
    harmed = np.array([case.harmed for some in known.values() for case in some])
    weights = np.concatenate(
        [
            _balance([case.harmed is True for case in some], 40) + _balance([case.harmed is False for case in some], 40)
            for some in known.values()
        ]
    )
    deviation = signs.std(axis=0)
    rows = np.column_stack([signs / deviation, np.ones(len(signs))])

    def loss(coefficients: NDArray[np.float64]) -> float:
        odds = np.where(harmed, -1, 1) * (rows @ coefficients)
        return float(weights @ np.logaddexp(0, odds) + LIGHTER / 2 * np.square(coefficients[:-1]).sum())

    direction = minimize(loss, np.zeros(rows.shape[1])).x[:-1] / deviation
    sums = [np.array([direction @ case.signs for case in some if not case.harmed]) for some in known.values()]
    return direction, float(np.mean([np.quantile(some, 1 - FALSE_ALARMS) for some in sums]))


def _balance(weights: Sequence[float], together: float) -> NDArray[np.float64]:
    """Weights whose sum is ``together``, or 0."""
    given = np.asarray(weights, dtype=np.float64)
    return np.asarray(given * (together / max(float(given.sum()), 1e-9)))
