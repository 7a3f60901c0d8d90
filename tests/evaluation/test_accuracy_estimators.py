"""Each published estimate against its definition, a solver or a case whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize_scalar
from scipy.stats import norm
from sklearn.metrics import confusion_matrix, log_loss

from fedshift.evaluation.estimate import estimators
from fedshift.evaluation.estimate.sums import TEMPERATURES, at_temperature, probabilities, sums_of
from tried import slow_after

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def drawn(n: int, classes: int, seed: int, sharp: float = 1.0) -> tuple[Floats, Whole]:
    """Scores and labels: scores are the right probabilities of the labels, their logits times ``sharp``."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, classes))
    right = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (right.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    return probabilities(at_temperature(right, 1 / sharp)), labels


def two_bells(n: int, share: float, seed: int) -> tuple[Floats, Whole]:
    """Two classes at −1 and 1 with deviation 1, scored as if 30 % were of the second one; ``share``: what really is."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < share).astype(np.int64)
    x = rng.normal(2 * labels - 1)
    second = 1 / (1 + np.exp(-2 * x) * 7 / 3)
    return np.stack([1 - second, second], axis=1), labels


def test_sums_are_those_of_scikit_learn() -> None:
    scores, labels = drawn(300, 4, 0)
    found = sums_of(scores, labels)
    np.testing.assert_array_equal(found.confusion, confusion_matrix(labels, scores.argmax(axis=1), labels=range(4)))
    for place in (0, 17, 39):
        warm = at_temperature(scores, float(TEMPERATURES[place]))
        assert found.losses[place] / 300 == pytest.approx(log_loss(labels, warm, labels=range(4)), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_sums_of_sites_add_up(classes: int, one: int, other: int, seed: int) -> None:
    scores, labels = drawn(one + other, classes, seed)
    whole, parts = sums_of(scores, labels), sums_of(scores[:one], labels[:one]) + sums_of(scores[one:], labels[one:])
    assert parts.samples == whole.samples
    for name in ("by_confidence", "losses", "confidences", "answers"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9)


@pytest.mark.parametrize("sharp", [0.5, 1.0, 3.0])
def test_the_temperature_is_the_one_of_the_least_loss(sharp: float) -> None:
    scores, labels = drawn(4000, 3, 1, sharp)
    best = minimize_scalar(lambda t: log_loss(labels, at_temperature(scores, t)), bounds=(0.3, 15), method="bounded").x
    assert sums_of(scores, labels).temperature == pytest.approx(best, rel=0.01)


def test_confidence_is_the_accuracy_of_scores_that_are_right_but_too_sure() -> None:
    known, labels = drawn(20_000, 3, 2, sharp=2.5)
    new, truth = drawn(20_000, 3, 3, sharp=2.5)
    accuracy = (new.argmax(axis=1) == truth).mean()
    sums = sums_of(known, labels)
    assert new.max(axis=1).mean() > accuracy + 0.1
    for estimate in (estimators.confidence, estimators.difference_of_confidences, estimators.thresholded_confidence):
        assert estimate(sums, new) == pytest.approx(accuracy, abs=0.01)


def test_the_threshold_and_transport_are_those_of_their_definitions() -> None:
    # Against the definition, with the samples themselves in place of the histogram.
    known, labels = drawn(3000, 3, 4)
    new, _ = drawn(2000, 3, 5, sharp=0.6)
    right = (known.argmax(axis=1) == labels).mean()
    threshold = np.quantile(known.max(axis=1), 1 - right)
    found = estimators.thresholded_confidence(sums_of(known, labels), new)
    assert found == pytest.approx((new.max(axis=1) > threshold).mean(), abs=0.015)
    known, labels = drawn(60, 3, 6)
    new, _ = drawn(60, 3, 7)
    sums = sums_of(known, labels)
    cost, wanted = (1 - new).ravel(), np.bincount(labels, minlength=3) / 60
    rows = np.kron(np.eye(60), np.ones(3))
    columns = np.tile(np.eye(3), 60)
    solved = linprog(cost, A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([np.full(60, 1 / 60), wanted]))
    assert estimators.transport(sums, new) == pytest.approx(1 - solved.fun, abs=1e-9)


@pytest.mark.parametrize("share", slow_after(1, [0.1, 0.5, 0.8]))
def test_moved_frequencies_are_found(share: float) -> None:
    """Two normal distributions, whose accuracy is known: the threshold is at log(7/3) / 2."""
    known, labels = two_bells(40_000, 0.3, 8)
    new, truth = two_bells(40_000, share, 9)
    sums = sums_of(known, labels)
    assert estimators.moved_frequencies(sums, new)[1] == pytest.approx(share, abs=0.015)
    accuracy = (new.argmax(axis=1) == truth).mean()
    at = np.log(7 / 3) / 2
    assert accuracy == pytest.approx(share * norm.cdf(1 - at) + (1 - share) * norm.cdf(1 + at), abs=0.01)
    assert estimators.by_moved_frequencies(sums, new) == pytest.approx(accuracy, abs=0.015)
    assert estimators.by_confusion(sums, new) == pytest.approx(accuracy, abs=0.02)


def test_confusion_and_calibration_know_the_accuracy() -> None:
    # Each label's predictions stay, the labels' shares change: least squares has nothing left over.
    scores, labels = drawn(600, 3, 10)
    again = np.concatenate([np.flatnonzero(labels == 0).repeat(5), np.flatnonzero(labels > 0)])
    accuracy = (scores[again].argmax(axis=1) == labels[again]).mean()
    assert estimators.by_confusion(sums_of(scores, labels), scores[again]) == pytest.approx(accuracy, abs=0.02)
    # A model that is too sure, and a site whose samples are all unsure: what is right among the like is right here.
    known, labels = drawn(20000, 3, 5, sharp=3.0)
    here, truth = drawn(6000, 3, 6, sharp=3.0)
    unsure = here.max(axis=1) < 0.8
    right = float((here.argmax(axis=1) == truth)[unsure].mean())
    sums = sums_of(known, labels)
    assert estimators.histogram_binning(sums, here[unsure]) == pytest.approx(right, abs=0.03)
    assert here[unsure].max(axis=1).mean() > right + 0.05
    assert estimators.histogram_binning(sums, known) == pytest.approx(sums.accuracy, abs=1e-3)


def test_norms_and_agreement_by_their_definitions() -> None:
    shares, _ = drawn(50, 4, 7)
    entries = shares.size
    mano = (np.linalg.norm(shares.reshape(-1), 4) ** 4 / entries) ** 0.25  # the definition of MaNo
    assert estimators.matrix_norm(shares) == pytest.approx(mano * 4**0.25)
    said = np.array([[0, 1, 1, 0], [0, 1, 0, 0], [1, 1, 1, 0]])
    assert estimators.agreement(np.eye(2)[said]) == pytest.approx(np.mean([0.75, 0.75, 0.5]))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
    st.integers(1, 30),
    st.sampled_from(["drawn", "constant", "sure"]),
)
def test_every_estimate_is_a_share_whatever_the_scores(classes: int, seeds: list[int], n: int, how: str) -> None:
    known, labels = drawn(20, classes, seeds[0])
    labels = labels if how == "drawn" else np.zeros_like(labels)
    new, _ = drawn(n, classes, seeds[1])
    new = {"drawn": new, "constant": np.full_like(new, 1 / classes), "sure": np.eye(classes)[new.argmax(axis=1)]}[how]
    sums = sums_of(known, labels)
    for estimate in estimators.ESTIMATORS.values():
        assert 0 <= estimate(sums, probabilities(new)) <= 1
