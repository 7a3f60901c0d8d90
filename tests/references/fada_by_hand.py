"""FADA from its paper alone, in plain Python, without automatic differentiation: alignment, disentangling, attention.

Federated adversarial domain adaptation: a source i has features f = W_i x, the target f = W_t x, and each pair of a
source and the target an identifier DI_i = σ(u·f + b), the probability of "source". Means are over samples.
    L_DI = −E log DI(W_i x^s) − E log(1 − DI(W_t x^t))                                       (of the identifier)
    L_G = −E log DI(W_i x^s) − E log DI(W_t x^t)                                             (of both generators)
    I(p; q) = 1/n Σ T(p, q) − log(1/n Σ exp T(p, q')),  q' drawn again                        (mutual information)
    I_gap = Σ_r 1/(2 n_r) Σ_{i, j in r} ‖f_i − f_j‖²,  r the clusters of the target's features
    gain_i = I_gap before − I_gap after the update of source i,  shares = softmax(gain)
    Θ_t ← Σ_i share_i Θ_i

Written before the library's method was looked at, and it knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]
Matrix = Sequence[Row]


def product(left: Row, right: Row) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def features(weights: Matrix, samples: Matrix) -> list[list[float]]:
    return [[product(row, x) for row in weights] for x in samples]


def certainties(u: Row, b: float, sample_features: Matrix) -> list[float]:
    return [sigmoid(product(u, f) + b) for f in sample_features]


def identifier_loss(source: Row, target: Row) -> float:
    """L_DI from the probabilities of "source" of both sides."""
    return -sum(map(math.log, source)) / len(source) - sum(math.log(1 - d) for d in target) / len(target)


def generator_loss(source: Row, target: Row) -> float:
    """L_G from the same."""
    return -sum(map(math.log, source)) / len(source) - sum(map(math.log, target)) / len(target)


def identifier_gradient(u: Row, b: float, source: Matrix, target: Matrix) -> tuple[list[float], float]:
    """Of L_DI by u and b. −log σ(z) has the derivative σ(z) − 1 by z, −log(1 − σ(z)) has σ(z)."""
    by_logit = [(d - 1) / len(source) for d in certainties(u, b, source)]
    by_logit += [d / len(target) for d in certainties(u, b, target)]
    everything = [*source, *target]
    by_u = [sum(g * f[c] for g, f in zip(by_logit, everything, strict=True)) for c in range(len(u))]
    return by_u, sum(by_logit)


def generator_gradient(u: Row, b: float, weights: Matrix, samples: Matrix) -> list[list[float]]:
    """Of one side's term of L_G by its own W: both sides want the answer "source"."""
    by_logit = [(d - 1) / len(samples) for d in certainties(u, b, features(weights, samples))]
    by_input = [product(by_logit, column) for column in zip(*samples, strict=True)]
    return [[value * slope for slope in by_input] for value in u]


def mutual_information(joint: Row, apart: Row) -> float:
    """From T of the pairs that belong together, and of pairs that were put together by chance."""
    return sum(joint) / len(joint) - math.log(sum(map(math.exp, apart)) / len(apart))


def scatter(sample_features: Matrix, clusters: Sequence[int]) -> float:
    """I_gap by its double sum."""
    total = 0.0
    for cluster in set(clusters):
        members = [f for f, c in zip(sample_features, clusters, strict=True) if c == cluster]
        pairs = sum(sum((a - b) ** 2 for a, b in zip(f, g, strict=True)) for f in members for g in members)
        total += pairs / (2 * len(members))
    return total


def attention(before: float, after: Row) -> list[float]:
    """The sources' shares."""
    gains = [before - value for value in after]
    powers = [math.exp(gain - max(gains)) for gain in gains]
    return [power / sum(powers) for power in powers]


def aggregate(shares: Row, models: Sequence[Row]) -> list[float]:
    """Σ_i share_i Θ_i."""
    return [product(shares, column) for column in zip(*models, strict=True)]
