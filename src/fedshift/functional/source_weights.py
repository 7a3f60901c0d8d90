"""How much each source counts in the aggregate: KD3A's rules (Feng et al., ICML 2021) and FADA's (Peng et al., 2020).

Shares are lists of floats, one per source, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedshift.errors import UserError


def domain_weights(
    focus: Sequence[float] | Tensor, samples: Sequence[int], target_samples: int
) -> tuple[list[float], float]:
    """KD3A's shares (equation 9): ``α_T = N_T / (ΣN + N_T)`` and ``α_k = (1 − α_T) · N_k CF_k / Σ_j N_j CF_j``.

    Negative focus counts as 0. When all are 0 the sources share equally. All shares together sum to 1.

    Args:
        focus: CF_k, (K,).
        samples: N_k, at least 1 each.
        target_samples: N_T, at least 0.

    Returns:
        The sources' shares α_k and the target's α_T.

    Raises:
        UserError: other numbers, different lengths, or focus that is not finite.

    Example:
        >>> sources, target = domain_weights([1.0, 3.0], samples=[100, 100], target_samples=200)
        >>> [round(share, 6) for share in sources], target
        ([0.125, 0.375], 0.5)
    """
    counts = _counts(samples, len(focus))
    if target_samples < 0:
        raise UserError(f"the number of target samples must be at least 0, found {target_samples}")
    target = target_samples / (sum(samples) + target_samples)
    return _shares(_focus(focus) * counts, 1 - target), target


def released_domain_weights(focus: Sequence[float] | Tensor, confident_fraction: float) -> tuple[list[float], float]:
    """Shares in KD3A's released code: the target's ``fraction / (K + 1)``, the sources' ``α_k ∝ CF_k``.

    Numbers of samples do not enter. Negative and all-zero focus as in `domain_weights`. The released code rounds every
    share to 4 decimals, which then need not sum to 1; these are not rounded.

    Args:
        focus: CF_k, (K,).
        confident_fraction: share of target samples on which a teacher passes the gate, 0 to 1.

    Returns:
        The sources' shares and the target's.

    Raises:
        UserError: another fraction, no focus, or focus that is not finite.

    Example:
        >>> sources, target = released_domain_weights([1.0, 2.0, 0.0], confident_fraction=1.0)
        >>> [round(share, 6) for share in sources], target
        ([0.25, 0.5, 0.0], 0.25)
    """
    if not 0 <= confident_fraction <= 1:
        raise UserError(f"the confident fraction must be between 0 and 1, found {confident_fraction}")
    target = confident_fraction / (len(focus) + 1)
    return _shares(_focus(focus), 1 - target), target


def smoothed_weights(previous: Sequence[float], new: Sequence[float], momentum: float = 0.9) -> list[float]:
    """``m · previous + (1 − m) · new`` for the shares of all sites (KD3A's released code).

    Args:
        previous: shares of the last round.
        new: shares of this round.
        momentum: m, in [0, 1].

    Raises:
        UserError: lengths differ, or the momentum is outside [0, 1].

    Example:
        >>> [round(share, 6) for share in smoothed_weights([0.5, 0.5], [1.0, 0.0])]
        [0.55, 0.45]
    """
    if not 0 <= momentum <= 1:
        raise UserError(f"the momentum of domain weights must be between 0 and 1, found {momentum}")
    if len(previous) != len(new):
        raise UserError(f"{len(previous)} previous weights but {len(new)} new ones: the sites must stay the same")
    return [momentum * old + (1 - momentum) * now for old, now in zip(previous, new, strict=True)]


def sample_weights(samples: Sequence[int]) -> list[float]:
    """Shares by numbers of samples, ``α_k = N_k / Σ_j N_j``: KD3A without its focus.

    Raises:
        UserError: a number is below 1, or there is none.

    Example:
        >>> sample_weights([100, 300])
        [0.25, 0.75]
    """
    return _shares(_counts(samples, len(samples)), 1.0)


def distance_weights(samples: Sequence[int], distances: Sequence[float]) -> list[float]:
    """Shares by distance to the target, ``α_k ∝ N_k exp(−d_k)``: the H-divergence row of KD3A's robustness experiment.

    Args:
        samples: N_k, at least 1 each.
        distances: d_k of each source to the target, at least 0.

    Raises:
        UserError: different lengths, numbers of samples below 1, or distances that are negative or not finite.

    Example:
        >>> [round(share, 6) for share in distance_weights([10, 10, 10], [0.0, 1.0, 2.0])]
        [0.665241, 0.244728, 0.090031]
    """
    counts = _counts(samples, len(distances))
    for distance in distances:
        if not (math.isfinite(distance) and distance >= 0):
            raise UserError(f"distance {distance} to the target must be a finite number of at least 0")
    gaps = torch.tensor(distances, dtype=torch.float64)
    return _shares(counts * torch.exp(gaps.min() - gaps), 1.0)


def relative_gains(before: float, after: Sequence[float]) -> list[float]:
    """``(I − I_k) / I``: the relative gain that each source's update brings; 0 where I is 0.

    FADA's paper takes ``I − I_k``. The sum I grows with the number of samples and features, so a softmax of such gains
    is 0 or 1.

    Args:
        before: I, at least 0.
        after: I_k of each source, at least 0.

    Raises:
        UserError: one is negative or not finite.

    Example:
        >>> relative_gains(10.0, [5.0, 12.0])
        [0.5, -0.2]
    """
    for value in (before, *after):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"dispersion {value} must be a finite number of at least 0")
    return [(before - value) / before if before > 0 else 0.0 for value in after]


def gain_weights(gains: Sequence[float]) -> list[float]:
    """Softmax of the gains in `clustering.compactness` that each source's update brings (FADA).

    Args:
        gains: absolute gains, or those of `relative_gains`.

    Raises:
        UserError: there is none, or one is not finite.

    Example:
        >>> [round(share, 6) for share in gain_weights([0.5, 0.1, -0.2])]
        [0.461488, 0.309344, 0.229168]
    """
    weights: list[float] = _finite(gains, "gain").softmax(0).tolist()
    return weights


def ascended_weights(weights: Tensor, losses: Tensor, rate: float, *, exponential: bool = False) -> list[float]:
    """Weights of the sites after a step up their losses: the adversary's move in a minimax over mixtures of sites.

    Source: ``Π(λ + γL)``, Π the Euclidean projection on the simplex (AFL, Mohri et al., ICML 2019); ``exponential``:
    ``λ_k exp(γL_k) / Σ_j λ_j exp(γL_j)`` (GroupDRO, Sagawa et al., ICLR 2020).

    Args:
        weights: λ, with sum 1.
        losses: L.
        rate: γ.
        exponential: whether the step is that of GroupDRO.

    Example:
        >>> half, losses = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
        >>> [ascended_weights(half, losses, rate) for rate in (0.5, 3.0)]
        [[0.75, 0.25], [1.0, 0.0]]
    """
    if exponential:
        moved: list[float] = (weights.double().log() + rate * losses.double()).softmax(0).tolist()
        return moved
    raised = weights.double() + rate * losses.double()
    raised = raised - raised.max()  # which moves the projection nowhere; a large number would leave no digit for 1
    ordered = raised.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(ordered) + 1)
    projected: list[float] = (raised - excess[ordered > excess][-1]).clamp_min(0).tolist()
    return projected


def _shares(values: Tensor, total: float) -> list[float]:
    """Divide ``total`` in proportion to ``values``, equally when all are 0."""
    largest = values.max()
    # Division by the largest keeps the sum and the quotients in the range of float64.
    values = values / largest if largest > 0 else torch.ones_like(values)
    shares: list[float] = (total * values / values.sum()).tolist()
    return shares


def _focus(focus: Sequence[float] | Tensor) -> Tensor:
    return _finite(focus, "consensus focus").clamp(min=0)


def _finite(values: Sequence[float] | Tensor, what: str) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if not len(tensor):
        raise UserError(f"there is no source to weigh: not one {what} was given")
    if not tensor.isfinite().all():
        raise UserError(f"every {what} must be a finite number, found {tensor.tolist()}")
    return tensor


def _counts(samples: Sequence[int], sources: int) -> Tensor:
    if len(samples) != sources or not sources:
        raise UserError(f"{sources} sources but {len(samples)} numbers of samples: give one for each of at least one")
    if min(samples) < 1:
        raise UserError(f"every source needs at least one sample, found {list(samples)}")
    return torch.tensor(samples, dtype=torch.float64)


def rounded_shares(samples: Mapping[str, int], decimals: int = 2) -> dict[str, float]:
    """``N_k/ΣN`` rounded; the last site's share completes the others to 1 (ELCFS's released code).

    Args:
        samples: N_k by site.
        decimals: digits to round to.

    Raises:
        UserError: there is no sample.

    Example:
        >>> {site: round(share, 6) for site, share in rounded_shares({"a": 1, "b": 2}).items()}
        {'a': 0.33, 'b': 0.67}
    """
    total = sum(samples.values())
    if total <= 0:
        raise UserError("shares need at least one sample")
    *others, last = samples
    shares = {site: round(samples[site] / total, decimals) for site in others}
    return {**shares, last: 1.0 - sum(shares.values())}


def adjusted_shares(
    shares: Sequence[float], gaps: Sequence[float], step: float, *, centred: bool = True
) -> list[float]:
    """``a_k + d·(G_k − Ḡ)/max_j |G_j − Ḡ|``, cut to [0, 1] and divided by the sum: generalization adjustment.

    Source: Zhang et al. (CVPR 2023), equations 6 to 8. Where all gaps are equal the shares stay.

    Args:
        shares: a_k, with sum 1.
        gaps: G_k.
        step: d.
        centred: subtract the mean gap Ḡ, as the paper does; the released code does not.

    Raises:
        UserError: other lengths, or gaps that are not finite.

    Example:
        >>> [round(share, 6) for share in adjusted_shares([0.5, 0.5], [0.4, 0.2], step=0.1)]
        [0.6, 0.4]
    """
    if len(shares) != len(gaps) or not all(math.isfinite(gap) for gap in gaps):
        raise UserError(f"shares are adjusted by one finite gap each, found {list(gaps)} for {len(shares)} shares")
    middle = sum(gaps) / len(gaps) if centred else 0.0
    largest = max(abs(gap - middle) for gap in gaps)
    if largest == 0:
        return list(shares)
    moved = [share + step * (gap - middle) / largest for share, gap in zip(shares, gaps, strict=True)]
    cut = [min(1.0, max(0.0, share)) for share in moved]
    total = sum(cut)
    return [share / total for share in cut] if total > 0 else list(shares)
