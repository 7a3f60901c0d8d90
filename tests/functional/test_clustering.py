"""Clusters: the worked numbers, a plain loop as reference, lost classes, gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.functional.clustering import class_means, compactness, dispersion
from fedshift.methods.federated.mdfnet import spherical_kmeans
from fedshift.methods.federated.pardon import first_neighbour_partitions
from fedshift.methods.federated.stablefdg import spread_rows
from fedshift.methods.pooled.srdc import auxiliary_distribution, soft_cross_entropy, student_assignment

POINTS = torch.tensor([(2, 0), (3, 1), (0, 1), (1, 4), (2, 3)], dtype=torch.float64)


def test_worked_numbers_of_k_means() -> None:
    start = torch.tensor([0, 0, 1, 1, 0])
    means, present = class_means(POINTS, start, 2)
    torch.testing.assert_close(means, torch.tensor([(2.333333, 1.333333), (0.5, 2.5)]).double(), atol=1e-6, rtol=0)
    assert present.all()
    distances = (1 - torch.nn.functional.cosine_similarity(POINTS[4], means)) / 2
    assert distances.tolist() == pytest.approx([0.052786, 0.037661], abs=5e-7)
    found = spherical_kmeans(POINTS, start, 2)
    assert found.labels.tolist() == [0, 0, 1, 1, 1]
    assert found.passes == 2  # the second pass changed nothing
    expected = torch.tensor([(1.948683, 0.316228), (0.797236, 2.802193)]).double()
    torch.testing.assert_close(found.centroids, expected, atol=1e-6, rtol=0)


def plain(points: list[list[float]], labels: list[int], classes: int) -> list[int]:
    """The same as loops over numbers."""

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b) or 1.0)

    def total(rows: list[list[float]]) -> list[float]:
        return [sum(column) for column in zip(*rows, strict=True)]

    centroids = {k: total([p for p, y in zip(points, labels, strict=True) if y == k]) for k in set(labels)}
    for _ in range(100):
        new = [max(sorted(centroids), key=lambda k, p=p: cosine(p, centroids[k])) for p in points]  # type: ignore[misc]
        if new == labels:
            break
        labels = new
        for k in set(labels):
            rows = [[x / math.hypot(*p) for x in p] for p, y in zip(points, labels, strict=True) if y == k]
            centroids[k] = total(rows)
    return labels


@given(st.integers(0, 400))
@settings(max_examples=40)
def test_against_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (12,), generator=generator)
    found = spherical_kmeans(points, labels, 5)
    assert found.labels.tolist() == plain(points.tolist(), labels.tolist(), 5)
    # The length of a sample says nothing once it is assigned.
    assert not found.centroids[4].any()


def test_a_class_that_loses_its_samples_keeps_its_centroid() -> None:
    # Class 1's mean is half-way, so class 0 and 2 take both of its samples.
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]])
    found = spherical_kmeans(points, torch.tensor([0, 2, 1, 1]), 3)
    assert found.labels.tolist() == [0, 2, 0, 2]
    torch.testing.assert_close(found.centroids[1], torch.tensor([0.55, 0.55]))


def test_a_class_without_samples_takes_no_part_and_zero_vectors_go_somewhere() -> None:
    found = spherical_kmeans(torch.zeros(3, 2), torch.tensor([1, 1, 1]), 3)
    assert found.labels.tolist() == [1, 1, 1]


def test_auxiliary_distribution() -> None:
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    expected = torch.tensor([[0.623821, 0.376179], [0.321484, 0.678516]], dtype=torch.float64)
    torch.testing.assert_close(auxiliary_distribution(p), expected, atol=1e-6, rtol=0)
    sharp = torch.eye(3).double()
    torch.testing.assert_close(auxiliary_distribution(sharp), sharp)
    assert torch.isfinite(auxiliary_distribution(torch.tensor([[1.0, 0.0]]))).all()


def test_student_assignment_and_cross_entropy() -> None:
    features, centres = torch.randn(5, 3).double(), torch.randn(4, 3).double()
    kernel = 1 / (1 + torch.cdist(features, centres).square())
    torch.testing.assert_close(student_assignment(features, centres).exp(), kernel.softmax(1))
    labels = torch.tensor([0, 3, 1, 1, 2])
    loss = soft_cross_entropy(torch.nn.functional.one_hot(labels, 4).double(), student_assignment(features, centres))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(kernel, labels))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_compactness_is_that_of_all_pairs(rows: int, width: int, clusters: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, width, generator=generator, dtype=torch.float64) + 5
    labels = torch.randint(clusters, (rows,), generator=generator) * 3 - 1
    expected = 0.0
    for label in set(labels.tolist()):
        members = features[labels == label].tolist()
        pairs = sum(math.dist(a, b) ** 2 for a in members for b in members)
        expected += pairs / (2 * len(members))
    assert compactness(features, labels) == pytest.approx(expected, abs=1e-9)


def test_compactness_by_hand() -> None:
    assert compactness(torch.tensor([[0.0, 0], [2, 0], [9, 9]]), torch.tensor([4, 4, 0])) == 2
    assert compactness(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == 0


def test_dispersion_is_the_compactness_of_separate_groups() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 4, generator=generator) + 50 * torch.eye(3, 4)[labels]
    assert dispersion(features, 3, seed=7) == pytest.approx(compactness(features, labels))
    assert dispersion(features, 2, seed=7) > 10 * compactness(features, labels)


def test_dispersion_with_fewer_rows_than_clusters_is_nothing() -> None:
    assert dispersion(torch.tensor([[1.0, 2], [1, 2], [4, 4]]), 5, seed=0) == 0


def test_spread_rows_are_far_from_each_other() -> None:
    """By the shares of Arthur and Vassilvitskii (2007): of 0, 1 and 3, after 0, 3 comes nine times as often as 1."""
    rows, counts = torch.tensor([[0.0], [1.0], [3.0]]), {1: 0, 2: 0}
    for seed in range(600):
        first, second = spread_rows(rows, 2, torch.Generator().manual_seed(seed)).tolist()
        assert first != second
        if first == 0:
            counts[second] += 1
    assert sum(counts.values()) > 150
    assert counts[2] / sum(counts.values()) == pytest.approx(0.9, abs=0.07)


def test_spread_rows_of_equal_rows_are_all_there_are() -> None:
    assert len(spread_rows(torch.ones(4, 2), 4, torch.Generator().manual_seed(0))) == 4
    rows = spread_rows(torch.tensor([[0.0], [5.0], [9.0]]), 3, torch.Generator().manual_seed(0))
    assert sorted(rows.tolist()) == [0, 1, 2]


def test_first_neighbours_by_hand() -> None:
    """Directions by their angles, of any length: who is nearest to whom is seen at once, 275° is to 0°."""
    angles = torch.tensor([0.0, 10.0, 25.0, 90.0, 95.0, 180.0, 183.0, 275.0]).deg2rad()
    rows = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([1, 5, 2, 1, 9, 3, 1, 2])[:, None]
    fine, *coarse = first_neighbour_partitions(rows.double())
    assert fine.tolist() == [0, 0, 0, 1, 1, 2, 2, 0]
    assert coarse == []  # the three means would be one group
    assert [groups.tolist() for groups in first_neighbour_partitions(torch.ones(3, 2))] == [[0, 0, 0]]
    assert [groups.tolist() for groups in first_neighbour_partitions(torch.ones(1, 2))] == [[0]]


@given(st.integers(2, 40), st.integers(0, 99))
@settings(max_examples=20)
def test_first_neighbours_are_together_and_groups_are_nested(number: int, seed: int) -> None:
    rows = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    partitions = first_neighbour_partitions(rows)
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).fill_diagonal_(-2)
    assert torch.equal(partitions[0], partitions[0][cosines.argmax(1)])
    for fine, coarse in itertools.pairwise(partitions):
        assert 1 < len(coarse.unique()) < len(fine.unique())
        assert all(len(coarse[fine == group].unique()) == 1 for group in fine.unique())
