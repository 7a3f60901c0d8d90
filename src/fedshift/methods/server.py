"""Server optimisers as an option of every method that averages: ``server: {optimizer: momentum, beta: 0.8}``.

After a round the server takes the change of the common model, from before the round to after it, for a gradient, and
makes a step of its own with it. What the method does in the round stays as it is. The step moves parameters only.
BatchNorm's statistics and counters stay as the method made them, and so do the parameters that each site has of its
own (`Method.personal`), and what travels beside the model, such as a generator.

A step needs nothing but the mean, so it can stand beside secure aggregation.

Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021; momentum: Hsu, Qi, Brown, arXiv 1909.06335.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, model_validator
from torch import Tensor

from fedshift.functional.averaging import parameters_of
from fedshift.methods.choices import read_choice
from fedshift.weights import Weights

Beta = Annotated[float, Field(ge=0, lt=1)]
Moments = Mapping[str, Weights]
"""What the server's optimiser remembers, by the name of the moment; empty before the first round."""


class _Optimizer(BaseModel, ABC):
    """Base of the optimisers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def start(self, before: Weights, kept: Moments) -> Weights:
        """The model that the sites begin a round with; ``before`` itself, unless the rule says otherwise."""
        return before

    @abstractmethod
    def step(self, before: Weights, change: Weights, kept: Moments) -> tuple[Weights, Moments]:
        """The new parameters, and what is remembered."""


class Momentum(_Optimizer):
    """FedAvgM: ``m ← βm + Δ, θ ← θ + ηm``; with ``nesterov`` Δ is from sites that began at θ + ηβm.

    With η = 1 a round then hands out the plain mean of the sites' models, and they begin ahead of it by β of its last
    move. It is FedACG (Kim, Kim, Han, CVPR 2024, Algorithm 1) without that method's term at the sites, and torch's SGD
    with Nesterov's momentum, whose parameters are where sites begin.
    """

    optimizer: Literal["momentum"] = "momentum"
    beta: Beta = Field(0.9, description="β: how much of the last rounds' direction is kept")
    rate: PositiveFloat = Field(1.0, description="η: learning rate of the server")
    nesterov: bool = Field(False, description="sites begin where momentum would bring the model by itself")

    def start(self, before: Weights, kept: Moments) -> Weights:
        if not self.nesterov or "first" not in kept:
            return before
        ahead = self.rate * self.beta
        return before.merge(Weights({name: before[name] + ahead * old for name, old in kept["first"].items()}))

    def step(self, before: Weights, change: Weights, kept: Moments) -> tuple[Weights, Moments]:
        old = kept.get("first") or _fill(change, 0.0)
        result = {name: momentum_step(before[name], change[name], old[name], self.beta, self.rate) for name in change}
        return _part(result, 0), {"first": _part(result, 1)}


class Adaptive(_Optimizer):
    """FedAdagrad, FedAdam and FedYogi: a step for every number by the size of its changes so far.

    As in the paper FedAdagrad has β₁ = 0, and v begins at τ². Flower (flwr/server/strategy/fedopt.py and its
    subclasses) begins v at 0, and its FedAdam corrects the moments' bias, which Algorithm 2 does not.
    """

    optimizer: Literal["adagrad", "adam", "yogi"]
    beta: Beta = Field(0.9, description="β₁: how much of the last rounds' direction is kept; adagrad's default is 0")
    beta2: Beta = Field(0.99, description="β₂: how much of the last rounds' squares is kept; adagrad keeps all")
    rate: PositiveFloat = Field(0.01, description="η: learning rate of the server")
    tau: PositiveFloat = Field(1e-3, description="τ: added to the root of the squares; smaller adapts more")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_adagrad(cls, options: Any) -> Any:
        adagrad = isinstance(options, Mapping) and options.get("optimizer") == "adagrad"
        return {"beta": 0.0, **options} if adagrad else options

    def step(self, before: Weights, change: Weights, kept: Moments) -> tuple[Weights, Moments]:
        first, second = kept.get("first") or _fill(change, 0.0), kept.get("second") or _fill(change, self.tau**2)
        betas = (self.beta, self.beta2)
        result = {
            name: adaptive_step(
                before[name], change[name], first[name], second[name], self.optimizer, betas, self.rate, self.tau
            )
            for name in change
        }
        return _part(result, 0), {"first": _part(result, 1), "second": _part(result, 2)}


OPTIMIZERS: Mapping[str, type[Momentum | Adaptive]] = {
    "momentum": Momentum,
    **dict.fromkeys(("adagrad", "adam", "yogi"), Adaptive),
}


def rounds_to_speed(beta: float) -> int:
    """3/(1 − β): the rounds of equal changes after which momentum has 95 % of its size.

    Example:
        >>> rounds_to_speed(0.9), rounds_to_speed(0.5), rounds_to_speed(0.0)
        (30, 6, 3)
    """
    return math.ceil(3 / (1 - beta) - 1e-9)


def _read(value: Any) -> Any:
    return read_choice(value, "optimizer", OPTIMIZERS, "optimiser of a server")


ServerOptimizer = Annotated[
    Annotated[Momentum | Adaptive, Field(discriminator="optimizer")] | None, BeforeValidator(_read)
]
"""The field ``server`` of a method."""


def after_round(
    optimizer: Momentum | Adaptive, before: Weights, after: Weights, kept: Moments, personal: Collection[str] = ()
) -> tuple[Weights, Moments]:
    """The common model after the server's step, and what the optimiser remembers.

    ``before``: the common model before the round; the sites began with the optimiser's ``start`` from it. ``personal``:
    names of parameters that the step leaves out. Raises UserError: the method gave the model other names, shapes or
    types.
    """
    after.check_like(before, "the model after a round")
    begun = optimizer.start(before, kept)
    change = parameters_of(after.without(lambda name: name in personal))
    change = Weights({name: tensor - begun[name] for name, tensor in change.items()})
    moved, kept = optimizer.step(before, change, kept)
    return after.merge(moved), kept


def _fill(like: Weights, value: float) -> Weights:
    return Weights({name: torch.full_like(tensor, value) for name, tensor in like.items()})


def _part(split: Mapping[str, tuple[Tensor, ...]], number: int) -> Weights:
    return Weights({name: parts[number] for name, parts in split.items()})


Second = Literal["adagrad", "adam", "yogi"]


def momentum_step(weight: Tensor, change: Tensor, momentum: Tensor, beta: float, rate: float) -> tuple[Tensor, Tensor]:
    """``m ← βm + Δ, θ ← θ + ηm``: FedAvgM (Hsu, Qi, Brown, 2019). With β = 0 and η = 1 it is FedAvg.

    With Δ from sites that begin at θ + ηβm, where momentum would bring the model by itself, it is Nesterov's.
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
