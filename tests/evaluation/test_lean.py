"""How far an estimate goes toward the mean of the left-out sites."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize_scalar

from fedshift.evaluation.estimate.changes import Usual, changes, nearby_answers
from fedshift.evaluation.estimate.combination import Answers, Cases, LeftOut, read
from fedshift.evaluation.estimate.distances import Samples
from fedshift.evaluation.estimate.lean import PART, WEIGHT, Gaps, best_part

NUMBERS = arrays(np.float64, 4, elements=st.floats(-3, 3))
SITES = st.lists(st.builds(Gaps, NUMBERS, NUMBERS), min_size=1, max_size=5)
USUAL = Usual(np.zeros(4), np.ones(4))


@given(SITES)
def test_the_part_is_the_least_squares_of_what_is_off_and_a_prior(sites: list[Gaps]) -> None:
    def off(part: float) -> float:
        return WEIGHT * (part - PART) ** 2 + sum(float(np.mean(site.off(part) ** 2)) for site in sites)

    best = minimize_scalar(off, bounds=(0, 1), method="bounded", options={"xatol": 1e-9})
    assert off(best_part(sites)) <= best.fun + 1e-9


@given(SITES, SITES)
def test_the_order_of_sites_does_not_matter_and_a_site_that_is_foretold_by_the_others_draws_toward_them(
    sites: list[Gaps], others: list[Gaps]
) -> None:
    assert best_part([*sites, *others]) == pytest.approx(best_part([*others, *sites]))
    foretold = Gaps(np.array([1.0, -1.0]), np.array([-1.0, 1.0]))
    assert best_part([*sites, foretold]) >= best_part(sites) - 1e-12


def site(seed: int, noise: float, sharp: float) -> tuple[LeftOut, Samples]:
    """A site whose labels have noise of this size, and a linear model of this sharpness."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(300, 4))
    labels = (rows[:, 0] + noise * draw.normal(size=300) > 0).astype(np.int64)

    def scores(some: np.ndarray) -> np.ndarray:
        second = 1 / (1 + np.exp(-sharp * some[:, 0]))
        return np.stack([1 - second, second], axis=1)

    there = Samples.of([np.random.default_rng(seed + 100 + other).normal(size=(300, 4)) for other in range(3)])
    answers = [
        Answers(scores(some), labels, nearby_answers(scores, some, USUAL), there.apart(some))
        for some in (rows, *(changed for _, changed in changes(rows, USUAL, seed)))
    ]
    return LeftOut(scores(rows), labels, tuple(answers), apart=answers[0].apart), there


@pytest.mark.slow
def test_where_sites_are_alike_and_scores_mislead_the_mean_foretells_the_next_site() -> None:
    """Sharpness differs from site to site and accuracy does not: confidence is wrong, and the mean is right."""
    sharps = (0.5, 8.0, 1.0, 4.0, 0.7, 6.0)
    alike = Cases.of({f"s{at}": site(at, 0.7, sharp)[0] for at, sharp in enumerate(sharps)})
    differ = Cases.of(
        {f"s{at}": site(at, noise, 1.7 / noise)[0] for at, noise in enumerate((0.1, 3, 0.3, 1.5, 0.2, 2))}
    )
    assert alike.part > differ.part
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(20, 26):
        new, there = site(seed, 0.7, 10.0)
        reading, apart = read(alike.whole, new.scores), there.apart(np.random.default_rng(seed).normal(size=(300, 4)))
        truth = float((new.scores.argmax(axis=1) == new.labels).mean())
        nearby = new.looked_at[0].nearby
        middle, looked_at = alike.middle(reading, new.scores, nearby, apart)
        centre, low, high = alike.interval(reading, new.scores, nearby, apart)
        assert looked_at
        assert low <= truth <= high
        errors[False].append(abs(1 / (1 + np.exp(-middle)) - truth))
        errors[True].append(abs(centre - truth))
    assert np.mean(errors[True]) < 0.8 * np.mean(errors[False])
