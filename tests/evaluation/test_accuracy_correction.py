"""What the changed samples of left-out sites teach an estimate, and samples nearby."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from fedshift.evaluation.estimate.changes import Usual, changes, drawn_again, nearby_answers
from fedshift.evaluation.estimate.combination import Answers, Cases, LeftOut, read
from fedshift.evaluation.estimate.correction import OFFSET, RIDGE, Case, Correction, learn
from fedshift.evaluation.estimate.distances import Samples
from fedshift.evaluation.estimate.prior import PUBLIC, Taught


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


USUAL = Usual(np.zeros(8), np.ones(8))


class TooSure:
    """A linear model of two classes, made sure by large weights, that reads two columns of eight."""

    def __init__(self, sharp: float = 6.0) -> None:
        self.sharp = sharp

    def scores(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        value = self.sharp * (rows[:, 0] + rows[:, 1])
        return softmax(np.stack([-value, value], axis=1))


def drawn(seed: int, n: int = 300) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Samples of a site with an offset of its own, and labels that the two columns decide but for noise."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 8)) + 0.2 * rng.normal(size=8)
    labels = (rows[:, 0] + rows[:, 1] + 0.7 * rng.normal(size=n) > 0).astype(np.int64)
    return rows, labels


THERE = Samples.of([drawn(seed)[0] for seed in range(5)])


def looked_at(seed: int) -> LeftOut:
    model = TooSure()
    rows, labels = drawn(seed)
    answers = [
        Answers(model.scores(some), labels, nearby_answers(model.scores, some, USUAL), THERE.apart(some))
        for some in (rows, *(changed for _, changed in changes(rows, USUAL, seed)))
    ]
    return LeftOut(model.scores(rows), labels, tuple(answers), apart=answers[0].apart)


@pytest.mark.slow
def test_changed_samples_teach_where_a_model_is_too_sure() -> None:
    """With noise on its inputs a model that is too sure says nothing of what it lost; the cases with noise know, and so
    do other federations, which never saw such a model.
    """
    model, alone, taught, by_both = TooSure(), [], [], []
    cases = Cases.of({f"s{seed}": looked_at(seed) for seed in range(5)})
    for seed in range(50, 62):
        rows, labels = drawn(seed)
        noisy = rows + 1.2 * np.random.default_rng(seed + 1000).normal(size=rows.shape)
        scores = model.scores(noisy)
        truth = 100 * float((scores.argmax(axis=1) == labels).mean())
        nearby = nearby_answers(model.scores, noisy, USUAL)
        for errors, near, apart in ((alone, None, None), (taught, nearby, None), (by_both, nearby, THERE.apart(noisy))):
            centre, low, high = cases.interval(read(cases.whole, scores), scores, near, apart)
            assert low <= centre <= high
            middle, _ = cases.middle(read(cases.whole, scores), scores, near, apart)
            errors.append(abs(100 / (1 + np.exp(-middle)) - truth))
    assert np.mean(taught) < 0.75 * np.mean(alone)
    assert np.mean(by_both) < 0.85 * np.mean(alone)


def test_the_tables_and_the_alarm_are_those_of_the_benchmark() -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    learned = json.loads((results / "estimate_0_1.json").read_text(encoding="utf-8"))["prior"]
    moments = np.stack([PUBLIC.correction.mean, PUBLIC.correction.deviation, PUBLIC.correction.coefficients], axis=1)
    np.testing.assert_allclose(moments, learned["moments"], atol=1e-4)
    alarm = json.loads((results / "alarm.json").read_text(encoding="utf-8"))
    np.testing.assert_allclose([*PUBLIC.weights, PUBLIC.alarm], [*alarm["weights"], alarm["alarm"]], atol=1e-3)
    of_sums = [*PUBLIC.sum_weights, PUBLIC.sum_alarm]
    np.testing.assert_allclose(of_sums, [*alarm["sum weights"], alarm["sum alarm"]], atol=1e-3)
    # From the signs of each target; all data sets taught the table, so it notices a little more than elsewhere.
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "alarm.json"
    targets = json.loads(results.read_text(encoding="utf-8"))["targets"]
    warned = {
        harmed: [
            PUBLIC.weights @ target["signs"][:6] > PUBLIC.alarm for target in targets if target["harmed"] == harmed
        ]
        for harmed in (True, False)
    }
    assert np.mean(warned[True]) > 0.7
    assert np.mean(warned[False]) < 0.08


def test_both_corrections_count_alike_and_the_prior_not_where_samples_cannot_be_compared() -> None:
    here, prior = Correction(np.zeros(2), np.ones(2), np.ones(2)), Correction(np.zeros(4), np.ones(4), np.full(4, 3.0))
    features, signs, usual = np.array([0.5, 0.5]), np.array([0.2, 1.0, 9.0]), np.array([0.1, 2.0, 8.0])
    right = (1.0 + 3 * (0.1 - 1.0 + 1.0 + 4.0)) / 2  # features count for no more than 4 deviations
    assert Taught(here, prior, usual).at(features, signs) == pytest.approx(right)
    assert Taught(here, prior, usual).at(features, None) == Taught(here, prior, None).at(features, signs) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_correction_is_the_ridge_regression_of_scikit_learn_without_offsets(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshift.evaluation.estimate.correction.OFFSET", 0.0)
    rng = np.random.default_rng(seed)
    rows, off, weights = rng.normal(size=(30, 4)), rng.normal(size=30), rng.uniform(0.5, 2, 30)
    cases = [Case(row, value, weight) for row, value, weight in zip(rows, off, weights, strict=True)]
    correction = learn({"a": cases[:10], "b": cases[10:]})
    standard = (rows - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-6)
    right = Ridge(RIDGE, fit_intercept=False).fit(standard, off, sample_weight=weights)
    np.testing.assert_allclose(correction.coefficients, right.coef_, atol=1e-9)


def test_an_offset_that_all_cases_of_a_site_share_counts_less_than_differences_within_it() -> None:
    """The same regression as a mixed model: one column a site, whose coefficients have the offset's variance."""
    rng = np.random.default_rng(0)
    sites = {
        name: [Case(rng.normal(size=2), rng.normal() + at, 1.0) for _ in range(12)] for at, name in enumerate("abc")
    }
    rows = np.stack([case.features for cases in sites.values() for case in cases])
    standard = (rows - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-6)
    member = np.repeat(np.eye(3), 12, axis=0) * np.sqrt(RIDGE * OFFSET)
    off = np.array([case.off for cases in sites.values() for case in cases])
    right = Ridge(RIDGE, fit_intercept=False).fit(np.hstack([standard, member]), off)
    np.testing.assert_allclose(learn(sites).coefficients, right.coef_[:2], atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), image=st.booleans())
def test_changes_keep_type_and_shape_and_bytes_stay_bytes(seed: int, image: bool) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 256, (3, 1, 6, 5), dtype=np.uint8) if image else rng.normal(size=(4, 3)).astype(np.float32)
    made = dict(changes(inputs, Usual.of([inputs]), seed))
    assert len(made) == 11
    for changed in made.values():
        assert changed.dtype == inputs.dtype
        assert changed.shape == inputs.shape
        assert np.isfinite(changed.astype(np.float64)).all()


def test_samples_nearby_and_drawn_again() -> None:
    inputs = np.random.default_rng(0).normal(size=(20, 3))
    answers = nearby_answers(lambda rows: np.tile([0.3, 0.7], (len(rows), 1)), inputs, Usual.of([inputs]))
    assert answers.shape == (20, 4, 2)
    assert answers[..., 0].all()
    np.testing.assert_allclose(answers[..., 1], 0.7)
    labels = np.array([0] * 50 + [1] * 40 + [2] * 10)
    shares = [np.bincount(labels[rows], minlength=4) / len(rows) for rows in drawn_again(labels, 4)]
    assert len(shares) == 6
    assert all(share[3] == 0 for share in shares)
    assert max(np.abs(share[:3] - [0.5, 0.4, 0.1]).max() for share in shares) > 0.2
    # The third are drawn towards the usual mean, the fourth towards another sample; none goes beyond.
    inputs = np.random.default_rng(4).normal(size=(30, 3)).astype(np.float32) + np.float32(2)
    usual, seen = Usual.of([inputs - 1]), list[np.ndarray]()

    def scores(rows: np.ndarray) -> np.ndarray:
        seen.append(rows)
        return np.tile([0.3, 0.7], (len(rows), 1))

    nearby_answers(scores, inputs, usual)
    shrunk, mixed = seen[3], seen[4]
    np.testing.assert_allclose(shrunk - usual.mean, 0.6 * (inputs - usual.mean), rtol=1e-4, atol=1e-5)
    low, high = inputs.min(axis=0), inputs.max(axis=0)
    assert ((mixed >= low - 1e-5) & (mixed <= high + 1e-5)).all()
