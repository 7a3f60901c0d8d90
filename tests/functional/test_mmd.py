"""MK-MMD: worked numbers, an independent kernel, invariants and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor

from fedshift.functional.mmd import MULTIPLIERS, multi_kernel_mmd, weighted_multi_kernel_mmd


def column(*values: float) -> Tensor:
    return torch.tensor(values).double()[:, None]


def naive_mmd(
    source: Tensor,
    target: Tensor,
    multipliers: Sequence[float] = MULTIPLIERS,
    estimator: str = "unbiased",
    constant: bool = False,
) -> Tensor:
    """By the definition: every difference, every kernel, plain autograd."""
    n = len(source)
    joint = torch.cat([source, target])
    squared = (joint[:, None] - joint[None]).square().sum(-1)
    kernels = torch.stack([torch.exp(-squared / (2 * a * squared.mean().detach())) for a in multipliers]).sum(0)
    ss, tt, st_ = kernels[:n, :n], kernels[n:, n:], kernels[:n, n:]
    if estimator == "biased" or n == 1:
        return ss.mean() + tt.mean() - 2 * st_.mean()
    off = 1 - torch.eye(n, dtype=source.dtype)
    mmd = ((ss + tt) * off).sum() / (n * (n - 1)) - 2 * st_.mean()
    return mmd + 2 / (n - 1) if constant else mmd


def layers(count: int, n: int, f: int, seed: int, offset: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64) + 0.5
    return (torch.randn(count, n, f, generator=generator, dtype=torch.float64) * scales + offset).to(dtype)


def cross(source: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """The MMD of every pair of layers, (R, S), by the function that training minimises."""
    one_hot = torch.eye(len(source) * len(target)).view(-1, len(source), len(target))
    values = [weighted_multi_kernel_mmd(source, target, weights, *args, **options) for weights in one_hot]
    return torch.stack(values).view(len(source), len(target))


def defined(source: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The same by the definition."""
    return torch.stack([torch.stack([naive_mmd(a, b, **options) for b in target]) for a in source])


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_against_the_kernel_of_scikit_learn(estimator: str) -> None:
    s, t = layers(1, 7, 5, 0)[0], layers(1, 7, 5, 1, offset=0.7)[0]
    joint = torch.cat([s, t]).numpy()
    bandwidth = ((joint[:, None] - joint[None]) ** 2).sum(-1).mean()

    def summed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return sum(rbf_kernel(a, b, gamma=1 / (2 * m * bandwidth)) for m in MULTIPLIERS)

    ss, tt, cross = summed(s.numpy(), s.numpy()), summed(t.numpy(), t.numpy()), summed(s.numpy(), t.numpy())
    if estimator == "biased":
        expected = ss.mean() + tt.mean() - 2 * cross.mean()
    else:
        expected = (ss.sum() - np.trace(ss) + tt.sum() - np.trace(tt)) / 42 - 2 * cross.mean()
    assert multi_kernel_mmd(s, t, estimator=estimator).item() == pytest.approx(expected, abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
@pytest.mark.parametrize("multipliers", [MULTIPLIERS, (0.5, 1.0, 2.5), (1.0,), (0.2, 0.6, 1.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 4e-6)])
def test_matrix_equals_pairs(estimator, multipliers, dtype, tolerance) -> None:  # type: ignore[no-untyped-def]
    fused, local = layers(3, 6, 40, 0, 0.3, dtype), layers(2, 6, 40, 1, 0.0, dtype)
    matrix = cross(fused, local, multipliers, estimator)
    assert matrix.shape == (3, 2)
    for i, j in itertools.product(range(3), range(2)):
        pair = multi_kernel_mmd(fused[i], local[j], multipliers, estimator).item()
        naive = naive_mmd(fused[i].double(), local[j].double(), multipliers, estimator).item()
        assert matrix[i, j].item() == pytest.approx(pair, abs=tolerance)
        assert pair == pytest.approx(naive, abs=tolerance)


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_gradcheck_with_the_bandwidth_held(estimator: str) -> None:
    fused, local = layers(2, 4, 3, 0).requires_grad_(), layers(2, 4, 3, 1, 0.5).requires_grad_()
    bandwidth = torch.tensor([[3.0, 4.0], [5.0, 6.0]]).double()

    def function(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = cross(a, b, estimator=estimator, constant=True, bandwidth=bandwidth)
        return found

    assert torch.autograd.gradcheck(function, (fused, local))
    assert torch.autograd.gradcheck(lambda a: function(a, local.detach()), (fused,))


def test_a_given_bandwidth_equal_to_the_default_changes_nothing() -> None:
    s, t = layers(1, 5, 4, 0)[0], layers(1, 5, 4, 1)[0]
    joint = torch.cat([s, t])
    bandwidth = torch.cdist(joint, joint).square().mean()
    torch.testing.assert_close(multi_kernel_mmd(s, t, bandwidth=bandwidth), multi_kernel_mmd(s, t))


@given(st.integers(1, 6), st.integers(1, 5), st.floats(-3, 3), st.integers(0, 1000))
@settings(max_examples=50)
def test_biased_is_a_distance(n: int, f: int, offset: float, seed: int) -> None:
    s, t = layers(1, n, f, seed)[0], layers(1, n, f, seed + 1, offset)[0]
    value = multi_kernel_mmd(s, t, estimator="biased").item()
    assert value >= -1e-12
    assert value == pytest.approx(multi_kernel_mmd(t, s, estimator="biased").item(), abs=1e-12)
    assert multi_kernel_mmd(s, s.flip(0), estimator="biased").item() == pytest.approx(0, abs=1e-12)
    assert multi_kernel_mmd(s * 7 + 3, t * 7 + 3, estimator="biased").item() == pytest.approx(value, abs=1e-9)


def test_a_single_sample_gives_the_biased_value() -> None:
    s, t = column(1), column(3)
    # One difference of 2: mean squared distance 4·2/4 = 2, k_st = Σ exp(−4 / (4a)).
    expected = 10 - 2 * sum(np.exp(-1 / a) for a in MULTIPLIERS)
    for constant in (False, True):
        assert multi_kernel_mmd(s, t, constant=constant).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0, 1234.567])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_everywhere_give_kernels_of_one_and_no_gradient(value: float, dtype: torch.dtype) -> None:
    fused = torch.full((2, 6, 50), value, dtype=dtype).requires_grad_()
    local = torch.full((2, 6, 50), value, dtype=dtype).requires_grad_()
    values = cross(fused, local)
    values.sum().backward()
    assert values.detach().flatten().tolist() == pytest.approx([0.0] * 4, abs=1e-5)
    assert fused.grad is not None
    assert local.grad is not None
    assert fused.grad.abs().max() == 0
    assert local.grad.abs().max() == 0


def test_equal_rows_of_layers_that_differ_give_no_gradient() -> None:
    """Products round the distances within layers and between them otherwise: what is left there is no bandwidth."""
    values = torch.randn(2, 1, 50, generator=torch.Generator().manual_seed(0)) * 100
    fused, local = values.repeat(1, 6, 1).requires_grad_(), values.repeat(1, 6, 1).requires_grad_()
    cross(fused, local).diagonal().sum().backward()
    assert fused.grad is not None
    assert local.grad is not None
    assert fused.grad.abs().max() == 0
    assert local.grad.abs().max() == 0


def test_float32_far_from_the_origin() -> None:
    fused, local = layers(2, 16, 64, 0, 300.0), layers(2, 16, 64, 1, 300.2)
    single = cross(fused.float(), local.float()).double()
    torch.testing.assert_close(single, defined(fused, local), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    fused, local = layers(2, 8, 16, 0, dtype=dtype), layers(2, 8, 16, 1, dtype=dtype)
    values = cross(fused, local)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), defined(fused.double(), local.double()), atol=1e-5, rtol=0)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.floats(-3, 3),
    st.sampled_from(["unbiased", "biased"]),
    st.sampled_from([MULTIPLIERS, (0.5, 1.0, 2.5)]),
    st.booleans(),
    st.integers(0, 1000),
)
@settings(max_examples=80)
def test_weighted_sum_and_its_gradients(sources, targets, n, f, offset, estimator, multipliers, constant, seed) -> None:  # type: ignore[no-untyped-def]
    """What training minimises, against the definition under autograd, also behind another operation."""
    fused, local = (
        layers(sources, n, f, seed).requires_grad_(),
        layers(targets, n, f, seed + 1, offset).requires_grad_(),
    )
    weights = torch.randn(sources, targets, generator=torch.Generator().manual_seed(seed)).double()
    options: Any = {"multipliers": multipliers, "estimator": estimator, "constant": constant}
    expected = (weights * defined(fused, local, **options)).sum()
    found = weighted_multi_kernel_mmd(fused, local, weights, **options)
    assert found.item() == pytest.approx(expected.item(), abs=1e-9)
    gradients = [torch.autograd.grad(0.6 * loss.exp(), (fused, local)) for loss in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-7, atol=1e-9)


def test_one_side_alone_needs_a_gradient() -> None:
    fused, local = layers(2, 5, 4, 0).requires_grad_(), layers(2, 5, 4, 1, 0.5)
    weights = torch.tensor([[0.2, 0.8], [0.5, 0.5]], requires_grad=True)
    weighted_multi_kernel_mmd(fused, local, weights).backward()
    expected = torch.autograd.grad((weights.detach() * defined(fused, local)).sum(), fused)[0]
    torch.testing.assert_close(fused.grad, expected)
    assert weights.grad is None
    assert local.grad is None
    assert not weighted_multi_kernel_mmd(fused.detach(), local, weights).requires_grad


def gradients(value: Tensor, *inputs: Tensor, retain: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, retain_graph=retain)


def test_a_second_backward_pass_gives_the_same_and_inputs_are_not_written_into() -> None:
    source, target = layers(2, 5, 6, 0).requires_grad_(), layers(3, 5, 6, 1).requires_grad_()
    before = source.detach().clone(), target.detach().clone()
    value = cross(source, target).sum()
    first = gradients(value, source, target, retain=True)
    second = gradients(value, source, target)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(source, before[0])
    assert torch.equal(target, before[1])


def test_a_layer_used_on_both_sides_gets_both_gradients() -> None:
    source, target = layers(2, 5, 6, 0).requires_grad_(), layers(2, 5, 6, 0).requires_grad_()
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    apart = gradients(weighted_multi_kernel_mmd(source, target, weights), source, target)
    (together,) = gradients(weighted_multi_kernel_mmd(source, source, weights), source)
    torch.testing.assert_close(together, apart[0] + apart[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_one_pair_without_spread_leaves_the_others_alone(dtype: torch.dtype, estimator: str) -> None:
    healthy_source, healthy_target = layers(1, 5, 6, 0, dtype=dtype), layers(1, 5, 6, 1, dtype=dtype)
    flat = torch.full((1, 5, 6), 0.7, dtype=dtype)
    source = torch.cat([healthy_source, flat]).requires_grad_()
    target = torch.cat([healthy_target, flat]).requires_grad_()
    value = cross(source, target, estimator=estimator)
    assert value.isfinite().all()
    assert value[1, 1].item() == pytest.approx(0, abs=1e-5)
    for gradient in gradients(value[1, 1], source, target, retain=True):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    torch.testing.assert_close(value[:1, :1], cross(healthy_source, healthy_target, estimator=estimator))
    assert all(gradient.isfinite().all() for gradient in gradients(value.sum(), source, target))


def test_what_is_not_finite_shows() -> None:
    source, target = layers(1, 5, 6, 0), layers(1, 5, 6, 1)
    source[0, 2, 3] = float("nan")
    assert cross(source, target).isnan().all()
