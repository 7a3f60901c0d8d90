"""SHOT's objective and pseudo-labels, FADA's mutual information: worked numbers and independent references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import numbers
from sklearn.metrics import mutual_info_score
from sklearn.metrics.pairwise import cosine_distances
from torch import Tensor

from fedshift.functional.information import information_maximisation, pseudo_labels
from fedshift.methods.federated.fada import mutual_information


@given(st.integers(1, 6), st.integers(1, 5), st.floats(-9, 9), st.integers(0, 99))
def test_information_maximisation(samples: int, classes: int, constant: float, seed: int) -> None:
    logits = numbers(samples, classes, seed=seed) * 3
    loss = information_maximisation(logits)
    odds = np.exp(logits.numpy())
    rows = odds / odds.sum(1, keepdims=True)
    mean, epsilon = rows.mean(0), 1e-5
    each = [-sum(p * math.log(p + epsilon) for p in row) for row in rows]
    assert loss.item() == pytest.approx(np.mean(each) + sum(p * math.log(p + epsilon) for p in mean), abs=1e-9)
    assert -math.log(classes) - 1e-4 <= loss.item() <= 1e-12
    torch.testing.assert_close(information_maximisation(logits + constant), loss)
    assert information_maximisation(logits[:1].expand(4, -1)).item() == pytest.approx(0, abs=1e-12)


def test_information_is_that_of_sample_and_class() -> None:
    """E[H(p)] − H(E[p]) is minus the mutual information of a sample's number and its class."""
    table = np.array([[6.0, 3.0, 1.0], [2.0, 2.0, 6.0]])
    expected = -mutual_info_score(None, None, contingency=table)
    assert information_maximisation(torch.from_numpy(np.log(table)), 0.0).item() == pytest.approx(expected, abs=1e-12)


def reference_labels(features: np.ndarray, probabilities: np.ndarray) -> list[int]:
    """SHOT's four steps, sample by sample and class by class."""
    points = np.array([np.append(row, 1) / math.sqrt((row**2).sum() + 1) for row in features])
    allowed = sorted({int(row.argmax()) for row in probabilities})
    affinity = probabilities
    for _ in range(2):
        centroids = [
            sum(affinity[i, c] * points[i] for i in range(len(points))) / affinity[:, c].sum() for c in allowed
        ]
        nearest = cosine_distances(points, np.array(centroids)).argmin(1)
        labels = [allowed[index] for index in nearest]
        allowed = sorted(set(labels))
        affinity = np.eye(probabilities.shape[1])[labels]
    return labels


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.floats(0.2, 5), st.integers(0, 999))
def test_pseudo_labels_against_the_steps(samples: int, width: int, classes: int, scale: float, seed: int) -> None:
    features = numbers(samples, width, seed=seed) * scale
    probabilities = softmax(numbers(samples, classes, seed=seed + 1) * 2)
    labels = pseudo_labels(features, probabilities)
    assert labels.dtype == torch.int64
    assert labels.tolist() == reference_labels(features.numpy(), probabilities.numpy())
    assert set(labels.tolist()) <= set(probabilities.argmax(1).tolist())


@given(st.integers(2, 10), st.integers(2, 5), st.integers(0, 999))
def test_order_of_samples_and_of_classes_does_not_matter(samples: int, classes: int, seed: int) -> None:
    features, probabilities = numbers(samples, 3, seed=seed), softmax(numbers(samples, classes, seed=seed + 1))
    labels = pseudo_labels(features, probabilities)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(samples, generator=generator)
    assert torch.equal(pseudo_labels(features[rows], probabilities[rows]), labels[rows])
    names = torch.randperm(classes, generator=generator)
    # Class names[c] of before is class c now.
    assert torch.equal(names[pseudo_labels(features, probabilities[:, names])], labels)


def test_clusters_correct_wrong_predictions() -> None:
    truth = torch.arange(3).repeat(20)
    features = 5 * torch.eye(3).double()[truth] + 0.3 * numbers(60, 3)
    probabilities = torch.full((60, 4), 0.05).double()
    predicted = truth.clone()
    predicted[:9] = (truth[:9] + 1) % 3
    probabilities[torch.arange(60), predicted] = 0.85
    assert torch.equal(pseudo_labels(features, probabilities), truth)


def test_the_appended_constant_tells_lengths_apart() -> None:
    """Two clusters in one direction: without the constant, normalised features would coincide."""
    features = torch.tensor([[0.1], [0.2], [5.0], [6.0]], dtype=torch.float64)
    probabilities = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.3, 0.7], [0.1, 0.9]], dtype=torch.float64)
    assert pseudo_labels(features, probabilities).tolist() == [0, 0, 1, 1]


def test_a_class_that_loses_all_its_samples_takes_no_part() -> None:
    # Class 0 is predicted once, but its centroid lies midway between two clusters and is nobody's nearest.
    features = torch.tensor([[3.0, 0.0]] * 3 + [[0.0, 3.0]] * 3).double()
    probabilities = torch.tensor([[0.5, 0.4, 0.1]] + [[0.3, 0.6, 0.1]] * 2 + [[0.4, 0.1, 0.5]] * 3).double()
    assert pseudo_labels(features, probabilities).tolist() == [1, 1, 1, 2, 2, 2]
    # Nor does an empty class 1 win the second sample, which has a negative cosine with both other centroids.
    features = torch.tensor([[1.0], [-9.0], [1.0], [9.0], [9.0]]).double()
    tenths = torch.tensor([[4, 5, 1], [6, 1, 3], [8, 1, 1], [3, 3, 4], [1, 4, 5]]).double()
    assert pseudo_labels(features, tenths / 10).tolist() == [0, 0, 0, 2, 2]


def test_pseudo_labels_are_constants() -> None:
    features, logits = numbers(6, 3).requires_grad_(), numbers(6, 3, seed=1).requires_grad_()
    labels = pseudo_labels(features, softmax(logits))
    assert not labels.requires_grad
    assert pseudo_labels(features.float(), softmax(logits)).tolist() == labels.tolist()


@given(st.integers(1, 7), st.integers(1, 7), st.floats(-50, 50), st.integers(0, 99))
def test_mutual_information(pairs: int, shuffled_pairs: int, constant: float, seed: int) -> None:
    joint, shuffled = numbers(pairs, seed=seed) * 2, numbers(shuffled_pairs, seed=seed + 1) * 2
    estimate = mutual_information(joint, shuffled)
    expected = joint.numpy().mean() - math.log(np.exp(shuffled.numpy()).mean())
    assert estimate.item() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(mutual_information(joint + constant, shuffled + constant), estimate)
    torch.testing.assert_close(mutual_information(joint[:, None], shuffled[:, None]), estimate)
    # Jensen: with the same scores on both sides there is no information.
    assert mutual_information(joint, joint).item() <= 1e-12
    assert mutual_information(joint * 0 + constant, shuffled * 0 + constant).item() == pytest.approx(0, abs=1e-9)


def test_the_best_critic_finds_the_information_of_a_table() -> None:
    """With T the log density ratio and pairs in their exact proportions, the bound is attained."""
    table = np.array([[6, 2, 2], [1, 5, 4]])
    shares = table / table.sum()
    product = shares.sum(1, keepdims=True) * shares.sum(0)
    critic = torch.from_numpy(np.log(shares / product)).flatten()
    joint = critic.repeat_interleave(torch.from_numpy(table).flatten())
    shuffled = critic.repeat_interleave(torch.from_numpy((product * table.sum() ** 2).round().astype(int)).flatten())
    truth = mutual_info_score(None, None, contingency=table)
    assert mutual_information(joint, shuffled).item() == pytest.approx(truth, abs=1e-12)
    assert mutual_information(joint * 0.8, shuffled * 0.8).item() < truth
