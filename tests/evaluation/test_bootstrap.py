"""Resamples of groups: whole groups are drawn, as often as there are groups."""

from __future__ import annotations

import numpy as np

from fedshift.evaluation.bootstrap import Numbers, resampled_metrics


def test_groups_are_drawn_whole_and_as_often_as_there_are_groups() -> None:
    groups = np.array([4, 4, 4, 9, 7, 7])
    drawn: list[Numbers] = []

    def watched(weights: Numbers) -> dict[str, Numbers]:
        drawn.append(weights)
        return {"n": weights.sum(axis=1)}

    resampled_metrics(watched, len(groups), groups, 300)
    weights = np.concatenate(drawn)
    of_each = np.stack([weights[:, 0], weights[:, 3], weights[:, 4]], axis=1)
    assert (weights == of_each[:, [0, 0, 0, 1, 2, 2]]).all(), "samples of a group go together"
    assert (of_each.sum(axis=1) == 3).all()
    assert set(np.unique(of_each)) == {0, 1, 2, 3}
