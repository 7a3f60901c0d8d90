"""Server optimisers: torch's own with these settings, the paper's formulas by hand, and FedAvg as a special case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.methods.server import Second, adaptive_step, momentum_step

CHANGES = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_without_momentum_and_at_rate_one_it_is_fedavg(weight: float, change: float, old: float) -> None:
    moved, kept = momentum_step(number(weight), number(change), number(old), beta=0.0, rate=1.0)
    assert moved.item() == weight + change
    assert kept.item() == change


@given(CHANGES, st.floats(0.01, 0.95), st.floats(0.01, 2))
def test_momentum_is_torch_s_sgd_on_the_negative_change(changes: list[float], beta: float, rate: float) -> None:
    theirs = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=rate, momentum=beta)
    weight, momentum = number(0.0), number(0.0)
    for change in changes:
        theirs.grad = -number(change)
        optimizer.step()
        weight, momentum = momentum_step(weight, number(change), momentum, beta, rate)
    assert weight.item() == pytest.approx(theirs.item(), abs=1e-9)


@given(CHANGES, st.floats(0, 0.95), st.floats(0, 0.99), st.floats(0.01, 1))
def test_adam_is_torch_s_where_its_bias_correction_is_taken_back(
    changes: list[float], beta1: float, beta2: float, rate: float
) -> None:
    """torch: θ −= lr/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε). With lr and ε as below, its step is ours from v₀ = 0."""
    theirs = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=rate, betas=(beta1, beta2))
    weight, first, second, tau = number(0.0), number(0.0), number(0.0), 1e-2
    for round_, change in enumerate(changes, 1):
        correction = (1 - beta2**round_) ** 0.5
        optimizer.param_groups[0]["lr"] = rate * (1 - beta1**round_) / correction
        optimizer.param_groups[0]["eps"] = tau / correction
        theirs.grad = -number(change)
        optimizer.step()
        weight, first, second = adaptive_step(weight, number(change), first, second, "adam", (beta1, beta2), rate, tau)
    assert weight.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-9)


def test_yogi_shrinks_by_the_change_and_adam_by_a_share() -> None:
    """v = 100, Δ = 1: yogi takes away 0.01, adam a hundredth of 99."""
    seconds = {
        rule: adaptive_step(number(0), number(1), number(0), number(100), rule, (0, 0.99), 1, 1)[2].item()
        for rule in ("yogi", "adam")
    }
    assert seconds == pytest.approx({"yogi": 99.99, "adam": 99.01})


@given(st.sampled_from(["adagrad", "adam", "yogi"]), CHANGES)
def test_second_moments_are_never_negative(rule: Second, changes: list[float]) -> None:
    weight, first, second = number(0), number(0), number(1e-6)
    for change in changes:
        weight, first, second = adaptive_step(weight, number(change), first, second, rule, (0.9, 0.99), 0.1, 1e-3)
        assert second.item() >= 0
        assert weight.isfinite()
