"""MDFNet's schedule and the proxy A-distance: the tables of the specification, ends, errors."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.errors import UserError
from fedshift.functional.losses import entropy
from fedshift.functional.mdfnet_schedule import collaborative_shares, progressive_weight, proxy_distance


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
    with pytest.raises(UserError, match="at least 0"):
        progressive_weight(-1)


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


def test_shares_need_both_kinds_of_site() -> None:
    for counts in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match=f"{counts[0]} labelled and {counts[1]} unlabelled"):
            collaborative_shares(*counts, 0.2)
    with pytest.raises(UserError, match="share"):
        collaborative_shares(1, 1, 1.5)


def test_proxy_distance() -> None:
    assert [proxy_distance(error) for error in (0.0, 0.1, 0.5, 0.6)] == pytest.approx([2.0, 1.6, 0.0, 0.0])
    with pytest.raises(UserError, match="error rate"):
        proxy_distance(1.1)


def test_entropy_of_the_specification() -> None:
    assert entropy(torch.tensor([0.7, 0.2, 0.1]).double(), 0.0).item() == pytest.approx(0.801819, abs=5e-7)
