"""How far samples are from those of labelled sites, and whether that is a warning."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from fedshift.evaluation.estimate.combination import LeftOut, estimate_accuracy
from fedshift.evaluation.estimate.distances import Apart, Samples, beyond


def test_the_nearest_samples_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    there, here = draw.normal(size=(80, 5)).astype(np.float32), draw.normal(1, 2, (60, 5)).astype(np.float32)
    samples = Samples.of([there])
    scaled = (here - there.mean(axis=0)) / samples.deviation
    distances, _ = NearestNeighbors(n_neighbors=1).fit(samples.known).kneighbors(scaled)
    assert samples.apart(here).nearest == pytest.approx(np.log(np.median(distances) / samples.usual), abs=1e-4)


def test_units_and_constant_columns_change_nothing() -> None:
    draw = np.random.default_rng(1)
    there, here = draw.normal(size=(200, 3)), draw.normal(1, 1, (100, 3))
    one, other = (Samples.of([there * unit]).apart(here * unit) for unit in (1.0, 12.0))
    assert astuple(one) == pytest.approx(astuple(other), abs=1e-4)
    draw = np.random.default_rng(3)
    rows = np.concatenate([draw.normal(size=(100, 3)), np.ones((100, 5))], axis=1)
    assert abs(Samples.of([rows]).apart(rows).spread) < 0.01


@pytest.mark.parametrize(("unit", "more"), [(1.0, False), (3.0, True), (0.2, True)])
def test_wider_and_narrower_samples_are_apart(unit: float, more: bool) -> None:
    draw = np.random.default_rng(2)
    there = [draw.normal(size=(150, 4)) for _ in range(4)]
    usual = [Samples.of(there[:at] + there[at + 1 :]).apart(site) for at, site in enumerate(there)]
    spread, *_ = beyond(Samples.of(there).apart(unit * draw.normal(size=(150, 4))), usual)
    assert (spread > 1.5) == more


@pytest.mark.parametrize(("offset", "more"), [(0.0, False), (1.0, True)])
def test_samples_with_other_means_are_apart(offset: float, more: bool) -> None:
    draw = np.random.default_rng(5)
    there = [draw.normal(size=(150, 8)) for _ in range(4)]
    usual = [Samples.of(there[:at] + there[at + 1 :]).apart(site) for at, site in enumerate(there)]
    here = draw.normal(size=(150, 8)) + offset * (np.arange(8) < 3)  # an offset of three columns, as wide as before
    spread, _, moved = beyond(Samples.of(there).apart(here), usual)
    assert spread < 1
    assert (moved > 1.5) == more


def test_the_same_scores_of_far_samples_are_a_warning() -> None:
    draw = np.random.default_rng(4)

    def site() -> LeftOut:
        second = draw.beta(0.5, 0.5, 300)
        labels = (draw.random(300) < second).astype(int)
        return LeftOut(np.stack([1 - second, second], axis=1), labels, apart=Apart(draw.normal(0, 0.05), 0.1, -2.0))

    left_out = {name: site() for name in "abcd"}
    scores = site().scores
    assert not estimate_accuracy(left_out, scores, apart=Apart(0.0, 0.1, -2.0)).harmful
    assert estimate_accuracy(left_out, scores, apart=Apart(1.0, 1.5, -1.0)).harmful
    assert not estimate_accuracy(left_out, scores).harmful
