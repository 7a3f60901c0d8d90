"""Differential privacy of training: clipped sums, their noise, and the ε that noisy steps cost.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy. ACM CCS 2016,
Algorithm 1. Two data sets are neighbours if one has one unit, a sample or a group of samples, more than the other.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.secret_noise import Source, normal

_Spent = tuple[tuple[float, float, int], ...]
"""(σ, q, steps) of each kind of step."""
_MOST_EXACT = 20.0
"""Above this ε, which protects nobody, the faster bound is enough."""
_ORDERS = [*range(2, 65), 96, 128, 256, 512]
"""Orders of the Rényi divergences. Whole ones are computed a hundred times faster than those between them."""
_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
"""The noise multipliers among which one is sought."""
_LEAST_ERROR, _MOST_ERROR, _RELATIVE_ERROR = 5e-4, 0.01, 0.005
"""By how much the exact bound may be above ε: a share of the faster bound, between these. A smaller error takes more
memory."""
_LEAST_SHARE = 0.7
"""The exact bound is sought from this share of the noise on that the faster bound asks for."""


@dataclass(frozen=True)
class NoisySteps:
    """Training steps of one kind."""

    noise_multiplier: float  # σ: standard deviation of the noise divided by the clipping norm
    sample_rate: float  # q: probability with which a unit is in a mini-batch
    steps: int  # how many


def sample_rate(samples: int, batch_size: int) -> float:
    """q = B/N: the probability with which a sample is in a mini-batch of B expected samples; 1 if B ≥ N.

    Example:
        >>> sample_rate(256, 64), sample_rate(10, 64)
        (0.25, 1.0)
    """
    return min(1.0, batch_size / samples)


def clipped_sum(gradients: Sequence[Tensor], clip_norm: float, groups: Tensor | None = None) -> list[Tensor]:
    """The sum of gradients, each scaled down to a norm of at most C (Algorithm 1, "Clip gradient").

    A group counts as one: the mean of its samples' gradients is clipped. So no group weighs more than another, however
    many samples it has. A gradient that is not finite counts as zero.

    ``gradients``: for each parameter the gradients of all samples, (b, …). ``clip_norm``: C. ``groups``: (b,) the
    number of each sample's group; None: each sample is one of its own. Returns the sum for each parameter. Adding or
    removing a sample, or a group, changes all of them together by at most C.

    Example:
        >>> clipped_sum([torch.tensor([[3.0], [0.5]]), torch.tensor([[4.0], [0.0]])], 1.0)
        [tensor([1.1000]), tensor([0.8000])]
    """
    rows = [gradient.flatten(1) for gradient in gradients]
    if groups is not None:
        _, position, sizes = torch.unique(groups.to(rows[0].device), return_inverse=True, return_counts=True)
        rows = [row.new_zeros(len(sizes), row.shape[1]).index_add_(0, position, row) / sizes[:, None] for row in rows]
    norm = torch.stack([row.norm(dim=1) for row in rows]).norm(dim=0)
    finite = norm.isfinite()
    if not bool(finite.all()):
        rows = [torch.where(finite[:, None], row, 0.0) for row in rows]
    # A little less than C, since norms and products are rounded.
    factors = torch.where(finite, (clip_norm * (1 - 1e-5) / norm).clamp(max=1.0), 0.0)
    return [(factors @ row).view(gradient.shape[1:]) for row, gradient in zip(rows, gradients, strict=True)]


def gaussian(shape: Sequence[int], source: Source) -> Tensor:
    """Standard normal noise, float64: the sum of four draws, halved.

    A single draw in floating point cannot take every value, and which values it can take may betray the sum beneath it
    (Mironov, ACM CCS 2012). The sum of several draws is the remedy of Holohan and Braghin, "Secure Random Sampling in
    Differential Privacy", ESORICS 2021.

    Example:
        >>> noise = gaussian((10_000,), torch.Generator().manual_seed(0))
        >>> noise.dtype, round(noise.std().item(), 1)
        (torch.float64, 1.0)
    """
    return normal((4, *shape), source).sum(0) / 2


def epsilon(spent: Sequence[NoisySteps], delta: float) -> float:
    """An upper bound of the ε that all these steps together cost at δ.

    Opacus computes it from the distribution of the privacy loss (Gopi, Lee, Wutschitz: Numerical Composition of
    Differential Privacy, NeurIPS 2021), or above 20 from Rényi divergences, which is faster and gives a larger bound.

    Raises UserError: Opacus is not installed.

    Example:
        >>> one, four = NoisySteps(1.0, 1.0, 1), NoisySteps(2.0, 1.0, 4)
        >>> [round(epsilon([steps], 1e-5), 1) for steps in (one, four)]  # four steps need twice the noise
        [4.4, 4.4]
    """
    return _epsilon(_by_kind(spent), delta)


def together(spent: Iterable[NoisySteps]) -> list[NoisySteps]:
    """The same steps, those of one kind added up.

    Example:
        >>> together([NoisySteps(1.0, 0.5, 2), NoisySteps(1.0, 0.5, 3)])
        [NoisySteps(noise_multiplier=1.0, sample_rate=0.5, steps=5)]
    """
    return [NoisySteps(*kind) for kind in _by_kind(spent)]


def adaptive_epsilon(spent: Iterable[NoisySteps], target: float, delta: float) -> float:
    """An upper bound of ε at δ that also holds where each step was chosen after seeing what came before.

    Someone who is answered may choose the noise and the number of the next steps by the answers. Then the sum of the
    Rényi divergences bounds the loss if it is taken at one order that was fixed in advance (Feldman and Zrnic:
    Individual Privacy Accounting via a Rényi Filter, NeurIPS 2021). The order here is the one at which a budget of
    ``target`` lasts longest under Gaussian noise.

    ``spent``: the steps. ``target``: the ε of the budget; it sets the order, and is no bound of the result. ``delta``:
    δ. Raises UserError: Opacus is not installed.

    Example:
        >>> steps = [NoisySteps(4.0, 0.2, 300)]
        >>> adaptive_epsilon(steps, 2.0, 1e-5) >= epsilon(steps, 1e-5)
        True
    """
    return _at_order(_by_kind(spent), delta, _order_for(target, delta))


@functools.lru_cache(maxsize=512)
def _order_for(target: float, delta: float) -> int:
    """The order α at which the Gaussian mechanism, whose divergence is ρα, may have the largest ρ within a budget."""

    def largest(order: int) -> float:
        spared: float = (math.log(delta) + math.log(order)) / (order - 1) - math.log1p(-1 / order)
        return (target + spared) / order

    return int(max(_ORDERS, key=largest))


@functools.lru_cache(maxsize=4096)
def _at_order(spent: _Spent, delta: float, order: int) -> float:
    return _epsilon_by("rdp", spent, delta, (order,))


def _by_kind(spent: Iterable[NoisySteps]) -> _Spent:
    kinds: dict[tuple[float, float], int] = {}
    for item in spent:
        kind = item.noise_multiplier, item.sample_rate
        kinds[kind] = kinds.get(kind, 0) + item.steps
    return tuple(sorted((*kind, steps) for kind, steps in kinds.items() if steps))


@functools.lru_cache(maxsize=512)
def noise_multiplier(target: float, delta: float, rate: float, steps: int) -> float:
    """The smallest σ, to half a percent, with which ``steps`` steps cost at most ε at δ.

    ``target``: ε. ``delta``: δ. ``rate``: q. ``steps``: how many steps, at least 1. Raises UserError: no amount of
    noise is enough, or Opacus is not installed.

    Example:
        >>> round(noise_multiplier(2.0, 1e-5, rate=1.0, steps=1), 1)
        2.0
    """

    def fast(sigma: float) -> float:
        return _epsilon_by("rdp", ((sigma, rate, steps),), delta)

    def exact(sigma: float) -> float:
        return _epsilon(((sigma, rate, steps),), delta)

    low, high = _LEAST_NOISE, 1.0
    while fast(high) > target:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise UserError(
                f"ε = {target:g} at δ = {delta:g} cannot be reached in {steps} steps: raise ε or δ, or train for fewer "
                "rounds"
            )
    high = _smallest(fast, low, high, target)
    return _smallest(exact, _LEAST_SHARE * high, high, target)


def _smallest(cost: Callable[[float], float], low: float, high: float, target: float) -> float:
    """The smallest σ in [low, high], to half a percent, that costs at most ``target``, as ``high`` does."""
    while high > low * 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return high


@functools.lru_cache(maxsize=4096)
def _epsilon(spent: _Spent, delta: float) -> float:
    bound = _epsilon_by("rdp", spent, delta)
    if bound > _MOST_EXACT or bound == 0:
        return bound
    error = min(max(_LEAST_ERROR, _RELATIVE_ERROR * bound), _MOST_ERROR)
    return min(bound, _epsilon_by("prv", spent, delta, eps_error=error))


def _epsilon_by(
    accountant: str, spent: _Spent, delta: float, orders: Sequence[int] = _ORDERS, **options: float
) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus says when the largest order of divergence was the best one
        try:
            from opacus.accountants import create_accountant
        except ImportError:
            raise UserError("training.privacy needs opacus: pip install 'fedshift[privacy]'") from None
        result = create_accountant(accountant)
        result.history = list(spent)
        if not result.history:
            return 0.0
        bound = float(result.get_epsilon(delta, **({"alphas": list(orders)} if accountant == "rdp" else options)))
        return max(0.0, bound)  # a bound below 0 says that δ alone is enough
