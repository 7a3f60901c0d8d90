"""FedOMG's direction: worked numbers, a search over all weights as the reference, and the vectors themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.methods.federated.fedomg import matching_shares, matching_weights, products_about
from fedshift.methods.federated.mcgdm import direction_gap

KAPPA = st.floats(0, 0.9)


def updates(seed: int, number: int = 3, size: int = 5) -> Tensor:
    """Random vectors, one of them ten times as long."""
    found = torch.randn(number, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found * torch.tensor([10.0] + [1.0] * (number - 1), dtype=torch.float64)[:, None]


def objective(vectors: Tensor, weights: Tensor, kappa: float) -> float:
    mean, mixed = vectors.mean(0), weights @ vectors
    return float(mixed @ mean + kappa * mean.norm() * mixed.norm())


@given(st.integers(0, 1000), st.integers(1, 5))
def test_products_come_from_distances(seed: int, number: int) -> None:
    points = updates(seed, number + 1)
    origin = points[-1]
    distances = (points[:, None] - points).square().sum(-1)
    expected = (points[:-1] - origin) @ (points[:-1] - origin).T
    torch.testing.assert_close(products_about(distances), expected)


@given(st.integers(0, 1000), KAPPA)
def test_no_other_weights_are_better(seed: int, kappa: float) -> None:
    """Against all weights in steps of 1/20."""
    vectors = updates(seed)
    found = matching_weights(vectors @ vectors.T, kappa)
    assert found.sum().item() == pytest.approx(1)
    assert bool((found >= 0).all())
    grid = [
        torch.tensor([a, b, 20 - a - b], dtype=torch.float64) / 20
        for a, b in itertools.product(range(21), range(21))
        if a + b <= 20
    ]
    best = min(objective(vectors, weights, kappa) for weights in grid)
    assert objective(vectors, found, kappa) <= best + 1e-9 * float(vectors.square().sum(1).mean())


@given(st.integers(0, 1000), KAPPA)
def test_the_direction_is_within_its_distance_of_the_mean(seed: int, kappa: float) -> None:
    """‖g* − ḡ‖ = κ‖ḡ‖, and of all such directions none agrees better with the site that it agrees least with."""
    vectors = updates(seed)
    mean = vectors.mean(0)
    direction = matching_shares(vectors @ vectors.T, kappa) @ vectors
    assert (direction - mean).norm().item() == pytest.approx(kappa * mean.norm().item(), rel=1e-6, abs=1e-9)
    least = (vectors @ direction).min()
    assert least >= (vectors @ ((1 + kappa) * mean)).min() - 1e-6 * vectors.square().sum(1).mean()


def test_the_site_that_disagrees_gets_the_weight() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-0.5, 1.0]], dtype=torch.float64)
    assert matching_weights(vectors @ vectors.T, 0.5).argmax() == 2


def test_without_kappa_or_update_it_is_the_mean() -> None:
    vectors = updates(1)
    assert matching_shares(vectors @ vectors.T, 0.0).tolist() == pytest.approx([1 / 3] * 3)
    assert matching_shares(torch.zeros(3, 3), 0.5).tolist() == pytest.approx([1 / 3] * 3)
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # the mean update vanishes
    assert matching_shares(opposite, 0.5).tolist() == pytest.approx([0.5, 0.5])


def test_scale_does_not_matter() -> None:
    vectors = updates(4)
    gram = vectors @ vectors.T
    torch.testing.assert_close(matching_shares(gram * 1e-12, 0.5), matching_shares(gram, 0.5))


def test_worked_direction_gap() -> None:
    """Rows at 90° and 0°, then a vector at 180°: ((1 + 0)/2 + 2)/2. Lengths do not matter."""
    matrix, other = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [5.0, 5.0]])
    vector = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(direction_gap([matrix, vector], [other, -3 * vector]), torch.tensor(1.25))
    assert torch.allclose(direction_gap([matrix], [2 * matrix]), torch.zeros(()), atol=1e-6)
