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
        others = {other: one for other, one in sites.items() if other != name}
        cases = Cases.of(others)
        assert cases.taught is not None
        assert cases.taught.usual is not None
        known = list(known_cases(cases.whole, site, cases.unexplained, seed))
        apart = [one.apart for one in site.looked_at]
        usual = float(np.mean([(one.scores.argmax(axis=1) == one.labels).mean() for one in others.values()]))
        for number, one in enumerate(known):
            moved, loss = number >= len(apart), known[0].accuracy - one.accuracy
            there = apart[0 if moved else number]
            assert one.signs is not None
            assert there is not None
            odds = logit(one.accuracy) - one.case.off + cases.taught.here.at(one.case.features)
            lost = 100 * (usual - 1 / (1 + np.exp(-odds))) / LOSS
            right, wrong = one.accuracy * one.samples + 0.5, (1 - one.accuracy) * one.samples + 0.5
            yield Lesson(
                beside(one.signs, cases.taught.usual),
                one.case.off,
                (1.0 if 0 < number < len(apart) else 2.0) / (1 / right + 1 / wrong + SITE_OFFSET),
                harm_signs(cases, lost, there),
                True if loss >= HARM else False if number == 0 or (moved and loss < SPARED) else None,
            )


def learn_prior(taught: Mapping[str, Sequence[Lesson]]) -> Prior:
    """The tables from data sets' lessons."""
    return Prior(_correction(taught), *_alarm(taught))


def _correction(taught: Mapping[str, Sequence[Lesson]]) -> Correction:
    every = [one for some in taught.values() for one in some]
    features, off = np.stack([one.features for one in every]), np.array([one.off for one in every])
    weights = np.concatenate([_balanced([one.weight for one in some], CASES) for some in taught.values()])
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-6
    rows = standard(features, mean, deviation)
    square = (rows * weights[:, None]).T @ rows + RIDGE * np.eye(rows.shape[1])
    return Correction(mean, deviation, np.linalg.solve(square, rows.T @ (weights * off)))


def _alarm(taught: Mapping[str, Sequence[Lesson]]) -> tuple[NDArray[np.float64], float]:
    """The weights of a logistic regression, and the sum that five of a hundred unharmed cases of a data set exceed."""
    known = {name: [one for one in some if one.harmed is not None] for name, some in taught.items()}
    signs = np.stack([one.signs for some in known.values() for one in some])
    harmed = np.array([one.harmed for some in known.values() for one in some])
    weights = np.concatenate(
        [
            _balanced([one.harmed is True for one in some], 40) + _balanced([one.harmed is False for one in some], 40)
            for some in known.values()
        ]
    )
    deviation = signs.std(axis=0)
    rows = np.column_stack([signs / deviation, np.ones(len(signs))])

    def loss(coefficients: NDArray[np.float64]) -> float:
        odds = np.where(harmed, -1, 1) * (rows @ coefficients)
        return float(weights @ np.logaddexp(0, odds) + LIGHTER / 2 * np.square(coefficients[:-1]).sum())

    found = minimize(loss, np.zeros(rows.shape[1])).x[:-1] / deviation
    sums = [np.array([found @ one.signs for one in some if not one.harmed]) for some in known.values()]
    return found, float(np.mean([np.quantile(some, 1 - FALSE_ALARMS) for some in sums]))


def _balanced(weights: Sequence[float], together: float) -> NDArray[np.float64]:
    """Weights whose sum is ``together``, or 0."""
    given = np.asarray(weights, dtype=np.float64)
    return np.asarray(given * (together / max(float(given.sum()), 1e-9)))
