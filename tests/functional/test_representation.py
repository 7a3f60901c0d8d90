"""FedSR's regularisers: worked numbers, torch's own distributions, invariants and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedshift.errors import UserError
from fedshift.functional.representation import gaussian_divergence, mean_prediction, norm_regulariser


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_worked_norms() -> None:
    codes = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    assert norm_regulariser(codes).item() == 13.0
    assert norm_regulariser(codes, "norm").item() == 3.0


def test_worked_divergences() -> None:
    """N((1, 0), diag(1, 4)) to N(0, I): terms 0.5 and 0.806853; with c = 0.5 together 0.443147."""
    given_ = row(1, 0), row(1, 2), row(0, 0), row(1, 1)
    assert gaussian_divergence(*given_).item() == pytest.approx(1.306853, abs=2e-6)
    assert gaussian_divergence(row(1), row(1), row(0), row(1)).item() == pytest.approx(0.5, abs=1e-6)
    assert gaussian_divergence(row(0), row(2), row(0), row(1)).item() == pytest.approx(0.806853, abs=2e-6)
    assert gaussian_divergence(*given_, 0.5).item() == pytest.approx(0.443147, abs=2e-6)


def test_worked_divergence_at_initialisation() -> None:
    """Codes of an untrained encoder (raw scale 0) from untrained references (raw scale 1), per dimension."""
    softplus = torch.nn.functional.softplus
    scale, reference = softplus(row(0)), softplus(row(1))
    assert (scale.item(), reference.item()) == pytest.approx((0.693147, 1.313262), abs=1e-6)
    assert gaussian_divergence(row(0), scale, row(0), reference).item() == pytest.approx(0.278316, abs=2e-6)


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


def test_gradients() -> None:
    given_ = [numbers(3, 2, seed=n).requires_grad_() for n in range(2)]
    scales = [(numbers(3, 2, seed=n).exp()).requires_grad_() for n in (2, 3)]
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gaussian_divergence, (given_[0], scales[0], given_[1], scales[1], factor))
    for form in ("squared", "norm"):
        assert torch.autograd.gradcheck(lambda codes, form=form: norm_regulariser(codes, form), (given_[0],))
    assert torch.autograd.gradcheck(mean_prediction, (numbers(2, 3, 2).requires_grad_(),))


def test_a_code_of_zeros_has_a_slope() -> None:
    codes = torch.zeros(2, 3, requires_grad=True)
    norm_regulariser(codes, "norm").backward()  # type: ignore[no-untyped-call]
    assert codes.grad is not None
    assert codes.grad.tolist() == [[0.0] * 3] * 2


def test_wrong_shapes() -> None:
    with pytest.raises(UserError, match=r"\(3,\)"):
        norm_regulariser(torch.zeros(3))
    with pytest.raises(UserError, match=r"\(2, 3\).*\(3,\)"):
        gaussian_divergence(*[torch.ones(2, 3)] * 3, torch.ones(3))  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"\(0, 2, 3\)"):
        mean_prediction(torch.zeros(0, 2, 3))
