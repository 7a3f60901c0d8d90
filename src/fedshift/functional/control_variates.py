"""Corrections of client drift: control variates (SCAFFOLD), normalised steps (FedNova), dynamic penalties (FedDyn).

Models are mappings of named parameters; every function gives a mapping with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedshift.errors import UserError

Parameters = Mapping[str, Tensor]


def next_control(
    control: Parameters, common: Parameters, sent: Parameters, trained: Parameters, path: float
) -> dict[str, Tensor]:
    """``c_i⁺ = c_i − c + (x − y_i)/(T·η)``: a site's control variate after T local steps.

    Source: SCAFFOLD (Karimireddy et al., ICML 2020), equation 4, option II.

    Args:
        control: c_i.
        common: c.
        sent: x, the common model.
        trained: y_i, the site's model after its steps.
        path: T·η, the sum of the learning rates of the steps.

    Raises:
        UserError: there was no step.

    Example:
        >>> one = lambda value: {"w": torch.tensor([value])}
        >>> next_control(one(0.5), one(0.2), one(1.0), one(0.4), path=0.3)
        {'w': tensor([2.3000])}
    """
    if not path > 0:
        raise UserError("a control variate needs at least one local step")
    return {name: control[name] - common[name] + (sent[name] - trained[name]) / path for name in control}


def linear_term(parameters: Parameters, direction: Parameters) -> Tensor:
    """``⟨θ, v⟩``: a term of the loss that adds v to the gradient.

    Args:
        parameters: θ.
        direction: v, with the names of θ. Others, such as those of a network's buffers, have no gradient and do not
            count.

    Example:
        >>> linear_term({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 1.0])})
        tensor(5.)
    """
    terms = [(parameters[name] * value).sum() for name, value in direction.items() if name in parameters]
    return torch.stack(terms).sum()


def normalising_factor(
    steps: int, momentum: float = 0.0, decay: float = 0.0, *, nesterov: bool = False, lasting: bool = False
) -> float:
    """``‖a_i‖₁``: how many plain steps τ local steps with momentum, and a proximal term, amount to (FedNova).

    It is how far τ steps carry if every gradient is 1, in units of the learning rate. With momentum ρ that is
    ``[τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ)``, with ``decay`` = α = ημ of a proximal term ``[1 − (1 − α)^τ]/α``.

    Args:
        steps: τ.
        momentum: ρ.
        decay: α.
        nesterov: Nesterov's form of momentum.
        lasting: momentum is not reset before the first step; it is then taken to be at its limit.

    Example:
        >>> normalising_factor(4), normalising_factor(2, momentum=0.5), normalising_factor(2, decay=0.5)
        (4.0, 2.5, 1.5)
    """
    moved, velocity = 0.0, 1 / (1 - momentum) if lasting else 0.0
    for _ in range(steps):
        gradient = 1 - decay * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if nesterov else velocity
    return moved


def normalised_average(
    sent: Parameters,
    trained: Sequence[Parameters],
    shares: Sequence[float],
    factors: Sequence[float],
    effective: float | None = None,
) -> dict[str, Tensor]:
    """``x − τ_eff Σ_i p_i (x − y_i)/‖a_i‖₁`` with ``τ_eff = Σ_i p_i ‖a_i‖₁``.

    Source: FedNova (Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020).

    Args:
        sent: x.
        trained: y_i of every site.
        shares: p_i, with sum 1.
        factors: ‖a_i‖₁; 0 for a site that made no step, which has not moved.
        effective: another τ_eff.

    Example:
        >>> one = lambda value: {"w": torch.tensor([value])}
        >>> normalised_average(one(0.0), [one(1.0), one(8.0)], [0.5, 0.5], [1.0, 4.0])  # 2.5 · (0.5·1 + 0.5·2)
        {'w': tensor([3.7500])}
    """
    if effective is None:
        effective = sum(share * factor for share, factor in zip(shares, factors, strict=True))
    result = {}
    for name, start in sent.items():
        drift = torch.zeros_like(start)
        for model, share, factor in zip(trained, shares, factors, strict=True):
            drift += share / (factor or 1.0) * (start - model[name])
        result[name] = start - effective * drift
    return result


def dynamic_penalty(parameters: Parameters, gradient: Parameters, sent: Parameters, alpha: float) -> Tensor:
    """``−⟨h_i, θ⟩ + α/2·‖θ − θ_t‖²``: what a site adds to its loss.

    Source: FedDyn (Acar et al., ICLR 2021), Algorithm 1.

    Args:
        parameters: θ.
        gradient: h_i, the site's gradient at its last model.
        sent: θ_t.
        alpha: α.

    Example:
        >>> one = lambda value: {"w": torch.tensor([value])}
        >>> dynamic_penalty(one(3.0), one(0.5), one(1.0), alpha=0.1)  # −1.5 + 0.2
        tensor(-1.3000)
    """
    gaps = torch.stack([(parameters[name] - value).square().sum() for name, value in sent.items()]).sum()
    return alpha / 2 * gaps - linear_term(parameters, gradient)


def moved_gradient(gradient: Parameters, sent: Parameters, trained: Parameters, alpha: float) -> dict[str, Tensor]:
    """``h ← h − α(θ_i − θ_t)``: a site's memory of FedDyn; with the mean drift of all sites, the server's.

    Args:
        gradient: h.
        sent: θ_t.
        trained: θ_i, or what drifted as far as the sites did on average.
        alpha: α.

    Example:
        >>> one = lambda value: {"w": torch.tensor([value])}
        >>> moved_gradient(one(0.5), one(1.0), one(3.0), alpha=0.1)
        {'w': tensor([0.3000])}
    """
    return {name: value - alpha * (trained[name] - sent[name]) for name, value in gradient.items()}
