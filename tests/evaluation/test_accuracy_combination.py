"""The estimate at a site without labels: whether its interval keeps its promise, and when there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.evaluation.estimate.combination import Estimate, LeftOut, estimate_accuracy


def site(n: int, seed: int, sharp: float = 1.0, off: float = 0.0, share: float = 0.5, classes: int = 2) -> LeftOut:
    """A site whose scores are the right probabilities, but for logits ``sharp`` times too sure and ``off`` in noise."""
    rng = np.random.default_rng(seed)
    weights = np.array([share, *[(1 - share) / (classes - 1)] * (classes - 1)])
    labels = rng.choice(classes, n, p=weights)
    logits = rng.normal(size=(n, classes))
    logits[np.arange(n), labels] += 2
    logits = 2 * logits + off * rng.normal(size=(n, classes))
    scores = np.exp(sharp * logits)
    return LeftOut(scores / scores.sum(axis=1, keepdims=True), labels)


def sites(number: int, n: int = 300, seed: int = 0, classes: int = 2) -> dict[str, LeftOut]:
    return {f"s{at}": site(n, 100 * seed + at, 1.5, classes=classes) for at in range(number)}


def accuracy(one: LeftOut) -> float:
    return 100 * float((one.scores.argmax(axis=1) == one.labels).mean())


def width(found: Estimate) -> float:
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


@pytest.mark.slow
def test_a_site_like_the_others_is_estimated_well_and_within_its_interval() -> None:
    errors, inside = [], []
    for seed in range(40):
        target = site(250, 7000 + seed, 1.5)
        found = estimate_accuracy(sites(4, seed=seed), target.scores)
        errors.append(abs(found.estimate - accuracy(target)))
        inside.append(found.low <= accuracy(target) <= found.high)
    assert np.mean(errors) < 2.5
    assert np.mean(inside) >= 0.88


def test_a_class_that_is_as_frequent_as_the_model_is_right_is_told() -> None:
    """Nobody is told a confident number of a model that is worth no more than the same answer for all."""
    known = {name: site(300, at, 1.0, off=2.0) for at, name in enumerate("abcd")}
    rare = estimate_accuracy(known, site(600, 9, 1.0, off=2.0, share=0.97).scores)
    even = estimate_accuracy(known, site(600, 9, 1.0, off=2.0).scores)
    said = "to say it of all may be right as often as the model"
    assert any(said in reason for reason in rare.reasons)
    assert not any(said in reason for reason in even.reasons)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_moved_class_frequencies_alone_do_not_mislead(share: float) -> None:
    target = site(600, 1, 1.5, share=share)
    found = estimate_accuracy(sites(4, 600), target.scores)
    assert found.estimate == pytest.approx(accuracy(target), abs=5)
    assert found.unexplained < 0.05


def test_unexplained_answers_few_samples_and_unlike_sites() -> None:
    target = site(400, 2, sharp=0.2)
    found = estimate_accuracy(sites(4), target.scores)
    assert found.unexplained > 0.3
    assert found.harmful
    target = site(1000, 3, 1.5)
    common = estimate_accuracy(sites(4), target.scores)
    few = estimate_accuracy(sites(4), target.scores[:40])
    others = sites(4) | {"worse": site(300, 5, sharp=4.0, off=4.0)}
    unlike = estimate_accuracy(others, target.scores)
    assert width(few) > width(common)
    assert width(unlike) > width(common)


def test_a_site_is_not_among_those_that_estimate_it() -> None:
    """Of two sites with the same scores one is right in 95 % and one in 65 %: either would be off by 30 points, and
    with itself among those that estimate it by half of that.
    """
    scores = site(600, 12).scores
    said, number = scores.argmax(axis=1), np.arange(600) % 20
    left_out = {str(wrong): LeftOut(scores, np.where(number < wrong, 1 - said, said)) for wrong in (1, 7)}
    found = estimate_accuracy(left_out, scores)
    assert found.abstain or width(found) > 65


@pytest.mark.parametrize(
    ("number", "rows"),
    [(0, 50), (1, 50), (4, 0), (4, 5)],
    ids=["no site", "one site", "no sample", "five samples"],
)
def test_too_little_gives_no_number(number: int, rows: int) -> None:
    found = estimate_accuracy(sites(number), site(max(rows, 1), 4).scores[:rows])
    assert (found.estimate, found.low, found.high) == (None, None, None)
    assert found.abstain
    assert "too few" in found.reasons[0]


def test_what_is_said_of_an_estimate() -> None:
    found = estimate_accuracy(sites(4), np.full((80, 2), 0.5))
    assert found.abstain
    assert found.estimate is None
    assert "same" in found.reasons[0]
    target = site(200, 6, 1.5)
    stopped = estimate_accuracy(sites(4), target.scores, unlike="column 'age' is in months")
    noted = estimate_accuracy(sites(4), target.scores, unusual="column 'age' is unusual")
    assert stopped.abstain
    assert stopped.harmful
    assert stopped.reasons[0] == "column 'age' is in months"
    assert not noted.abstain
    assert "column 'age' is unusual" in noted.reasons
    rare = site(60, 8, 1.5)
    rare = replace(rare, labels=(np.arange(60) < 3).astype(np.int64))
    found = estimate_accuracy(sites(3) | {"canada": rare}, site(200, 9, 1.5).scores)
    assert any("canada" in reason and "3" in reason for reason in found.reasons)
    one, other = site(200, 10), site(200, 11)
    found = estimate_accuracy(sites(3), one.scores, [other.scores])
    same = (one.scores.argmax(axis=1) == other.scores.argmax(axis=1)).mean()
    assert found.parts["agreement"] == pytest.approx(100 * same)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(2, 5), st.integers(10, 60), st.integers(0, 10**6), st.floats(0.01, 30))
def test_whatever_the_scores_the_estimate_lies_in_its_interval(
    classes: int, number: int, n: int, seed: int, sharp: float
) -> None:
    left_out = sites(number, n, seed, classes)
    target = site(n, seed + 1, sharp, classes=classes)
    found = estimate_accuracy(left_out, target.scores)
    order = np.random.default_rng(seed).permutation(n)
    again = estimate_accuracy(left_out, target.scores[order])
    if found.abstain:
        assert found.estimate is None
        assert found.reasons
    else:
        assert 0 <= found.low <= found.estimate <= found.high <= 100
    assert again.abstain == found.abstain
    if n <= 400 and found.estimate is not None:
        assert again.estimate == pytest.approx(found.estimate, abs=1e-6)
