"""FedSR's regularisers: worked numbers, torch's own distributions, invariants and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import numbers
from torch.distributions import Normal, kl_divergence

from fedshift.methods.federated.fedsr import gaussian_divergence, mean_prediction, norm_regulariser


@given(st.integers(1, 5), st.integers(1, 4), st.floats(0.1, 3), st.integers(0, 99))
def test_divergence_is_that_of_torch(samples: int, width: int, factor: float, seed: int) -> None:
    means, references = numbers(samples, width, seed=seed), numbers(samples, width, seed=seed + 1)
    scales, spreads = (numbers(samples, width, seed=seed + n).exp() for n in (2, 3))
    found = gaussian_divergence(means, scales, references, spreads, factor, epsilon=0.0)
    expected = kl_divergence(Normal(factor * means, factor * scales), Normal(references, spreads)).sum(1)
    torch.testing.assert_close(found, expected)
    assert (found >= 0).all()
    equal = gaussian_divergence(means, scales, means, scales)
    torch.testing.assert_close(equal, torch.zeros_like(equal), atol=1e-12, rtol=0)


def test_squared_norm_is_a_cross_entropy_up_to_a_constant() -> None:
    """E‖z‖² = 2s²(H(p, q) − Z/2 · log 2πs²) for q = N(0, s²I)."""
    codes, s = numbers(50, 3), 1.7
    surprise = -Normal(0.0, s).log_prob(codes).sum(1).mean()
    expected = 2 * s**2 * (surprise - 3 / 2 * math.log(2 * math.pi * s**2))
    assert norm_regulariser(codes).item() == pytest.approx(expected.item())


def test_an_underflown_scale_stays_finite() -> None:
    zero = torch.zeros(2, 3)
    found = gaussian_divergence(zero, zero, zero, torch.ones(2, 3))
    assert found.isfinite().all()


def test_mean_prediction_is_the_mean() -> None:
    logits = numbers(5, 4, 3) * 4
    torch.testing.assert_close(mean_prediction(logits).exp(), logits.softmax(2).mean(0))
    torch.testing.assert_close(mean_prediction(logits[:1]), logits[0].log_softmax(1))
    assert mean_prediction(logits.float() * 1e4).isfinite().all()
