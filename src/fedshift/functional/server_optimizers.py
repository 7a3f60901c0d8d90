"""Optimisers of a server: the change of the common model in a round is taken for the gradient of a step.

Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021,
Algorithms 1 and 2. Δ is the mean model after the round minus the one that the sites began with.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Second = Literal["adagrad", "adam", "yogi"]


def momentum_step(weight: Tensor, change: Tensor, momentum: Tensor, beta: float, rate: float) -> tuple[Tensor, Tensor]:
    """``m ← βm + Δ, θ ← θ + ηm``: FedAvgM (Hsu, Qi, Brown, 2019). With β = 0 and η = 1 it is FedAvg.

    With Δ from sites that begin at θ + ηβm, where momentum would bring the model by itself, it is Nesterov's.

    Args:
        weight: θ before the round.
        change: Δ: the mean model after the round minus the one that the sites began with.
        momentum: m, zero at first.
        beta: β.
        rate: η.

    Returns:
        The new θ and m.

    Example:
        >>> import torch
        >>> momentum_step(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.2]), beta=0.5, rate=1.0)
        (tensor([1.6000]), tensor([0.6000]))
    """
    momentum = beta * momentum + change
    return weight + rate * momentum, momentum


def adaptive_step(
    weight: Tensor,
    change: Tensor,
    first: Tensor,
    second: Tensor,
    rule: Second,
    betas: tuple[float, float],
    rate: float,
    tau: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``m ← β₁m + (1−β₁)Δ``, v by the rule, ``θ ← θ + η·m/(√v + τ)`` (Algorithm 2).

    The rules: adagrad ``v ← v + Δ²``; yogi ``v ← v − (1−β₂)Δ²·sign(v − Δ²)``; adam ``v ← β₂v + (1−β₂)Δ²``. There is no
    correction of the moments' bias, as in the paper.

    Args:
        weight: θ before the round.
        change: Δ.
        first: m, zero at first.
        second: v, τ² at first.
        rule: Which of the three.
        betas: β₁ and β₂; adagrad has no β₂.
        rate: η.
        tau: τ, the degree of adaptivity.

    Returns:
        The new θ, m and v.

    Example:
        >>> import torch
        >>> zero = torch.zeros(1)
        >>> adaptive_step(zero, torch.tensor([2.0]), zero, zero, "adam", (0.0, 0.75), rate=1.0, tau=1.0)
        (tensor([1.]), tensor([2.]), tensor([1.]))
    """
    square = change.square()
    first = betas[0] * first + (1 - betas[0]) * change
    if rule == "adagrad":
        second = second + square
    elif rule == "yogi":
        second = second - (1 - betas[1]) * square * (second - square).sign()
    else:
        second = betas[1] * second + (1 - betas[1]) * square
    return weight + rate * first / (second.sqrt() + tau), first, second
