"""M3SDA's moment distance and discrepancy: worked numbers, loops over pairs, gradients."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from seeded import numbers
from torch import Tensor

from fedshift.methods.pooled.m3sda import classifier_discrepancy, moment_distance

WORKED = [
    torch.tensor(rows, dtype=torch.float64)
    for rows in ([[1.0, 0.0], [3.0, 2.0]], [[0.0, 0.0], [2.0, 2.0]], [[1.0, 1.0], [1.0, 3.0]])
]


def batches_of(domains: int, width: int, seed: int) -> list[Tensor]:
    sizes = np.random.default_rng(seed).integers(2, 6, domains)
    return [numbers(int(size), width, seed=seed + index) + index for index, size in enumerate(sizes)]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
def test_against_loops_over_pairs(domains: int, width: int, seed: int) -> None:
    batches = batches_of(domains, width, seed)
    arrays = [batch.numpy() for batch in batches]
    means = [array.mean(0) for array in arrays]
    variances = [array.var(0, ddof=1) for array in arrays]
    squares = [(array**2).mean(0) for array in arrays]

    def spread(moments: list[np.ndarray]) -> float:
        return float(np.mean([np.linalg.norm(first - second) for first, second in combinations(moments, 2)]))

    usual = moment_distance(batches, "mean_variance").item()
    assert usual == pytest.approx((spread(means) + spread(variances)) / 2, rel=1e-9)
    paper = 0.0
    for one in (means, squares):  # the target's is the last
        paper += float(np.mean([np.linalg.norm(source - one[-1]) for source in one[:-1]]))
        paper += spread(one[:-1]) if domains > 2 else 0.0
    assert moment_distance(batches, "raw").item() == pytest.approx(paper, rel=1e-9)
    assert spread(means) == pytest.approx(pdist(np.array(means)).mean())


@given(st.integers(2, 4), st.floats(-3, 3), st.integers(0, 99))
def test_invariants(domains: int, shift: float, seed: int) -> None:
    batches = batches_of(domains, 3, seed)
    distance, paper = moment_distance(batches, "mean_variance"), moment_distance(batches, "raw")
    assert distance > 0
    torch.testing.assert_close(moment_distance(batches[::-1], "mean_variance"), distance)
    torch.testing.assert_close(moment_distance([batch + shift for batch in batches], "mean_variance"), distance)
    torch.testing.assert_close(moment_distance([batch.flip(0) for batch in batches], "mean_variance"), distance)
    torch.testing.assert_close(moment_distance([*batches[:-1][::-1], batches[-1]], "raw"), paper)
    for moments in ("mean_variance", "raw"):
        assert moment_distance([batches[0]] * domains, moments).item() == pytest.approx(0, abs=1e-12)  # type: ignore[arg-type]


def test_equal_moments_have_gradient_zero() -> None:
    # Two of the worked batches have the same variance, so one root has the argument 0.
    batches = [batch.clone().requires_grad_() for batch in WORKED]
    moment_distance(batches, "mean_variance").backward()
    assert all(batch.grad is not None and batch.grad.isfinite().all() for batch in batches)
    twins = [WORKED[0].clone().requires_grad_() for _ in range(2)]
    moment_distance(twins).backward()
    assert all(batch.grad is not None and not batch.grad.any() for batch in twins)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_discrepancy(samples: int, classes: int, seed: int) -> None:
    first, second = (numbers(samples, classes, seed=seed + side).softmax(1) for side in (0, 1))
    found = classifier_discrepancy(first, second).item()
    total = sum(abs(p - q) for p, q in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True))
    assert found == pytest.approx(total / (samples * classes))
    assert found == classifier_discrepancy(second, first).item()
    assert 0 <= found <= 2 / classes
    assert classifier_discrepancy(first, first).item() == 0
