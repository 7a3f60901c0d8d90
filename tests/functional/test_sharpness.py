"""SAM's and ASAM's step to where the loss is worst: worked numbers, length, what back-propagation sees of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.methods.composition.regularisers import worst_nearby


def drawn(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    parameters = {"w": torch.randn(2, 3, generator=generator), "b": torch.randn(3, generator=generator)}
    return parameters, [torch.randn(value.shape, generator=generator) for value in parameters.values()]


@given(st.integers(0, 1000), st.floats(0.01, 2))
def test_the_step_has_the_length_of_the_radius_over_all_tensors(seed: int, radius: float) -> None:
    parameters, gradients = drawn(seed)
    there = worst_nearby(parameters, gradients, radius, adaptive=False)
    moves = [there[name] - value for name, value in parameters.items()]
    assert torch.cat([move.flatten() for move in moves]).norm().item() == pytest.approx(radius, rel=1e-4)
    for move, gradient in zip(moves, gradients, strict=True):
        torch.testing.assert_close(torch.cosine_similarity(move.flatten(), gradient.flatten(), 0), torch.tensor(1.0))


@given(st.integers(0, 1000))
def test_asam_does_not_depend_on_the_scale_of_a_layer(seed: int) -> None:
    """Weights times 4 have a gradient of a quarter: with η = 0 the move scales with the weights."""
    parameters, gradients = drawn(seed)
    plain = worst_nearby(parameters, gradients, 0.3, adaptive=True, eta=0.0)
    scaled = worst_nearby(
        {"w": 4 * parameters["w"], "b": parameters["b"]}, [gradients[0] / 4, gradients[1]], 0.3, adaptive=True, eta=0.0
    )
    torch.testing.assert_close(scaled["w"], 4 * plain["w"])
    torch.testing.assert_close(scaled["b"], plain["b"])


def test_no_gradient_is_no_step() -> None:
    there = worst_nearby({"w": torch.ones(2)}, [torch.zeros(2)], 0.5, adaptive=False)
    assert there["w"].tolist() == [1.0, 1.0]


def test_the_gradient_there_arrives_here_unchanged() -> None:
    """The step is a constant: L = θ³ at 1, moved by 0.1, has gradient 3 · 1.21."""
    theta = {"w": torch.tensor([1.0], requires_grad=True)}
    (here,) = torch.autograd.grad(theta["w"].pow(3).sum(), theta["w"], create_graph=True)
    there = worst_nearby(theta, [here], 0.1, adaptive=True, eta=0.2)
    moved = there["w"].item()
    (gradient,) = torch.autograd.grad(there["w"].pow(3).sum(), theta["w"])
    assert moved == pytest.approx(1 + 0.1 * 1.2)
    assert gradient.item() == pytest.approx(3 * moved**2)
