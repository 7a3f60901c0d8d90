"""Which classes a site keeps back, worked out on paper for groups of 10."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.evaluation.metrics import counts_by_class


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([10, 20, 30], "yyy"),  # ten are enough
        ([9, 20, 30], "nny"),  # 9 alone could be had from the whole: 20 goes too
        ([9, 1, 30], "nny"),  # two, and together 10
        ([8, 1, 30], "nnn"),  # two, but together 9
        ([4, 10, 20], "nny"),  # the smallest of the others goes
        ([3, 0, 20, 30], "nyny"),  # an absent class tells nothing of anybody
        ([5, 5, 40, 11], "nnyy"),
        ([1, 2, 3, 3, 40], "nnnnn"),
        ([1, 2, 3, 4, 40], "nnnny"),
    ],
)
def test_classes_that_are_shown(counts: list[int], shown: str) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    right = np.arange(len(labels)) % 2 == 0
    predictions = np.where(right, labels, (labels + 1) % len(counts))
    pairs = counts_by_class(predictions, labels, len(counts), 10)
    assert "".join("n" if pair is None else "y" for pair in pairs) == shown
    for label, pair in enumerate(pairs):
        if pair is not None:
            assert pair == [int(right[labels == label].sum()), counts[label]]
