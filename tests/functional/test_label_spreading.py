"""Labels spread among neighbours: against dense matrices and scikit-learn, and what they repair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from seeded import numbers
from sklearn.neighbors import NearestNeighbors

from fedshift.methods.federated import recipe_unlabelled
from fedshift.methods.federated.recipe_unlabelled import equally_frequent, nearest_neighbours, spread, spread_labels


@pytest.mark.parametrize("chunk", [4, 1024])
def test_neighbours_are_those_of_largest_cosine(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_unlabelled, "_CHUNK", chunk)
    samples = numbers(11, 3)
    distances, wanted = NearestNeighbors(n_neighbors=4, metric="cosine").fit(samples.numpy()).kneighbors()
    near, cosines = nearest_neighbours(samples, 4)
    assert near.tolist() == wanted.tolist()
    np.testing.assert_allclose(cosines.numpy(), 1 - distances, atol=1e-12)


def test_spreading_is_that_of_a_dense_matrix() -> None:
    samples, probabilities = numbers(9, 3), numbers(9, 4, seed=1).softmax(1)
    near, cosines = nearest_neighbours(samples, 3)
    matrix = np.zeros((9, 9))
    for row in range(9):
        for other, cosine in zip(near[row].tolist(), cosines[row].tolist(), strict=True):
            matrix[row, other] = max(0.0, cosine) ** 3
    matrix = matrix + matrix.T
    root = np.diag(matrix.sum(1) ** -0.5)
    wanted = first = probabilities.numpy()
    for _ in range(7):
        wanted = 0.8 * root @ matrix @ root @ wanted + 0.2 * first
    found = spread(probabilities, near, cosines, share=0.8, steps=7)
    np.testing.assert_allclose(found.numpy(), wanted / wanted.sum(1, keepdims=True), atol=1e-12)


def test_who_is_like_nobody_keeps_its_row() -> None:
    near, cosines = nearest_neighbours(torch.eye(3).double(), 1)
    rows = numbers(3, 2).softmax(1)
    torch.testing.assert_close(spread(rows, near, cosines), rows)
    alone = nearest_neighbours(torch.ones(1, 2).double(), 10)
    torch.testing.assert_close(spread(rows[:1], *alone), rows[:1])


def test_classes_become_equally_frequent_by_factors_of_rows_and_classes() -> None:
    rows = numbers(12, 3).softmax(1)
    found = equally_frequent(rows, steps=200)
    torch.testing.assert_close(found.sum(0), torch.full((3,), 4.0).double())
    torch.testing.assert_close(found.sum(1), torch.ones(12).double())
    factors = (found / rows).log()  # a_i + b_c
    torch.testing.assert_close(factors - factors[:1] - factors[:, :1] + factors[:1, :1], torch.zeros(12, 3).double())
    without = torch.cat([rows, torch.zeros(12, 1).double()], 1)
    torch.testing.assert_close(equally_frequent(without, steps=200)[:, :3], found)


def test_a_weak_model_and_clear_clusters() -> None:
    """Right for a third of the samples, and mostly of one class: each cluster gets the class that it leans to."""
    classes = torch.arange(60) % 3
    samples = 4 * torch.eye(3).double()[classes] + 0.5 * numbers(60, 3)
    logits = torch.tensor([3.0, 0.0, 0.0]).double() + torch.eye(3).double()[classes] + numbers(60, 3, seed=2)
    assert (logits.argmax(1) == classes).double().mean() < 0.5
    assert torch.equal(spread_labels(samples, logits.softmax(1)), classes)
