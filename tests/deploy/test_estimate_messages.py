"""What a site says of scores crosses the network as it is, and what cannot be is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.plain_sums import checked_sums, plain_sums
from fedshift.evaluation.estimate.sums import sums_of


def test_counts_of_scores_arrive_and_fit_the_classes() -> None:
    draw = np.random.default_rng(0)
    second, labels = draw.random(50), draw.integers(0, 2, 50)
    sums = sums_of(np.stack([1 - second, second], axis=1), labels, 0.3)
    arrived = checked_sums(plain_sums(sums), 2).sums.by_score
    assert arrived is not None
    assert sums.by_score is not None
    np.testing.assert_array_equal(arrived, sums.by_score)
    other = np.roll(sums.by_score, 1, axis=0)
    with pytest.raises(FedshiftError, match="impossible"):
        checked_sums({**plain_sums(sums), "by_score": (other + 1).tolist()}, 2)
    assert checked_sums({name: one for name, one in plain_sums(sums).items() if name != "by_score"}, 2)  # as before
