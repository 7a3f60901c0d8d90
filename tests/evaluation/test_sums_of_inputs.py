"""Samples of which only sums are known say what the samples themselves say."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_accuracy_correction import TooSure, drawn

from fedshift.evaluation.estimate.changes import Usual, changes, nearby_answers
from fedshift.evaluation.estimate.combination import (
    TURNED_VALUES,
    Answers,
    KnownSite,
    LeftOut,
    estimate_accuracy,
    estimate_from_sums,
    harm_signs,
    looks,
    read,
)
from fedshift.evaluation.estimate.distances import Apart, Samples, beyond
from fedshift.evaluation.estimate.input_sums import Moments
from fedshift.evaluation.estimate.plain_sums import GivenSite, plain_looks, plain_reading, plain_sums
from fedshift.evaluation.estimate.prior import PUBLIC
from fedshift.evaluation.estimate.sums import sums_of


def some(seed: int, image: bool, n: int = 40) -> NDArray[Any]:
    draw = np.random.default_rng(seed)
    if image:
        return draw.integers(0, 256, (n, 2, 3, 3), dtype=np.uint8)
    return (draw.normal(size=(n, 4)) * [1, 10, 100, 0] + [0, 5, -50, 2]).astype(np.float32)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), image=st.booleans())
def test_sums_over_sites_say_what_their_samples_say(seed: int, image: bool) -> None:
    sites = [some(seed + number, image) for number in range(3)]
    here, moments = some(seed + 9, image), reduce(add, map(Moments.of, sites))
    apart, right = moments.apart(here), Samples.of(sites).apart(here)
    assert (apart.spread, apart.moved) == (pytest.approx(right.spread, abs=1e-4), pytest.approx(right.moved, abs=1e-4))
    assert apart.nearest is None
    usual, expected = moments.usual(here.shape[1:]), Usual.of(sites)
    np.testing.assert_allclose(usual.mean, expected.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(usual.deviation, expected.deviation, rtol=1e-4, atol=1e-4)


def test_few_samples_and_the_alarm() -> None:
    # No sum says whether a person is there who alone has a value.
    rows = np.zeros((30, 3))
    rows[:, 0] = np.arange(30)
    rows[:9, 1], rows[:10, 2] = 1, 1
    moments = Moments.of(rows, least=10)
    assert moments.total.tolist() == [435, 0, 10]
    without = Moments.of(np.delete(rows, 0, axis=0), least=9)
    assert without.total[1] == 0
    # Of ten samples that all differ from the usual value none is that of many.
    assert Moments.of(np.arange(10.0)[:, None], least=10).total.tolist() == [0]
    assert Moments.of(np.full((10, 1), 7.0), least=10).total.tolist() == [70]
    known, sums = [Apart(0.0, 0.5, 0.1), Apart(0.2, 0.4, 0.3)], Apart(0.4, None, 0.9)
    both = beyond(Apart(0.4, 0.1, 0.9), known)
    assert beyond(sums, known) == pytest.approx((both[0], both[2]))
    assert len(harm_signs(known, sums, (1.0, 0.0, 0.0))) == len(PUBLIC.sum_weights) == len(PUBLIC.weights) - 1


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_looks_of_sites_give_the_estimate_of_their_samples(noise: float) -> None:
    """As messages hold them, and with nothing but sums of inputs of the others."""
    model, rows = TooSure(), {name: drawn(seed) for seed, name in enumerate("abcde")}
    moments = {name: Moments.of(inputs) for name, (inputs, _) in rows.items()}
    left_out, known, sums = {}, {}, {}
    for name, (inputs, labels) in rows.items():
        there = reduce(add, (moment for other, moment in moments.items() if other != name))
        usual = there.usual((8,))
        answers = [
            Answers(model.scores(x), labels, nearby_answers(model.scores, x, usual, number), there.apart(x))
            for number, x in enumerate([inputs, *(changed for _, changed in changes(inputs, usual))])
        ]
        scores = model.scores(inputs)
        left_out[name] = LeftOut(scores, labels, tuple(answers), apart=answers[0].apart)
        sums[name] = sums_of(scores, labels)
    for number, (name, site) in enumerate(left_out.items()):
        others = reduce(add, (item for other, item in sums.items() if other != name))
        assert site.apart is not None
        plain = {
            "sums": plain_sums(sums[name]),
            "reading": plain_reading(read(others, site.scores)),
            "looked": plain_looks(list(looks(others, site, number)), site.apart),
        }
        known[name] = GivenSite.model_validate_json(json.dumps(plain)).known
        assert isinstance(known[name], KnownSite)
    here = drawn(50)[0] + noise * np.random.default_rng(7).normal(size=(300, 8))
    whole = reduce(add, moments.values())
    looked = {"nearby": nearby_answers(model.scores, here, whole.usual((8,))), "apart": whole.apart(here)}
    by_samples = estimate_accuracy(left_out, model.scores(here), **looked)
    by_sums = estimate_from_sums(known, model.scores(here), **looked)
    assert by_sums == by_samples
    assert by_sums.looked_at
    assert by_sums.harmful is (noise > 0)


@pytest.mark.parametrize(("rows", "copied", "told"), [(40, 0.0, True), (15, 0.0, False), (40, 0.2, False)])
def test_skewnesses_of_few_different_samples_are_not_compared(rows: int, copied: float, told: bool) -> None:
    draw = np.random.default_rng(0)
    second = draw.random(60)
    scores, labels = np.stack([1 - second, second], axis=1), (draw.random(60) < second).astype(np.int64)
    there = {name: LeftOut(scores, labels, apart=Apart(0.0, 0.0, 0.0, 0.9)) for name in "abc"}
    estimate = estimate_accuracy(there, scores[:rows], apart=Apart(0.0, 0.0, 0.0, -0.9), copied=copied)
    assert (TURNED_VALUES in estimate.reasons) is told
    assert estimate.harmful is told
