"""Gradient-based meta-learning: the inner step, what is learnt through it, and gradients that are used twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


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

    ``parameters``: θ by name. ``gradients``: g, in the same order. ``rate``: β. ``clip``: bound of each entry of g;
    none by default. ``second_order``: keep the graph of g, so that a gradient taken at θ̂ flows through it. Otherwise g
    is a constant and ``∂L(θ̂)/∂θ = ∂L/∂θ̂``.

    Example:
        >>> inner_step({"w": torch.tensor([1.0, 1.0])}, [torch.tensor([9.0, 0.5])], rate=0.1, clip=1.0)
        {'w': tensor([0.9000, 0.9500])}
    """
    steps = [gradient if clip is None else gradient.clamp(-clip, clip) for gradient in gradients]
    if not second_order:
        steps = [step.detach() for step in steps]
    return {name: parameter - rate * step for (name, parameter), step in zip(parameters.items(), steps, strict=True)}


def answer_at(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    part: str | None = None,
    counts: bool = False,
) -> Any:
    """What a module gives with other parameters. It stays as it is, unless the pass ``counts``.

    A virtual step is a thought of the method's, so BatchNorm uses its batch and learns nothing of it.

    ``module``: in training or evaluation mode, which holds. ``parameters``: in place of its own, by name; those that
    are not named are its own. ``inputs``: what it is asked. ``part``: the submodule that is asked, with the parameters
    below it; None: the module. ``counts``: whether running statistics follow this pass, too.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> answer_at(layer, {"weight": torch.tensor([[3.0]])}, torch.tensor([[2.0]]))
        tensor([[6.]])
    """
    below = f"{part}." if part else ""
    asked = module.get_submodule(part) if part else module
    given = {name.removeprefix(below): value for name, value in parameters.items() if name.startswith(below)}
    kept = {} if counts else {name: buffer.clone() for name, buffer in asked.named_buffers()}
    return functional_call(asked, {**kept, **given}, (inputs,))


def with_gradient(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """A scalar whose gradient by ``parameters`` is already known.

    The backward pass hands the known gradients on and computes nothing. So a loss whose gradient the inner step needed
    is not differentiated twice.

    ``value``: the scalar. ``parameters``: what it was differentiated by. ``gradients``: its gradient by each of them;
    None: it does not depend on it.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> (2 * with_gradient(torch.tensor(5.0), [w], [torch.tensor([3.0])])).backward()
        >>> w.grad
        tensor([6.])
    """
    known = [None if gradient is None else gradient.detach() for gradient in gradients]
    result: Tensor = _Known.apply(value.detach(), known, *parameters)
    return result


class _Known(torch.autograd.Function):
    """Forward: the value. Backward: the known gradients, times the gradient from above."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if gradient is None else outer[0] * gradient for gradient in ctx.gradients)
