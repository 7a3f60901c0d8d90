"""Masks: worked numbers, the straight-through gradient, and the bounds of the interaction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedshift.functional.masking import draws_like, soft_interaction, straight_through_mask


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (t(1, 0, 2, 0), t(0, 3, 2, 1), 0.8),
        (t(1, 0, 1, 0), t(0, 1, 0, 1), 0.0),
        (t(1, 0, 1, 0), t(1, 0, 1, 0), 1.0),
        (t(0.5, 0.5), t(0.5, 0.5), 1 / 3),
        (t(0.2, 0.9), t(0.7, 0.1), 0.137725),
        (t(0, 2, -1).sigmoid(), t(0, -2, 1).sigmoid(), 0.225293),
        (t(3), t(3), -3.0),
    ],
)
def test_worked_numbers_of_the_interaction(first: torch.Tensor, second: torch.Tensor, expected: float) -> None:
    assert soft_interaction(first, second).item() == pytest.approx(expected, abs=5e-7)
    assert soft_interaction(second, first).item() == pytest.approx(expected, abs=5e-7)


unit = arrays.arrays("float64", (2, 5), elements=st.floats(0, 1))


@given(unit)
@settings(max_examples=50)
def test_interaction_of_masks_lies_between_nothing_and_all(pair: object) -> None:
    first, second = torch.tensor(pair)
    value = soft_interaction(first, second, 1e-6).item()
    assert -1e-9 <= value <= 1 + 1e-9


def test_interaction_with_smoothing_is_defined_for_empty_masks() -> None:
    assert soft_interaction(t(0, 0), t(0, 0), 1e-6).item() == 1.0


@given(st.integers(0, 99))
@settings(max_examples=20)
def test_masks_are_hard_and_their_gradient_is_that_of_the_probability(seed: int) -> None:
    """With loss Σ m·g the gradient of m̂ is σ'(m̂)·Σ_batch g, whatever the draw."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, generator=generator).requires_grad_()
    g = torch.randn(6, 4, generator=generator)
    mask = straight_through_mask(logits, torch.rand(6, 4, generator=generator))
    assert set(mask.detach().unique().tolist()) <= {0.0, 1.0}
    (mask * g).sum().backward()
    p = logits.detach().sigmoid()
    torch.testing.assert_close(logits.grad, p * (1 - p) * g.sum(0))


def test_masks_are_open_as_often_as_they_say() -> None:
    logits = torch.tensor([-2.0, 0.0, 1.0])
    torch.manual_seed(0)
    mask = straight_through_mask(logits, draws_like(torch.zeros(20000, 3)))
    torch.testing.assert_close(mask.mean(0), logits.sigmoid(), atol=0.015, rtol=0)
