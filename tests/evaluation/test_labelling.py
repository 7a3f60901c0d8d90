"""Intervals from labels of some samples cover as often as they say, however the samples were drawn."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from fedshift.errors import UserError
from fedshift.evaluation.estimate.labelling import (
    Drawn,
    Interval,
    accuracy_of,
    auroc_of,
    draw,
    expected_interval,
    labels_needed,
)

ENDLESS = 10**9


def at_random(number: int, samples: int = ENDLESS) -> Drawn:
    return Drawn(np.arange(number), np.zeros(number, dtype=np.int64), (samples,))


def patients(rng: np.random.Generator, samples: int, skill: float, sureness: float) -> tuple[NDArray, NDArray]:
    """Labels and scores; ``sureness`` 1 is calibrated, more is too sure."""
    logits = rng.normal(0, skill, samples)
    labels = (rng.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    second = 1 / (1 + np.exp(-sureness * logits))
    return labels, np.stack([1 - second, second], axis=1)


@pytest.mark.parametrize(("right", "labels", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)])
def test_wilson_as_newcombe_prints_it(right: int, labels: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 1998, table I, method 3, at 95 %."""
    found = accuracy_of(np.arange(labels) < right, at_random(labels), 0.95)
    assert (found.low / 100, found.high / 100) == pytest.approx((low, high), abs=5e-5)


def test_all_labels_one_class_or_nothing_to_draw() -> None:
    found = accuracy_of(np.arange(40) < 30, at_random(40, 40))
    assert (found.low, found.value, found.high) == pytest.approx((75, 75, 75), abs=1e-3)
    assert auroc_of([1, 1, 1], [0.2, 0.3, 0.4], at_random(3)) is None
    with pytest.raises(UserError, match="nothing to draw"):
        draw(np.zeros((0, 2)), 10)
    with pytest.raises(UserError, match="1 label or more"):
        draw(np.full((5, 2), 0.5), 0)
    assert len(draw(np.full((5, 2), 0.5), 10).rows) == 5
    assert Interval(50.0, 40.0, 60.0).width == 20.0


@pytest.mark.slow
@pytest.mark.parametrize("sureness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("strata", [False, True])
@pytest.mark.parametrize(("samples", "number"), [(300, 50), (1500, 50), (1500, 120), (120, 100)])
def test_intervals_cover_as_often_as_they_say(sureness: float, strata: bool, samples: int, number: int) -> None:
    rng = np.random.default_rng([samples, number, int(10 * sureness), strata])
    covered = []
    for repeat in range(250):
        labels, scores = patients(rng, samples, 2.5, sureness)
        right = scores.argmax(axis=1) == labels
        drawn = draw(scores, number, repeat, strata=strata)
        assert drawn.stratified == strata
        assert len(set(drawn.rows.tolist())) == number
        accuracy = accuracy_of(right[drawn.rows], drawn)
        auroc = auroc_of(labels[drawn.rows], scores[drawn.rows, 1], drawn)
        truths = 100 * right.mean(), 100 * roc_auc_score(labels, scores[:, 1])
        found = zip((accuracy, auroc), truths, strict=True)
        covered.append([one is not None and one.low <= truth <= one.high for one, truth in found])
    shares = np.mean(covered, axis=0)
    assert (shares >= 0.9 - 2.6 * np.sqrt(0.09 / 250)).all(), shares  # 90 % are promised; 2.6 standard errors


def test_strata_narrow_the_interval_where_scores_are_worth_something() -> None:
    rng = np.random.default_rng(3)
    labels, scores = patients(rng, 4000, 4.0, 1.0)
    right = scores.argmax(axis=1) == labels
    widths = {
        strata: np.mean(
            [
                accuracy_of(right[one.rows], one).width
                for seed in range(40)
                for one in [draw(scores, 100, seed, strata=strata)]
            ]
        )
        for strata in (False, True)
    }
    assert widths[True] < widths[False]
    assert draw(scores, 100).stratified
    assert not draw(np.full((4000, 2), 0.5), 100).stratified  # all are as sure: nothing to gain
    assert not draw(scores, 20).stratified  # too few for groups


def test_a_longer_list_holds_a_shorter_one_and_whoever_stops_early_has_some_of_each_group() -> None:
    _, scores = patients(np.random.default_rng(0), 500, 3.0, 1.0)
    for strata in (False, True):
        short, long = (draw(scores, number, 5, strata=strata) for number in (60, 100))
        assert set(short.rows.tolist()) <= set(long.rows.tolist())
    assert set(long.strata[:20].tolist()) == set(long.strata.tolist())


@pytest.mark.parametrize("number", [10, 50, 200])
def test_the_interval_for_auroc_is_newcombes(number: int) -> None:
    """Its ends are where the squared distance is z² of the variance of Hanley and McNeil there."""
    labels, scores = patients(np.random.default_rng(number), number, 2.0, 1.0)
    found = auroc_of(labels, scores[:, 1], at_random(number))
    assert found.value == pytest.approx(100 * roc_auc_score(labels, scores[:, 1]))
    m, n, z = labels.sum(), (1 - labels).sum(), NormalDist().inv_cdf(0.95)
    for end in (found.low / 100, found.high / 100):
        middle = (m + n) / 2 - 1
        variance = end * (1 - end) * (1 + middle * (1 - end) / (2 - end) + middle * end / (1 + end)) / (m * n)
        assert (found.value / 100 - end) ** 2 == pytest.approx(z**2 * variance, rel=1e-6)


@pytest.mark.parametrize(("value", "width"), [(80.0, 10.0), (95.0, 5.0), (60.0, 20.0)])
def test_as_many_labels_as_are_needed_give_the_width(value: float, width: float) -> None:
    first = accuracy_of(np.arange(100) < value, at_random(100))
    number = labels_needed(first, 100, ENDLESS, width)
    exact = value / 100
    assert accuracy_of(np.arange(number) < exact * number, at_random(number)).width == pytest.approx(width, abs=0.2)
    assert labels_needed(first, 100, 150, 0.1) == 150  # no more than there are
    with pytest.raises(UserError, match="between 0 and 100"):
        labels_needed(first, 100, 150, 0.0)


@pytest.mark.parametrize(("samples", "before"), [(400, 200), (300, 240)])
def test_labels_of_a_small_site_are_worth_more(samples: int, before: int) -> None:
    """What was labelled is a large part of the site: so are the labels that the width still takes."""
    first = accuracy_of(np.arange(before) < 0.8 * before, at_random(before, samples))
    number = labels_needed(first, before, samples, 4.0)
    right = np.arange(number) < 0.8 * number
    assert accuracy_of(right, at_random(number, samples)).width == pytest.approx(4.0, abs=0.2)


def test_what_is_expected_of_a_list_is_about_what_comes() -> None:
    labels, scores = patients(np.random.default_rng(7), 2000, 2.5, 1.0)
    right = scores.argmax(axis=1) == labels
    drawn = draw(scores, 80)
    came = accuracy_of(right[drawn.rows], drawn)
    assert expected_interval(scores, drawn, 100 * right.mean()).width == pytest.approx(came.width, rel=0.3)
