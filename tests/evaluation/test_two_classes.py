"""AUROC, sensitivity and specificity without labels, against scikit-learn and cases whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import recall_score, roc_auc_score

from fedshift.evaluation.estimate.combination import LeftOut, estimate_accuracy
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.evaluation.estimate.two_classes import MEASURES, by_score, estimates, measures

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def bells(
    draw: np.random.Generator, n: int, share: float = 0.4, apart: float = 2.0, move: float = 0.0
) -> tuple[Floats, Whole]:
    """Scores and labels: log-odds of two normal distributions; their AUROC is Φ(apart / √2)."""
    labels = (draw.random(n) < share).astype(np.int64)
    odds = draw.normal(apart * (labels - 0.5) + move)
    return 1 / (1 + np.exp(-apart * odds)), labels


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.floats(0.05, 0.95))
def test_measures_of_bins_are_those_of_scikit_learn(seed: int, threshold: float) -> None:
    scores, labels = bells(np.random.default_rng(seed), 300)
    auroc, sensitivity, specificity = measures(by_score(scores, labels, threshold))
    assert auroc == pytest.approx(roc_auc_score(labels, scores), abs=0.01)  # scores in a bin are taken for equal
    said = scores >= threshold
    assert sensitivity == pytest.approx(recall_score(labels, said, zero_division=0))
    assert specificity == pytest.approx(recall_score(labels, said, pos_label=0, zero_division=0))


@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_other_frequencies_change_none_of_them(share: float) -> None:
    draw = np.random.default_rng(3)
    known = [by_score(*bells(draw, 3000)) for _ in range(4)]
    found = estimates(known, by_score(*bells(draw, 3000, share)).sum(axis=0))
    truth = 100 * np.array([norm.cdf(np.sqrt(2)), norm.cdf(1), norm.cdf(1)])
    for name, right in zip(MEASURES, truth, strict=True):
        assert found[name].estimate == pytest.approx(right, abs=6)


def test_scores_that_moved_move_sensitivity_and_specificity() -> None:
    """All scores are half a deviation higher, as of a device that reads high; the AUROC stays."""
    draw = np.random.default_rng(4)
    known = [by_score(*bells(draw, 3000)) for _ in range(4)]
    found = estimates(known, by_score(*bells(draw, 3000, move=0.5)).sum(axis=0))
    truth = 100 * np.array([norm.cdf(np.sqrt(2)), norm.cdf(1.5), norm.cdf(0.5)])
    as_there = 100 * measures(np.sum(known, axis=0))
    assert found["auroc"].estimate == pytest.approx(truth[0], abs=3)
    for name, right, there in zip(MEASURES[1:], truth[1:], as_there[1:], strict=True):
        one = found[name]
        assert one.low <= right <= one.high
        assert abs(one.estimate - right) < 0.75 * abs(there - right)  # moved and other frequencies look much alike


@pytest.mark.slow
def test_intervals_hold_the_truth_of_nine_of_ten_like_sites() -> None:
    """Sites differ in frequencies, separation and a move, as the site without labels does; truths are counted."""
    draw, inside = np.random.default_rng(5), {name: list[bool]() for name in MEASURES}
    for _ in range(60):
        sites = [bells(draw, 150, draw.uniform(0.2, 0.6), draw.normal(2, 0.4), draw.normal(0, 0.4)) for _ in range(5)]
        known = [by_score(*site) for site in sites]
        found, truth = estimates(known[1:], known[0].sum(axis=0)), 100 * measures(known[0])
        for name, right in zip(MEASURES, truth, strict=True):
            one = found[name]
            if one.low is not None and one.high is not None:
                inside[name].append(one.low <= right <= one.high)
    for held in inside.values():
        assert len(held) > 50
        assert np.mean(held) >= 0.8


@pytest.mark.parametrize(
    ("known", "here", "why"),
    [
        ([100, 100], 0.02, "samples of a class are expected here"),
        ([100], 0.4, "fewer than 2 left-out sites"),
        ([12, 12], 0.4, "fewer than 2 left-out sites"),
    ],
    ids=["one class here", "one site", "few samples of a class there"],
)
def test_what_allows_no_estimate_gets_a_reason(known: list[int], here: float, why: str) -> None:
    draw = np.random.default_rng(6)
    found = estimates([by_score(*bells(draw, n, apart=6)) for n in known], by_score(*bells(draw, 60, here, 6)).sum(0))
    assert found["auroc"].estimate is None
    assert why in (found["auroc"].reason or "")


def test_they_come_with_the_accuracy_and_not_without_it() -> None:
    draw = np.random.default_rng(7)

    def site(n: int) -> LeftOut:
        second, labels = bells(draw, n)
        return LeftOut(np.stack([1 - second, second], axis=1), labels, threshold=0.3)

    left_out = {name: site(200) for name in "abc"}
    new = site(200)
    found = estimate_accuracy(left_out, new.scores, threshold=0.3)
    assert found.measures.keys() == set(MEASURES)
    assert found.plain()["measures"]["auroc"]["estimate"] == found.measures["auroc"].estimate
    low, high = found.measures["sensitivity"].low, found.measures["sensitivity"].high
    assert low <= 100 * recall_score(new.labels, new.scores[:, 1] >= 0.3) <= high
    alike = estimate_accuracy(left_out, np.full((50, 2), 0.5), threshold=0.3)
    assert all(measure.estimate is None and measure.reason == alike.reasons[0] for measure in alike.measures.values())
    assert sums_of(np.full((4, 3), 1 / 3), [0, 1, 2, 0]).by_score is None
