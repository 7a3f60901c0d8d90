"""Wrong labels: how many, which, and always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.functional.poisoning import wrong_labels


@given(
    st.integers(0, 60), st.floats(0, 1), st.integers(2, 9), st.integers(0, 999), st.sampled_from(["uniform", "shift"])
)
def test_number_range_and_repeatability(n: int, fraction: float, classes: int, seed: int, rule: str) -> None:
    labels = np.random.default_rng(seed).integers(classes, size=n)
    poisoned = wrong_labels(labels, fraction, classes, seed, rule)  # type: ignore[arg-type]
    assert poisoned.dtype == np.int64
    assert (labels == np.random.default_rng(seed).integers(classes, size=n)).all()
    changed = poisoned != labels
    assert changed.sum() == round(n * fraction)
    assert ((poisoned >= 0) & (poisoned < classes)).all()
    if rule == "shift":
        assert (poisoned[changed] == (labels[changed] + 1) % classes).all()
    assert (wrong_labels(labels, fraction, classes, seed, rule) == poisoned).all()  # type: ignore[arg-type]
    # What is wrong stays wrong, and as wrong, when more becomes wrong.
    more = wrong_labels(labels, (1 + fraction) / 2, classes, seed, rule)  # type: ignore[arg-type]
    assert (more[changed] == poisoned[changed]).all()


def test_other_classes_are_equally_likely_and_seeds_differ() -> None:
    labels = np.full(30_000, 2)
    poisoned = wrong_labels(labels, 1.0, 4, 1)
    assert np.bincount(poisoned, minlength=4) / 30_000 == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=0.01)
    assert (wrong_labels(labels, 0.5, 4, 2) != wrong_labels(labels, 0.5, 4, 3)).any()
