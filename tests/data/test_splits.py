"""Splits: shares, groups that stay on one side, repeatability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.data.domain import Domain
from fedshift.data.splits import cut, part_rows, random_split, stratified_split
from fedshift.errors import UserError

labels_lists = st.lists(st.integers(0, 4), min_size=1, max_size=80).map(lambda found: np.array(found, dtype=np.int64))
fractions = st.floats(0, 0.95)
seeds = st.integers(0, 2**31)
group_lists = st.lists(st.integers(0, 300), max_size=120)


@given(labels_lists, fractions, seeds)
def test_every_class_gives_its_share_and_keeps_one(labels: np.ndarray, fraction: float, seed: int) -> None:
    train, held = stratified_split(labels, fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert train.tolist() == sorted(train.tolist())
    assert held.tolist() == sorted(held.tolist())
    for label in np.unique(labels):
        samples, out = int((labels == label).sum()), int((labels[held] == label).sum())
        assert out < samples
        assert abs(out - samples * fraction) <= 0.5 or out == samples - 1


@given(labels_lists, fractions, seeds)
def test_same_arguments_same_rows(labels: np.ndarray, fraction: float, seed: int) -> None:
    first, second = stratified_split(labels, fraction, seed), stratified_split(labels, fraction, seed)
    assert np.array_equal(first[0], second[0])


@given(group_lists, group_lists, fractions, seeds)
def test_a_group_is_on_one_side_in_every_domain(one: list[int], other: list[int], fraction: float, seed: int) -> None:
    """Whatever groups the domains hold, in any order and with any number of rows each."""
    sides: dict[int, set[bool]] = {}
    for groups in (one, other):
        array = np.array(groups, dtype=np.int64)
        train, held = stratified_split(array % 3, fraction, seed, array)
        assert sorted([*train, *held]) == list(range(len(array)))
        for rows, side in ((train, False), (held, True)):
            for row in rows:
                sides.setdefault(int(array[row]), set()).add(side)
    assert all(len(found) == 1 for found in sides.values())


def test_groups_give_their_exact_share() -> None:
    draws = np.random.default_rng(0)
    groups = draws.permutation(np.repeat(np.arange(20), draws.integers(1, 5, 20)))
    for seed in range(5):
        _, held = stratified_split(groups % 3, 0.3, seed, groups)
        assert len(set(groups[held])) == 6
    labels, groups = np.repeat(np.arange(10), 100), np.arange(1000)
    parts = [stratified_split(labels, 0.3, seed, groups)[1] for seed in range(5)]
    for held in parts:
        assert np.bincount(labels[held]).tolist() == [30] * 10
    assert len({tuple(held) for held in parts}) == 5
    assert not np.array_equal(parts[0][:30], parts[0][30:60] - 100)  # each class has its own draw


def test_seeds_hold_out_other_rows_of_a_class() -> None:
    """3 of 10 and 6 of 20 samples, drawn anew by every seed; each row is held out in some draws."""
    labels = np.repeat([0, 1], [10, 20])
    chosen = [stratified_split(labels, 0.3, seed)[1] for seed in range(40)]
    assert all(np.bincount(labels[rows]).tolist() == [3, 6] for rows in chosen)
    counts = np.bincount(np.concatenate(chosen), minlength=30)
    assert counts.min() >= 3  # 12 on average
    assert counts.max() <= 24


@pytest.mark.parametrize("groups", [None, np.arange(20)])
def test_fraction_zero_holds_nothing_out(groups: np.ndarray | None) -> None:
    train, held = stratified_split(np.zeros(20, dtype=np.int64), 0.0, 0, groups)
    assert (len(train), len(held)) == (20, 0)


def test_classes_of_one_and_official_rows() -> None:
    train, held = stratified_split(np.array([0] * 9 + [1]), 0.9, 3)
    assert 9 in train
    assert len(held) == 8
    train, held = random_split(5, 0.95, 0)
    assert (len(train), len(held)) == (1, 4)
    inputs, labels = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1])
    with pytest.raises(UserError, match="domain 'd' has no official split"):
        part_rows(Domain("d", inputs, labels), 0.5, 0, "official")
    domain = Domain("d", inputs, labels, None, np.array([3, 0]), np.array([1]))
    train, held = part_rows(domain, 0.5, 0, "official")
    assert (train.tolist(), held.tolist()) == ([0, 3], [1])
    train, held = part_rows(domain, 0.5, 0, "random")
    assert (len(train), len(held)) == (2, 2)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, float("nan")])
def test_fraction_out_of_bounds(fraction: float) -> None:
    with pytest.raises(UserError, match="fraction"):
        stratified_split(np.zeros(3, dtype=np.int64), fraction, 0)


def test_sites_differ_as_a_dirichlet_distribution_of_all_classes() -> None:
    """A share of α = (c, c, c, c) has the variance p(1 − p)/(4c + 1), and 40 draws of it add a fortieth of the rest."""
    labels, skew = np.repeat(np.arange(4), 100), 0.5
    shares = []
    for number in range(15):
        whole = Domain(f"site{number}", np.zeros((400, 1), np.float32), labels)
        shares += [np.bincount(part.labels, minlength=4) / len(part) for part in cut(whole, 10, "labels", skew)[:2]]
    expected = 0.25 * 0.75 / (4 * skew + 1)
    expected += (0.25 * 0.75 - expected) / 40
    assert np.var(shares) == pytest.approx(expected, rel=0.25)  # α = skew would have 1.9 times as much
