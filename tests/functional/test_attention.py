"""Attention against the maps that it never forms."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.attention import cross_layer_attention
from fedshift.methods.federated.stablefdg import common_positions


def explicit_affinity(fused: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the position map AᵀB and the channel map ABᵀ over batch and entries, from the maps themselves."""
    a, b = fused.flatten(2), local.flatten(2)
    return (a.mT @ b).mean(), (a @ b.mT).mean()


def explicit_attention(fused: list[Tensor], local: list[Tensor], scale: bool = False) -> tuple[Tensor, Tensor]:
    scores = torch.tensor([[[float(s) for s in explicit_affinity(a, b)] for b in local] for a in fused]).double()
    if scale:
        c, d = fused[0].shape[1], fused[0][0, 0].numel()
        scores = scores / torch.tensor([c**0.5, d**0.5]).double()
    return scores[..., 0].softmax(1), scores[..., 1].softmax(1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=40)
def test_closed_form_equals_explicit_maps(layers: int, others: int, n: int, c: int, g: int, scale: bool) -> None:
    generator = torch.Generator().manual_seed(layers + 10 * n + 100 * c)
    fused = [torch.randn(n, c, g, 2, generator=generator).double() * 2 for _ in range(layers)]
    local = [torch.randn(n, c, g, 2, generator=generator).double() * 2 for _ in range(others)]
    position, channel = explicit_attention(fused, local, scale)
    both = cross_layer_attention(fused, local, scale=scale)
    torch.testing.assert_close(
        cross_layer_attention(fused, local, channel=False, scale=scale), position, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        cross_layer_attention(fused, local, position=False, scale=scale), channel, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(both, (position + channel) / 2, atol=1e-6, rtol=0)
    torch.testing.assert_close(both.sum(1), torch.ones(layers).double(), atol=1e-12, rtol=0)
    stacked = cross_layer_attention(torch.stack(fused), torch.stack(local), scale=scale)
    assert torch.equal(stacked, both)


def test_weights_are_constants() -> None:
    fused = [torch.randn(2, 3, 2, 2, requires_grad=True)]
    assert not cross_layer_attention(fused, fused).requires_grad


def test_common_positions_are_means_of_all_products() -> None:
    draws = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(3, 2, 2, 3, generator=draws, dtype=torch.float64) for _ in range(2))
    partners = torch.tensor([1, 0, 2])
    q, k = (maps.flatten(2) / maps.flatten(2).norm(dim=1, keepdim=True) for maps in (queries, keys))
    products = ((q + q[partners]) / 2).mT @ k  # (n, position asked, position)
    expected = products.mean(1).softmax(1).view(3, 2, 3)
    torch.testing.assert_close(common_positions(queries, keys, partners), expected, atol=1e-12, rtol=0)


def test_positions_without_a_map_have_no_gradient() -> None:
    maps = torch.tensor([[[[0.0, 3.0]], [[0.0, 4.0]]]], requires_grad=True)
    shares = common_positions(maps, maps, torch.tensor([0]))
    torch.testing.assert_close(shares[0, 0], torch.tensor([0.0, 0.5]).softmax(0))
    shares[0, 0, 1].backward()  # type: ignore[no-untyped-call]
    assert maps.grad is not None
    assert torch.equal(maps.grad[..., 0], torch.zeros(1, 2, 1))
