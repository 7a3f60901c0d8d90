"""The generated letters: equal options give equal pixels, sites look unlike, and classes can be told at a site."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedshift.data.builders.drawn_letters import HANDS, LETTERS, DrawnLetters
from tried import slow_after


def test_sites_classes_and_shapes() -> None:
    data = DrawnLetters(per_class=2, size=16).build()
    assert tuple(data.domains) == tuple(HANDS)
    assert data.classes == tuple(LETTERS)
    for domain in data.domains.values():
        assert domain.inputs.shape == (2 * len(LETTERS), 3, 16, 16)
        assert np.bincount(domain.labels).tolist() == [2] * len(LETTERS)
    assert DrawnLetters.manifest().counts == dict.fromkeys(HANDS, DrawnLetters().per_class * 16)


@pytest.mark.parametrize("colour", slow_after(1, [True, False]))
def test_equal_options_give_equal_pixels_and_another_seed_others(colour: bool) -> None:
    first, again = (DrawnLetters(per_class=2, size=16, colour=colour).build().domains for _ in range(2))
    other = DrawnLetters(per_class=2, size=16, colour=colour, base_seed=1).build().domains
    for name, domain in first.items():
        assert np.array_equal(domain.inputs, again[name].inputs)
        assert not np.array_equal(domain.inputs, other[name].inputs)
        assert domain.inputs.shape[1] == (3 if colour else 1)


@pytest.mark.slow
def test_letters_are_told_within_a_site_and_not_between_those_that_look_unlike() -> None:
    """By a linear classifier, which leans on where ink is; the print is dark on white, the screen bright on black."""
    data = DrawnLetters(per_class=20, size=16, colour=False).build().domains
    pixels = {name: np.asarray(domain.inputs).reshape(len(domain), -1) / 255 for name, domain in data.items()}
    train = np.arange(len(LETTERS) * 20) % 4 != 0
    known = LogisticRegression(max_iter=300).fit(pixels["print"][train], data["print"].labels[train])
    assert known.score(pixels["print"][~train], data["print"].labels[~train]) > 0.8
    assert known.score(pixels["screen"], data["screen"].labels) < 0.3
