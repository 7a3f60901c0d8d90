"""The inner step of gradient-based meta-learning, and how its gradient is used a second time."""

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
    """``θ̂ = θ − β·g``, g clipped element-wise to [−clip, clip] (MAML's inner step; ELCFS, Liu et al., CVPR 2021).

    parameters: θ by name. gradients: g in the same order. With ``second_order`` the graph of g is kept and a gradient
    taken at θ̂ flows through it; otherwise g is a constant and ``∂L(θ̂)/∂θ = ∂L/∂θ̂``.
    """
    steps = [gradient if clip is None else gradient.clamp(-clip, clip) for gradient in gradients]
    if not second_order:
        steps = [step.detach() for step in steps]
    return {name: parameter - rate * step for (name, parameter), step in zip(parameters.items(), steps, strict=True)}


def with_gradient(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """``value`` (a scalar) whose gradient by ``parameters`` is already known to be ``gradients``.

    Its backward pass hands them on and computes nothing: a loss whose gradient an inner step needed is not gone through
    twice.
    """
    result: Tensor = _Known.apply(value.detach(), [gradient.detach() for gradient in gradients], *parameters)
    return result


class _Known(torch.autograd.Function):
    """Forward: the value. Backward: the known gradients, times what comes from above."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(outer[0] * gradient for gradient in ctx.gradients)
