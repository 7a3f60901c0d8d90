"""MDFNet's schedule, its readiness gate and the proxy A-distance: worked numbers, ends, errors."""

from __future__ import annotations

import math

import pytest

from fedshift.experiment.distance import proxy_distance
from fedshift.methods.federated.mdfnet import (
    collaborative_shares,
    is_ready,
    names_few_classes,
    progress_since,
    progressive_weight,
)


def test_progressive_weight() -> None:
    by_progress = {0: 0, 0.05: 0.122459, 0.1: 0.231059, 0.2: 0.380797, 0.3: 0.452574, 0.5: 0.493307, 1: 0.499955}
    for r, expected in by_progress.items():
        assert progressive_weight(r) == pytest.approx(expected, abs=5e-7)
        if r:
            e = math.exp(-10 * r)
            assert progressive_weight(r) == pytest.approx((1 - e) / (2 * (1 + e)), abs=1e-15)
    for r, expected in {1: 0.4999546, 2: 0.5, 3: 0.5}.items():
        assert progressive_weight(r) == pytest.approx(expected, abs=5e-8)
    assert progressive_weight(0.3, rho=0) == 0


@pytest.mark.parametrize(
    ("labelled", "unlabelled", "progress", "expected"),
    [
        (1, 1, 0.0, (1.0, 0.0)),
        (1, 1, 0.1, (0.768941, 0.231059)),
        (2, 1, 0.2, (0.309601, 0.380797)),
        (1, 3, 1.0, (0.500045, 0.166652)),
    ],
)
def test_shares(labelled: int, unlabelled: int, progress: float, expected: tuple[float, float]) -> None:
    found = collaborative_shares(labelled, unlabelled, progressive_weight(progress))
    assert found == pytest.approx(expected, abs=1e-6)
    assert labelled * found[0] + unlabelled * found[1] == pytest.approx(1, abs=1e-15)


def test_proxy_distance() -> None:
    assert [proxy_distance(error) for error in (0.0, 0.1, 0.5, 0.6)] == pytest.approx([2.0, 1.6, 0.0, 0.0])


def test_the_gate_compares_with_guessing() -> None:
    """ln 10 = 2.302585, a quarter of it 0.575646; for 2 classes 0.173287."""
    assert is_ready(0.5756, 10, 0.25)
    assert not is_ready(0.5757, 10, 0.25)
    assert is_ready(0.1732, 2, 0.25)
    assert not is_ready(0.1733, 2, 0.25)
    assert not is_ready(math.log(7), 7, 1.0)


def test_progress_begins_where_the_gate_opened() -> None:
    assert [progress_since(0, done, 5) for done in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert [progress_since(3, done, 8) for done in (3, 4, 7)] == [0, 0.25, 1]
    assert progress_since(0, 7, 5) == 1  # a run that goes on beyond its plan
    assert progress_since(4, 4, 5) == 0  # one round is left
    assert progress_since(0, 0, 1) == 0


def test_half_of_the_classes_is_few() -> None:
    assert [named for named in range(1, 8) if names_few_classes(named, 7)] == [1, 2, 3]
    assert [named for named in range(1, 5) if names_few_classes(named, 4)] == [1, 2]
