"""Clipped sums, noise and the cost of noisy steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedshift.functional.differential_privacy import (
    NoisySteps,
    adaptive_epsilon,
    clipped_sum,
    epsilon,
    gaussian,
    noise_multiplier,
)


def norm_of(parts: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.double().norm()) ** 2 for part in parts))


def test_one_sample_more_changes_the_sum_by_at_most_the_norm() -> None:
    draws = torch.Generator().manual_seed(0)
    gradients = [torch.randn(9, 4, 3, generator=draws) * 5, torch.randn(9, 4, generator=draws)]
    gradients[0][2] *= 1e-3
    gradients[1][2] *= 1e-3
    whole = clipped_sum(gradients, 0.7)
    for left_out in range(9):
        kept = [row for row in range(9) if row != left_out]
        rest = clipped_sum([gradient[kept] for gradient in gradients], 0.7)
        own = norm_of([a - b for a, b in zip(whole, rest, strict=True)])
        plain = norm_of([gradient[left_out] for gradient in gradients])
        assert own <= 0.7
        assert own == pytest.approx(min(0.7, plain), rel=1e-3)


def test_a_group_counts_as_one_sample_with_the_mean_of_its_gradients() -> None:
    gradient = torch.tensor([[3.0, 0.0], [0.0, 0.3], [1.0, 0.0], [0.0, 0.5]])
    (total,) = clipped_sum([gradient], 1.0, torch.tensor([7, 2, 7, 2]))  # means (2, 0) and (0, 0.4)
    assert total.tolist() == pytest.approx([1.0, 0.4], rel=1e-4)


def test_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    (total,) = clipped_sum([torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.5, 0.0]])], 1.0)
    assert total.tolist() == pytest.approx([0.5, 0.0])


def test_noise_is_standard_normal() -> None:
    noise = gaussian((200, 100), torch.Generator().manual_seed(1)).numpy()
    assert noise.mean() == pytest.approx(0, abs=0.03)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(noise) < 1) == pytest.approx(0.6827, abs=0.01)


def losses_by_convolution(sigma: float, rate: float, steps: int, reverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """The privacy loss of all steps on a grid, and its probabilities, by the Fourier transform.

    Of the pair of a mixture, in which one unit takes part with probability q, and a plain normal; or the reverse.
    """
    width, size = 1e-3, 2**16
    x = np.linspace(-15 * sigma, 15 * sigma + 1, 100_001)
    without = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    log_ratio = np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
    loss, density = (-log_ratio, without) if reverse else (log_ratio, without * np.exp(log_ratio))
    grid = np.bincount(np.rint(loss / width).astype(int) % size, density * (x[1] - x[0]), size)
    together = np.fft.irfft(np.fft.rfft(grid) ** steps, size)
    return width * np.fft.fftfreq(size, 1 / size), together


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.2, 0.05, 300), (20.0, 0.26, 160)])
def test_epsilon_agrees_with_an_accountant_of_another_kind(sigma: float, rate: float, steps: int) -> None:
    pytest.importorskip("opacus")
    bound = epsilon([NoisySteps(sigma, rate, steps)], 1e-5)
    pairs = [losses_by_convolution(sigma, rate, steps, reverse) for reverse in (False, True)]

    def delta(target: float) -> float:
        return max(
            float(np.sum(mass[losses > target] * -np.expm1(target - losses[losses > target]))) for losses, mass in pairs
        )

    assert delta(0.99 * bound) > 1e-5 > delta(1.01 * bound)


def test_the_noise_is_what_epsilon_takes_and_little_more() -> None:
    pytest.importorskip("opacus")
    sigma = noise_multiplier(3.0, 1e-5, 1.0, 20)
    assert 2.95 < epsilon([NoisySteps(sigma, 1.0, 20)], 1e-5) <= 3.0
    assert epsilon([NoisySteps(sigma, 1.0, 10)] * 2, 1e-5) == epsilon([NoisySteps(sigma, 1.0, 20)], 1e-5)
    assert epsilon([NoisySteps(sigma, 1.0, 0)], 1e-5) == 0


@pytest.mark.parametrize("target", [0.5, 3.0, 20.0])
def test_what_may_be_chosen_as_one_goes_costs_one_order_of_divergence(target: float) -> None:
    """All samples in 30 steps: a divergence of α·30/2σ² at order α, which is turned into ε as a sum by hand.

    The noise is such that the budget is just spent; no other whole order may then allow much less of it.
    """
    pytest.importorskip("opacus")
    delta, steps = 1e-5, 30

    def by_hand(order: int, sigma: float) -> float:
        spared = (math.log(delta) + math.log(order)) / (order - 1)
        return order * steps / (2 * sigma**2) - spared + math.log((order - 1) / order)

    sigma = noise_multiplier(target, delta, 1.0, steps) * 1.1
    found = adaptive_epsilon([NoisySteps(sigma, 1.0, steps)], target, delta)
    costs = [by_hand(order, sigma) for order in range(2, 65)]
    assert min(abs(found - cost) for cost in costs) < 1e-6 * found
    assert min(costs) <= found < 1.02 * min(costs)
    assert found > epsilon([NoisySteps(sigma, 1.0, steps)], delta)
    assert adaptive_epsilon([], target, delta) == 0
