"""The inner step of gradient-based meta-learning, and a way to use its gradient a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def inner_step(
    parameters: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
    rate: float,
    clip: float | None = None,
    *,
    second_order: bool = False,
) -> dict[str, Tensor]:
    """``θ̂ = θ − β·g``, with g clipped element-wise to [−clip, clip] (MAML's inner step, as in ELCFS).

    Sources: Finn et al. (ICML 2017); Liu et al. (CVPR 2021).

    Args:
        parameters: θ by name.
        gradients: g, in the same order.
        rate: β.
        clip: bound of each entry of g; none by default.
        second_order: keep the graph of g, so that a gradient taken at θ̂ flows through it. Otherwise g is a constant
            and ``∂L(θ̂)/∂θ = ∂L/∂θ̂``.

    Example:
        >>> inner_step({"w": torch.tensor([1.0, 1.0])}, [torch.tensor([9.0, 0.5])], rate=0.1, clip=1.0)
        {'w': tensor([0.9000, 0.9500])}
    """
    steps = [gradient if clip is None else gradient.clamp(-clip, clip) for gradient in gradients]
    if not second_order:
        steps = [step.detach() for step in steps]
    return {name: parameter - rate * step for (name, parameter), step in zip(parameters.items(), steps, strict=True)}


def with_gradient(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradient by ``parameters`` is already known.

    The backward pass hands the known gradients on and computes nothing. So a loss whose gradient the inner step needed
    is not differentiated twice.

    Args:
        value: the scalar.
        parameters: what it was differentiated by.
        gradients: its gradient by each of them.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> (2 * with_gradient(torch.tensor(5.0), [w], [torch.tensor([3.0])])).backward()
        >>> w.grad
        tensor([6.])
    """
    result: Tensor = _Known.apply(value.detach(), [gradient.detach() for gradient in gradients], *parameters)
    return result


class _Known(torch.autograd.Function):
    """Forward: the value. Backward: the known gradients, times the gradient from above."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(outer[0] * gradient for gradient in ctx.gradients)
