"""FedADG's losses: worked numbers, optima, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.methods.federated import fedadg

GENERATED, EXTRACTED = torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)


@given(st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30)
def test_both_forms_of_the_discriminator_have_one_optimum(generated: float, extracted: float) -> None:
    answers = torch.tensor([generated]), torch.tensor([extracted])
    best = torch.ones(1), torch.zeros(1)
    for form in ("least_squares", "formula"):
        assert fedadg.discriminator_loss(*answers, form) >= fedadg.discriminator_loss(*best, form) - 1e-6  # type: ignore[arg-type]


def test_means_run_over_the_batch() -> None:
    answers = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    expected = sum((1 - p) ** 2 for p in (0.1, 0.5, 0.9)) / 3
    assert fedadg.alignment_loss(answers).item() == pytest.approx(expected)
    assert fedadg.reference_loss(answers).item() == pytest.approx(expected)
    both = sum((1 - p) ** 2 for p in (0.1, 0.5, 0.9)) / 3 + 0.3**2  # batches of two sizes
    assert fedadg.discriminator_loss(answers, EXTRACTED).item() == pytest.approx(both)


def test_the_condition_and_the_projection() -> None:
    condition = fedadg.scaled_one_hot(torch.tensor([2, 0]), 3, 0.6)
    torch.testing.assert_close(condition, torch.tensor([[0, 0, 0.6], [0.6, 0, 0]]))
    matrix = fedadg.random_projection(40, 7, torch.Generator().manual_seed(3))
    assert matrix.shape == (7, 40)
    assert matrix.norm().item() == pytest.approx(1, abs=1e-6)
    assert not torch.equal(matrix, fedadg.random_projection(40, 7, torch.Generator().manual_seed(4)))
