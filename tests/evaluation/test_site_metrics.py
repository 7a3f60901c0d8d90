"""What scores say of a model: against scikit-learn, against numbers by hand, and what few samples hide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    matthews_corrcoef,
    recall_score,
    roc_auc_score,
)

from fedshift.evaluation.bootstrap import intervals, weighted_metrics
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import SiteMetrics
from fedshift.evaluation.site_metrics import Scored, best_threshold, common_threshold, site_metrics
from fedshift.evaluation.weighted_samples import Outcomes


def drawn(n: int, classes: int, seed: int = 0) -> Scored:
    """Scores that know something of the labels, rounded so that many are equal."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes))
    logits[np.arange(n), labels] += 1
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    scores = scores.round(2).astype(np.float32)
    return Scored(labels, scores.argmax(axis=1), scores)


def outcomes(scored: Scored, threshold: float | None = None) -> Outcomes:
    return Outcomes.of(scored.labels, scored.predicted, scored.scores, threshold)


def test_two_classes_are_measured_as_scikit_learn_does() -> None:
    scored = drawn(200, 2)
    y, p = scored.labels, scored.scores[:, 1]
    found = site_metrics("a", "target", scored, threshold=0.4).values
    wanted = {
        "balanced_accuracy": balanced_accuracy_score(y, scored.predicted),
        "mcc": matthews_corrcoef(y, scored.predicted),
        "auroc": roc_auc_score(y, p),
        "auprc": average_precision_score(y, p),
        "brier": brier_score_loss(y, p.astype(np.float64)),
        "sensitivity": recall_score(y, p >= np.float32(0.4)),
        "specificity": recall_score(y, p >= np.float32(0.4), pos_label=0),
    }
    for metric, value in wanted.items():
        assert found[metric] / 100 == pytest.approx(value, abs=1e-12), metric


def test_more_classes_are_measured_one_against_the_others() -> None:
    scored = drawn(200, 4)
    y, p = scored.labels, scored.scores.astype(np.float64)
    p /= p.sum(axis=1, keepdims=True)
    scored = Scored(y, p.argmax(axis=1), p)  # type: ignore[arg-type]
    found = site_metrics("a", "target", scored, threshold=0.5).values  # a threshold is for two classes
    assert found["mcc"] / 100 == pytest.approx(matthews_corrcoef(y, scored.predicted), abs=1e-12)
    assert found["auroc"] / 100 == pytest.approx(roc_auc_score(y, p, multi_class="ovr", average="macro"), abs=1e-12)
    true = np.eye(4)[y]
    assert found["auprc"] / 100 == pytest.approx(average_precision_score(true, p, average="macro"), abs=1e-12)
    assert found["brier"] / 100 == pytest.approx(((p - true) ** 2).sum(axis=1).mean() / 2, abs=1e-12)
    assert "sensitivity" not in found


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_count_as_they_do_in_scikit_learn(classes: int) -> None:
    scored = drawn(120, classes)
    w = np.random.default_rng(1).integers(0, 4, 120).astype(np.float64)
    found = weighted_metrics(
        outcomes(scored), ("auroc", "auprc", "balanced_accuracy", "mcc"), np.stack([np.ones(120), w])
    )
    single = range(classes) if classes > 2 else (1,)
    y, p = scored.labels, scored.scores
    areas = [roc_auc_score(y == c, p[:, c], sample_weight=w) for c in single]
    precisions = [average_precision_score(y == c, p[:, c], sample_weight=w) for c in single]
    assert found["auroc"][1] / 100 == pytest.approx(np.mean(areas), abs=1e-12)
    assert found["auprc"][1] / 100 == pytest.approx(np.mean(precisions), abs=1e-12)
    assert found["balanced_accuracy"][1] / 100 == pytest.approx(
        balanced_accuracy_score(y, scored.predicted, sample_weight=w), abs=1e-12
    )
    assert found["mcc"][1] / 100 == pytest.approx(matthews_corrcoef(y, scored.predicted, sample_weight=w), abs=1e-12)


@pytest.mark.parametrize("said", [0, 1])
def test_one_class_always_said_has_no_correlation(said: int) -> None:
    """As scikit-learn, for which 0/0 is 0."""
    labels, predicted = np.repeat([0, 1], [30, 10]), np.full(40, said)
    found = site_metrics("a", "target", Scored(labels, predicted, np.eye(2, dtype=np.float32)[predicted]))
    assert found.values["mcc"] == 100 * matthews_corrcoef(labels, predicted) == 0


@given(st.integers(1, 400), st.integers(1, 400))
def test_what_is_always_wrong_has_the_least_correlation_and_no_less(first: int, second: int) -> None:
    """No record may hold less than −100, whatever is rounded."""
    labels = np.repeat([0, 1], [first, second])
    scored = Scored(labels, 1 - labels, np.eye(2, dtype=np.float32)[1 - labels])
    assert -100 <= site_metrics("a", "target", scored).values["mcc"] <= -100 + 1e-9


def test_intervals_are_as_wide_as_the_binomial_says() -> None:
    scored = drawn(400, 2)
    low, high = intervals(outcomes(scored), ["accuracy"], None, 2000)["accuracy"]
    share = float((scored.predicted == scored.labels).mean())
    assert low < 100 * share < high
    assert (high - low) / 200 == pytest.approx(1.96 * np.sqrt(share * (1 - share) / 400), rel=0.1)


def test_samples_of_one_patient_are_drawn_together() -> None:
    """Four copies of each sample say no more than one of them; drawn apart they seem to."""
    one = drawn(100, 2)
    four = Scored(*(np.repeat(part, 4, axis=0) for part in (one.labels, one.predicted, one.scores)))
    width = {
        name: np.ptp(intervals(outcomes(scored), ["auroc"], groups, 500)["auroc"])
        for name, scored, groups in (
            ("one", one, None),
            ("apart", four, None),
            ("together", four, np.repeat(np.arange(100), 4)),
        )
    }
    assert width["together"] == pytest.approx(width["one"], rel=0.01)
    assert width["apart"] < 0.7 * width["one"]


def test_calibration_and_bounds_by_hand() -> None:
    # Scores 0.15, 0.15 (none positive), 0.85 × 3 (one positive): gaps 15 and 85 − 33.3, weighted 2 to 3.
    p = np.array([0.15, 0.15, 0.85, 0.85, 0.85])
    scored = Scored(np.array([0, 0, 1, 0, 0]), (p > 0.5).astype(np.int64), np.stack([1 - p, p], axis=1))
    found = site_metrics("a", "target", scored)
    assert found.reliability == [
        (pytest.approx(15), 0.0, 2),
        (pytest.approx(85), pytest.approx(100 / 3), 3),
    ]
    assert found.values["calibration_error"] == pytest.approx((2 * 15 + 3 * (85 - 100 / 3)) / 5)
    assert ENTRIES["mcc"].within(-100.00000000000001) == -100
    assert ENTRIES["auroc"].within(100.00000000000001) == 100
    assert ENTRIES["r2"].within(-1e9) == -1e9
    labels, scores = np.array([0, 0, 0, 1, 1]), np.array([0.1, 0.2, 0.62, 0.6, 0.9], dtype=np.float32)
    # From 0.21 to 0.60 both ill are found and one of three healthy is not; 0.5 is the nearest to itself.
    assert best_threshold(labels, scores) == 0.5
    assert best_threshold(labels, scores / 2) == 0.3
    sources = [
        SiteMetrics(site="a", part="held_out", samples=1, support=[1], values={}, threshold=t) for t in (0.2, 0.5, 0.9)
    ]
    assert common_threshold(sources) == 0.5
    assert common_threshold([]) is None


def test_what_few_samples_and_one_class_leave_out() -> None:
    scored = drawn(30, 2)
    only = Scored(np.ones(30, dtype=np.int64), scored.predicted, scored.scores)
    found = site_metrics("a", "target", only, threshold=0.5, resamples=20)
    assert set(found.values) == {"accuracy", "balanced_accuracy", "sensitivity", "brier", "calibration_error"}
    assert found.majority == 100.0
    assert site_metrics("a", "held_out", only).threshold is None
    three = drawn(40, 3)
    two_of_three = Scored(np.minimum(three.labels, 1), three.predicted, three.scores)
    areas = [roc_auc_score(two_of_three.labels == c, three.scores[:, c]) for c in (0, 1)]
    assert site_metrics("a", "target", two_of_three).values["auroc"] / 100 == pytest.approx(np.mean(areas), abs=1e-12)
    scored = drawn(60, 2)
    labels = np.zeros(60, dtype=np.int64)
    labels[:4] = 1
    few = Scored(labels, scored.predicted, scored.scores)
    found = site_metrics("a", "target", few, threshold=0.5, resamples=20, smallest_group=5)
    assert found.support == [None, None]
    assert found.majority is None
    assert set(found.values) == {"accuracy", "brier", "calibration_error"}
    assert set(found.intervals) == {"accuracy", "brier"}
    assert all(count >= 5 for *_, count in found.reliability)
    whole = site_metrics("a", "target", few)
    assert 60 - sum(count for *_, count in found.reliability) >= 5 or len(found.reliability) == len(whole.reliability)
    scored = drawn(20, 2)
    scored.scores[3] = np.nan
    assert set(site_metrics("a", "target", scored, resamples=20).values) == {"accuracy"}
