"""How much each source counts in the aggregate: KD3A's rules (Feng et al., ICML 2021; section 7), and FADA's (9.2).

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
    """The sources' shares and the target's, ``α_T = N_T / (ΣN + N_T)``, ``α_k = (1 − α_T) · N_k CF_k / Σ_j N_j CF_j``.

    Negative focus counts as 0; when all are 0 the sources share equally. Together they sum to 1 (KD3A, section 7.1,
    step 4; 7.4.5, 7.4.7).

    focus: (K,). samples: N_k, at least 1 each. target_samples: N_T, at least 0.
    Raises UserError for other numbers, different lengths and focus that is not finite.
    """
    counts = _counts(samples, len(focus))
    if target_samples < 0:
        raise UserError(f"the number of target samples must be at least 0, found {target_samples}")
    target = target_samples / (sum(samples) + target_samples)
    return _shares(_focus(focus) * counts, 1 - target), target


def released_domain_weights(focus: Sequence[float] | Tensor, confident_fraction: float) -> tuple[list[float], float]:
    """The sources' shares and the target's in KD3A's released code: ``α_T = fraction / (K + 1)``, ``α_k ∝ CF_k``.

    Numbers of samples do not enter; negative and all-zero focus as in `domain_weights` (section 7.4.6). The code rounds
    every share to 4 decimals, which then need not sum to exactly 1; these are not rounded.

    focus: (K,). confident_fraction: the share of target samples on which a teacher passes the gate, 0 to 1.
    Raises UserError for another fraction, no focus, or one that is not finite.
    """
    if not 0 <= confident_fraction <= 1:
        raise UserError(f"the confident fraction must be between 0 and 1, found {confident_fraction}")
    target = confident_fraction / (len(focus) + 1)
    return _shares(_focus(focus), 1 - target), target


def smoothed_weights(previous: Sequence[float], new: Sequence[float], momentum: float = 0.9) -> list[float]:
    """``m · previous + (1 − m) · new``, for the weights of all sites (section 7.4.6).

    Raises UserError when lengths differ or momentum is outside [0, 1].
    """
    if not 0 <= momentum <= 1:
        raise UserError(f"the momentum of domain weights must be between 0 and 1, found {momentum}")
    if len(previous) != len(new):
        raise UserError(f"{len(previous)} previous weights but {len(new)} new ones: the sites must stay the same")
    return [momentum * old + (1 - momentum) * now for old, now in zip(previous, new, strict=True)]


def sample_weights(samples: Sequence[int]) -> list[float]:
    """``α_k = N_k / Σ_j N_j``: no focus. Raises UserError when a number is below 1 or there is none."""
    return _shares(_counts(samples, len(samples)), 1.0)


def distance_weights(samples: Sequence[int], distances: Sequence[float]) -> list[float]:
    """``α_k ∝ N_k exp(−d_k)`` with d_k the distance of source k to the target (H-divergence; section 7.5).

    Raises UserError for different lengths, numbers of samples below 1, and distances that are negative or not finite.
    """
    counts = _counts(samples, len(distances))
    for distance in distances:
        if not (math.isfinite(distance) and distance >= 0):
            raise UserError(f"distance {distance} to the target must be a finite number of at least 0")
    gaps = torch.tensor(distances, dtype=torch.float64)
    return _shares(counts * torch.exp(gaps.min() - gaps), 1.0)


def relative_gains(before: float, after: Sequence[float]) -> list[float]:
    """``(I − I_k) / I``: the gain that each source's update brings, in parts of what there was; 0 where that is 0.

    FADA's paper takes ``I − I_k``. The sum I grows with the number of samples and features, so that a softmax of such
    gains is 0 or 1.

    before: I. after: I_k of each source. Raises UserError when one is negative or not finite.
    """
    for value in (before, *after):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"dispersion {value} must be a finite number of at least 0")
    return [(before - value) / before if before > 0 else 0.0 for value in after]


def gain_weights(gains: Sequence[float]) -> list[float]:
    """Softmax of the gains in `clustering.compactness` that each source's update brings, as they are or in parts of it
    (FADA).

    Raises UserError when there is none or one is not finite.
    """
    weights: list[float] = _finite(gains, "gain").softmax(0).tolist()
    return weights


def _shares(values: Tensor, total: float) -> list[float]:
    """``total`` in proportion to ``values``, equally when all are 0."""
    largest = values.max()
    # Divided by the largest first: neither the sum nor a quotient leaves the range of float64.
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
    """``N_k/ΣN`` rounded, the last site's share completing the others to 1 (the released code of ELCFS).

    Raises UserError when there is no sample.
    """
    total = sum(samples.values())
    if total <= 0:
        raise UserError("shares need at least one sample")
    *others, last = samples
    shares = {site: round(samples[site] / total, decimals) for site in others}
    return {**shares, last: 1.0 - sum(shares.values())}
