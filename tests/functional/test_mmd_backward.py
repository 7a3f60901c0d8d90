"""The backward pass of MK-MMD that is written by hand, where autograd would take care by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.functional.mmd import cross_multi_kernel_mmd


def layers(count: int, samples: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(value: Tensor, *inputs: Tensor, retain: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, retain_graph=retain)


def test_a_second_backward_pass_gives_the_same() -> None:
    source, target = layers(2, 5, 0).requires_grad_(), layers(3, 5, 1).requires_grad_()
    value = cross_multi_kernel_mmd(source, target).sum()
    first = gradients(value, source, target, retain=True)
    second = gradients(value, source, target)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_are_not_written_into() -> None:
    source, target = layers(2, 5, 0).requires_grad_(), layers(2, 5, 1).requires_grad_()
    before = source.detach().clone(), target.detach().clone()
    gradients(cross_multi_kernel_mmd(source, target).sum(), source, target)
    assert torch.equal(source, before[0])
    assert torch.equal(target, before[1])


def test_each_side_alone_gets_what_it_gets_together() -> None:
    source, target = layers(2, 5, 0).requires_grad_(), layers(3, 5, 1).requires_grad_()
    both = gradients(cross_multi_kernel_mmd(source, target).sum(), source, target)
    alone = (
        *gradients(cross_multi_kernel_mmd(source, target.detach()).sum(), source),
        *gradients(cross_multi_kernel_mmd(source.detach(), target).sum(), target),
    )
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))


def test_a_layer_used_on_both_sides_gets_both_gradients() -> None:
    source, target = layers(2, 5, 0).requires_grad_(), layers(2, 5, 0).requires_grad_()
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    apart = gradients((weight * cross_multi_kernel_mmd(source, target)).sum(), source, target)
    (together,) = gradients((weight * cross_multi_kernel_mmd(source, source)).sum(), source)
    torch.testing.assert_close(together, apart[0] + apart[1])


def test_samples_may_come_in_any_order() -> None:
    source, target = layers(2, 7, 0).requires_grad_(), layers(2, 7, 1).requires_grad_()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    value = cross_multi_kernel_mmd(source, target)
    turned = cross_multi_kernel_mmd(source[:, order], target)
    torch.testing.assert_close(turned, value)
    torch.testing.assert_close(gradients(turned.sum(), source, target), gradients(value.sum(), source, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_one_pair_without_spread_leaves_the_others_alone(dtype: torch.dtype, estimator: str) -> None:
    healthy_source, healthy_target = layers(1, 5, 0, dtype), layers(1, 5, 1, dtype)
    flat = torch.full((1, 5, 6), 0.7, dtype=dtype)
    source = torch.cat([healthy_source, flat]).requires_grad_()
    target = torch.cat([healthy_target, flat]).requires_grad_()
    value = cross_multi_kernel_mmd(source, target, estimator=estimator)  # type: ignore[arg-type]
    assert value.isfinite().all()
    assert value[1, 1].item() == pytest.approx(0, abs=1e-5)
    for gradient in gradients(value[1, 1], source, target, retain=True):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    alone = cross_multi_kernel_mmd(healthy_source, healthy_target, estimator=estimator)  # type: ignore[arg-type]
    torch.testing.assert_close(value[:1, :1], alone)
    assert all(gradient.isfinite().all() for gradient in gradients(value.sum(), source, target))


def test_what_is_not_finite_shows() -> None:
    source, target = layers(1, 5, 0), layers(1, 5, 1)
    source[0, 2, 3] = float("nan")
    assert cross_multi_kernel_mmd(source, target).isnan().all()
