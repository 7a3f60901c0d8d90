"""Numbers that change with progress: learning rates and gates.

``progress`` is the share of the work already done, t/T. Values outside [0, 1] count as the nearer end.
"""

from __future__ import annotations

import math


def constant(progress: float, start: float) -> float:
    """``start``, always."""
    return start


def linear(progress: float, start: float, end: float) -> float:
    """``g₀ + (g₁ − g₀)·t/T``; KD3A's gate over epochs t = 0…T−1, which so never reaches its end (section 7.2)."""
    return start + (end - start) * _clamped(progress)


def cosine(progress: float, start: float, end: float = 0.0) -> float:
    """``lr₁ + (lr₀ − lr₁)(1 + cos(πt/T))/2`` from start to end (Loshchilov & Hutter, ICLR 2017; section 7.2)."""
    return end + (start - end) * (1 + math.cos(math.pi * _clamped(progress))) / 2


def inverse_power(
    progress: float, start: float, gamma: float = 10.0, power: float = 0.75, *, clamp: bool = True
) -> float:
    """``lr₀·(1 + γp)^(−power)`` with γ = 10 and power 0.75 (DANN, Ganin et al., JMLR 2016; SHOT)."""
    return start * float((1 + gamma * (_clamped(progress) if clamp else progress)) ** -power)


def ramp(progress: float, gamma: float = 10.0) -> float:
    """``2/(1 + e^(−γp)) − 1`` with γ = 10, from 0 almost to 1: an adversary's strength (DANN)."""
    return math.tanh(gamma * _clamped(progress) / 2)


def _clamped(progress: float) -> float:
    return min(max(progress, 0.0), 1.0)
