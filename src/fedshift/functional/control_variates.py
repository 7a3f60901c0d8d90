"""Corrections of client drift: control variates (SCAFFOLD), normalised steps (FedNova), dynamic penalties (FedDyn).

Models are mappings of named parameters; every function gives a mapping with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


def linear_term(parameters: Parameters, direction: Parameters) -> Tensor:
    """``⟨θ, v⟩``: a term of the loss that adds v to the gradient.

    ``parameters``: θ. ``direction``: v, with the names of θ. Others, such as those of a network's buffers, have no
    gradient and do not count.

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

    ``steps``: τ. ``momentum``: ρ. ``decay``: α. ``nesterov``: nesterov's form of momentum. ``lasting``: momentum is not
    reset before the first step; it is then taken to be at its limit.

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


def moved_gradient(gradient: Parameters, sent: Parameters, trained: Parameters, alpha: float) -> dict[str, Tensor]:
    """``h ← h − α(θ_i − θ_t)``: a site's memory of FedDyn; with the mean drift of all sites, the server's.

    ``gradient``: h. ``sent``: θ_t. ``trained``: θ_i, or what drifted as far as the sites did on average. ``alpha``: α.

    Example:
        >>> one = lambda value: {"w": torch.tensor([value])}
        >>> moved_gradient(one(0.5), one(1.0), one(3.0), alpha=0.1)
        {'w': tensor([0.3000])}
    """
    return {name: value - alpha * (trained[name] - sent[name]) for name, value in gradient.items()}
