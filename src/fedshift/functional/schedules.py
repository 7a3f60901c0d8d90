"""Numbers that change with progress: learning rates and gates.

``progress`` is the share of the work already done, t/T. Values outside [0, 1] count as the nearer end.
"""

from __future__ import annotations

import math


def linear(progress: float, start: float, end: float) -> float:
    """``g₀ + (g₁ − g₀)·t/T``. KD3A's gate over epochs t = 0…T−1, which therefore never reaches its end.

    Example:
        >>> round(linear(0.5, start=0.8, end=0.95), 6)
        0.875
    """
    return start + (end - start) * _clamp(progress)


def cosine(progress: float, start: float, end: float = 0.0) -> float:
    """``lr₁ + (lr₀ − lr₁)(1 + cos(πt/T))/2`` from start to end (Loshchilov & Hutter, ICLR 2017, equation 5).

    Example:
        >>> [round(cosine(progress, start=0.1), 6) for progress in (0.0, 0.5, 1.0)]
        [0.1, 0.05, 0.0]
    """
    return end + (start - end) * (1 + math.cos(math.pi * _clamp(progress))) / 2


def inverse_power(
    progress: float, start: float, gamma: float = 10.0, power: float = 0.75, *, clamp: bool = True
) -> float:
    """``lr₀·(1 + γp)^(−power)`` with γ = 10 and power 0.75 (DANN, Ganin et al., JMLR 2016; SHOT; MDFNet).

    ``progress``: p. ``start``: lr₀. ``gamma``: γ. ``power``: the exponent. ``clamp``: whether progress outside [0, 1]
    counts as the nearer end. Without it p may be the number of a round.

    Example:
        >>> [round(inverse_power(progress, start=1.0), 4) for progress in (0.0, 0.5, 1.0)]
        [1.0, 0.2608, 0.1656]
    """
    return start * float((1 + gamma * (_clamp(progress) if clamp else progress)) ** -power)


def warm_up(progress: float, share: float, start: float = 0.01) -> float:
    """``min(1, g + (1 − g)·p/w)``: a factor that grows from ``start`` to 1 in the first ``share`` of the work.

    It does not start at 0, so that no step is lost (Goyal et al. 2017, section 2.2, there from 1/k with k workers).

    ``progress``: p. ``share``: w, above 0. ``start``: g.

    Example:
        >>> [round(warm_up(progress, share=0.1), 4) for progress in (0.0, 0.05, 0.1, 0.5)]
        [0.01, 0.505, 1.0, 1.0]
    """
    return min(1.0, start + (1 - start) * _clamp(progress / share))


def ramp(progress: float, gamma: float = 10.0) -> float:
    """``2/(1 + e^(−γp)) − 1`` with γ = 10: an adversary's strength, from 0 almost to 1 (DANN).

    Example:
        >>> [round(ramp(progress), 4) for progress in (0.0, 0.1, 1.0)]
        [0.0, 0.4621, 0.9999]
    """
    return math.tanh(gamma * _clamp(progress) / 2)


def _clamp(progress: float) -> float:
    return min(max(progress, 0.0), 1.0)
