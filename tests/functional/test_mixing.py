"""MixStyle's statistics and CrossGrad's perturbation, on numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fedshift.functional.mixing import gradient_perturbed, paste
from fedshift.methods.composition.mixstyle import mixed_styles, partners_in_the_other_half
from fedshift.methods.federated.pardon import rows_of_other_classes

X = torch.tensor([0.0, 2.0, 4.0, 6.0]).view(1, 1, 2, 2)
Y = torch.tensor([1.0, 1.0, 1.0, 5.0]).view(1, 1, 2, 2)


@pytest.mark.parametrize(
    ("share", "centre", "rows", "columns"),
    [
        (0.75, (0.5, 0.5), range(3, 9), range(6, 18)),  # sides of half: √(1 − λ) of 12 and of 24
        (0.75, (0.0, 0.0), range(3), range(6)),  # cut at the corner: a quarter of that rectangle is inside
        (0.75, (0.5, 1.0), range(3, 9), range(18, 24)),
        (0.0, (0.5, 0.5), range(12), range(24)),
    ],
)
def test_cutmix_pastes_a_rectangle_of_the_share_and_counts_what_was_pasted(
    share: float, centre: tuple[float, float], rows: range, columns: range
) -> None:
    """By a drawing of the rectangle (Yun et al., ICCV 2019: sides √(1 − λ), and λ again by the pixels inside)."""
    mixed, kept = paste(torch.zeros(1, 1, 12, 24), torch.ones(1, 1, 12, 24), share, centre)
    drawn = torch.zeros(12, 24)
    for row in rows:
        for column in columns:
            drawn[row, column] = 1
    assert torch.equal(mixed[0, 0], drawn)
    assert kept == pytest.approx(1 - len(rows) * len(columns) / (12 * 24))


def test_weight_one_is_the_identity_and_zero_the_partner_s_style() -> None:
    both, swapped = torch.cat([X, Y]), torch.tensor([1, 0])
    torch.testing.assert_close(mixed_styles(both, swapped, torch.ones(2)), both, atol=1e-6, rtol=0)
    taken = mixed_styles(both, swapped, torch.zeros(2))[0]
    assert (taken.mean().item(), taken.std().item()) == pytest.approx((2.0, 2.0), abs=1e-5)


def test_statistics_are_constants_for_the_gradient() -> None:
    maps = torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    swapped, weights = torch.tensor([1, 0]), torch.tensor([0.2, 0.7], dtype=torch.float64)
    deviations = maps.std((2, 3), keepdim=True)
    mixed_deviations = weights.view(2, 1, 1, 1) * deviations + (1 - weights.view(2, 1, 1, 1)) * deviations.flip(0)
    leaf = maps.clone().requires_grad_(True)
    mixed_styles(leaf, swapped, weights).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, (mixed_deviations / deviations).expand_as(maps), atol=1e-5, rtol=1e-5)
    frozen = mixed_deviations / (deviations.square() + 1e-6).sqrt()
    assert gradcheck(lambda x: frozen * x, leaf)


@given(st.integers(1, 13), st.integers(0, 99))
def test_partners_are_of_the_other_half_and_each_is_one_once(number: int, seed: int) -> None:
    partners = partners_in_the_other_half(number, torch.Generator().manual_seed(seed))
    half = number // 2
    assert len(partners) == number
    if half:
        assert all((own < half) != (int(other) < half) for own, other in enumerate(partners))
        assert len(partners.unique()) >= number - number % 2


def test_every_sample_of_the_other_half_can_be_the_partner() -> None:
    draws = torch.Generator().manual_seed(0)
    drawn = [partners_in_the_other_half(6, draws) for _ in range(60)]
    assert {int(one[0]) for one in drawn} == {3, 4, 5}
    assert {int(one[4]) for one in drawn} == {0, 1, 2}


@given(st.floats(0, 10), st.floats(0.01, 1))
def test_a_perturbation_is_bounded(size: float, bound: float) -> None:
    gradients = torch.tensor([-3.0, -0.02, 0.0, 0.02, 5.0])
    moved = gradient_perturbed(torch.ones(5), gradients, size, bound)
    assert ((moved - 1).abs() <= bound * size + 1e-5).all()
    assert torch.equal((moved - 1).sign(), gradients.sign() if size * 0.01 > 1e-6 else (moved - 1).sign())


def test_a_perturbed_sample_is_a_constant() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not gradient_perturbed(leaf, leaf * 0.01, 1.0).requires_grad


def test_rows_of_other_classes_are_any_of_them() -> None:
    labels, draws = torch.tensor([0, 0, 1, 2, 0]), torch.Generator().manual_seed(0)
    drawn = torch.stack([rows_of_other_classes(labels, draws) for _ in range(300)])
    assert (labels[drawn] != labels).all()
    assert [len(column.unique()) for column in drawn.T] == [2, 2, 4, 4, 2]
    assert (drawn[:, 0] == 2).double().mean() == pytest.approx(0.5, abs=0.1)
    assert len(rows_of_other_classes(torch.zeros(3), draws)) == 0
