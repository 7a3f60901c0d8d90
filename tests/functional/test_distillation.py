"""Softened divergences against scipy, and averages that follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from fedshift.functional.distillation import move_towards, softened_divergence
from fedshift.methods.federated.fedccrl import spread_of_predictions
from fedshift.methods.federated.fedntd import other_scores
from fedshift.methods.pooled.fact import sigmoid_ramp


@given(st.floats(0.5, 20), st.integers(0, 99))
def test_it_is_the_divergence_of_the_softened_probabilities(temperature: float, seed: int) -> None:
    teacher, student = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p, q = softmax(teacher.numpy() / temperature, 1), softmax(student.numpy() / temperature, 1)
    found = softened_divergence(teacher, student, temperature).item()
    assert found == pytest.approx(rel_entr(p, q).sum(1).mean(), rel=1e-9, abs=1e-12)
    assert softened_divergence(teacher, teacher, temperature).item() == pytest.approx(0, abs=1e-12)


def test_an_average_follows_and_integers_are_copied() -> None:
    average = [torch.tensor([1.0, 0.0]), torch.tensor(3)]
    move_towards(average, [torch.tensor([2.0, 4.0]), torch.tensor(7)], momentum=0.75)
    assert average[0].tolist() == pytest.approx([1.25, 1.0])
    assert average[1].item() == 7


def test_the_ramp_of_fact() -> None:
    grown = [2 * sigmoid_ramp(epoch / 5) for epoch in range(7)]
    assert grown == pytest.approx([0.013476, 0.081524, 0.330598, 0.898658, 1.637462, 2.0, 2.0], abs=1e-6)


@given(st.integers(2, 6), st.integers(0, 99))
def test_other_scores_are_those_that_are_left_when_a_row_s_own_is_deleted(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(4, classes, generator=generator), torch.randint(classes, (4,), generator=generator)
    expected = [np.delete(row.numpy(), label).tolist() for row, label in zip(scores, labels, strict=True)]
    assert other_scores(scores, labels).tolist() == expected


def test_spread_is_the_mean_divergence_from_the_mean_prediction() -> None:
    scores = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2
    each = softmax(scores.numpy(), 2)
    right = rel_entr(each, each.mean(0, keepdims=True)).sum(2).mean()
    assert spread_of_predictions(list(scores)).item() == pytest.approx(right, rel=1e-9)
    assert spread_of_predictions([scores[0], scores[0]]).item() == pytest.approx(0, abs=1e-12)
