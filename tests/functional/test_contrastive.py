"""MOON's contrast and FedIIR's gap: worked numbers, a loop, gradient checks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.contrastive import supervised_contrast
from fedshift.methods.federated.fedclip import paired_loss
from fedshift.methods.federated.fediir import gradient_gap
from fedshift.methods.federated.moon import model_contrastive_loss


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 1000), st.floats(0.1, 5))
def test_it_is_the_paper_s_formula_sample_by_sample(seed: int, temperature: float) -> None:
    features, common, previous = (drawn(seed + shift, 4, 3) for shift in range(3))

    def similarity(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True)) / math.hypot(*left) / math.hypot(*right)

    expected = []
    for z, near, far in zip(features.tolist(), common.tolist(), previous.tolist(), strict=True):
        wanted, other = (math.exp(similarity(z, one) / temperature) for one in (near, far))
        expected.append(-math.log(wanted / (wanted + other)))
    found = model_contrastive_loss(features, common, previous, temperature)
    assert found.item() == pytest.approx(sum(expected) / 4, rel=1e-6)


@given(st.integers(0, 1000), st.floats(0.1, 5))
def test_supcon_is_the_paper_s_formula_sample_by_sample(seed: int, temperature: float) -> None:
    """Khosla et al. (NeurIPS 2020, equation 2); the last sample has no other of its class."""
    embeddings, labels = drawn(seed, 6, 3), [0, 0, 1, 1, 0, 2]
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    powers = (directions @ directions.T / temperature).exp().tolist()
    total = 0.0
    for i in range(6):
        partners = [p for p in range(6) if p != i and labels[p] == labels[i]]
        whole = sum(powers[i][a] for a in range(6) if a != i)
        total -= sum(math.log(powers[i][p] / whole) for p in partners) / max(len(partners), 1)
    found = supervised_contrast(embeddings, torch.tensor(labels), temperature, with_itself=False)
    assert found.item() == pytest.approx(total / 6, rel=1e-6)


def test_pairs_are_chosen_from_both_sides() -> None:
    """CLIP's loss: each image names its text among all texts, each text its image among all images."""
    scores = [[1.0, -0.5, 2.0], [0.3, 0.8, -1.0], [0.0, 1.5, 0.4]]
    columns = [list(column) for column in zip(*scores, strict=True)]

    def chosen(rows: list[list[float]]) -> float:
        return sum(math.log(sum(map(math.exp, row))) - row[at] for at, row in enumerate(rows)) / len(rows)

    right = (chosen(scores) + chosen(columns)) / 2
    assert abs(chosen(scores) - chosen(columns)) > 0.04
    assert paired_loss(torch.tensor(scores)).item() == pytest.approx(right, abs=1e-6)


def test_worked_gap() -> None:
    """(1 − 0)² + (2 − 2)² + (5 − 3)² = 5, over tensors of two shapes."""
    gradients, references = (
        [torch.tensor([[1.0, 2.0]]), torch.tensor([5.0])],
        [torch.tensor([[0.0, 2.0]]), torch.ones(1) * 3],
    )
    assert gradient_gap(gradients, references).item() == 5.0
