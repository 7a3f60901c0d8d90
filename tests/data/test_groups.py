"""Which side a base sample falls on, however often and in whatever order a domain shows it."""

from __future__ import annotations

import numpy as np

from fedshift.data.splits import random_split, stratified_split


def test_rows_of_one_group_stay_together_in_any_order() -> None:
    """Twenty base samples, each shown one to four times, shuffled; 30 % of them are held out whole."""
    draws = np.random.default_rng(0)
    groups = draws.permutation(np.repeat(np.arange(20), draws.integers(1, 5, 20)))
    for seed in range(5):
        train, held_out = stratified_split(groups % 3, 0.3, seed, groups)
        assert sorted([*train, *held_out]) == list(range(len(groups)))
        assert not set(groups[train]) & set(groups[held_out])
        assert len(set(groups[held_out])) == 6


def test_the_side_of_a_group_is_the_same_in_every_domain() -> None:
    """Another domain shows every third base sample only, the last one first."""
    whole, part = np.arange(60), np.arange(60)[::-3]
    for seed in range(5):
        sides = []
        for groups in (whole, part):
            _, held_out = stratified_split(groups % 2, 0.4, seed, groups)
            sides.append(set(groups[held_out].tolist()))
        assert sides[0] & set(part.tolist()) == sides[1]


def test_seeds_hold_out_other_rows_of_a_class() -> None:
    """Of 10 and 20 samples of two classes 3 and 6, drawn anew by every seed; each row is held out now and then."""
    labels = np.repeat([0, 1], [10, 20])
    chosen = [stratified_split(labels, 0.3, seed)[1] for seed in range(40)]
    assert all(np.bincount(labels[rows]).tolist() == [3, 6] for rows in chosen)
    counts = np.bincount(np.concatenate(chosen), minlength=30)
    assert counts.min() >= 3  # 12 on average
    assert counts.max() <= 24


def test_a_class_is_never_held_out_whole() -> None:
    labels = np.array([0, 0, 0, 0, 1])
    train, held_out = stratified_split(labels, 0.9, 0)
    assert np.bincount(labels[train]).tolist() == [1, 1]
    assert labels[held_out].tolist() == [0, 0, 0]
    train, held_out = random_split(5, 0.95, 0)
    assert (len(train), len(held_out)) == (1, 4)
