"""SiloBN from its paper alone, in plain Python, without automatic differentiation.

Siloed federated learning for multi-centric histopathology data sets: a centre's statistics of BatchNorm stay at the
centre, its γ and β go to the server with all other weights. Here a sample is a number x, and the network is
    h = w x,  z = γ (h − μ) / √(σ² + ε) + β,  logits v_c z
A centre takes one step on all its samples, of which μ and σ² are mean and population variance in training. Its running
statistics r ← (1 − m) r + m s, s of the same samples, the variance with n − 1 below, go on from its own of the round
before. The server averages w, γ, β, v by samples. An unseen centre takes the statistics of its samples.

Written before the library's method was looked at, and it knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-5


@dataclass(frozen=True)
class Shared:
    """What the server averages."""

    w: float
    gamma: float
    beta: float
    v: tuple[float, ...]


@dataclass(frozen=True)
class Statistics:
    """What stays at a centre."""

    mean: float = 0.0
    variance: float = 1.0


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def variance_of(values: Sequence[float], below: int) -> float:
    middle = mean_of(values)
    return sum((value - middle) ** 2 for value in values) / below


def shares(logits: Sequence[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def outputs(net: Shared, samples: Sequence[float], statistics: Statistics) -> list[list[float]]:
    """Logits with given statistics, as a model predicts."""
    scale = math.sqrt(statistics.variance + EPSILON)
    z = [net.gamma * (net.w * x - statistics.mean) / scale + net.beta for x in samples]
    return [[v * value for v in net.v] for value in z]


def loss(net: Shared, samples: Sequence[float], labels: Sequence[int]) -> float:
    """Mean cross-entropy with the statistics of these samples."""
    at = [net.w * x for x in samples]
    found = Statistics(mean_of(at), variance_of(at, len(at)))
    chances = map(shares, outputs(net, samples, found))
    return -mean_of([math.log(p[label]) for p, label in zip(chances, labels, strict=True)])


def gradient(net: Shared, samples: Sequence[float], labels: Sequence[int]) -> Shared:
    """Of `loss`."""
    at = [net.w * x for x in samples]
    middle, scale = mean_of(at), math.sqrt(variance_of(at, len(at)) + EPSILON)
    normal = [(h - middle) / scale for h in at]
    z = [net.gamma * value + net.beta for value in normal]
    by_logit = [
        [(p - (c == label)) / len(labels) for c, p in enumerate(shares([v * value for v in net.v]))]
        for value, label in zip(z, labels, strict=True)
    ]
    by_z = [sum(g * v for g, v in zip(row, net.v, strict=True)) for row in by_logit]
    by_normal = [net.gamma * g for g in by_z]
    # Mean and deviation depend on every sample: (g − mean g − n̂ · mean(g n̂)) / scale.
    first, second = mean_of(by_normal), mean_of([g * n for g, n in zip(by_normal, normal, strict=True)])
    by_h = [(g - first - n * second) / scale for g, n in zip(by_normal, normal, strict=True)]
    return Shared(
        sum(g * x for g, x in zip(by_h, samples, strict=True)),
        sum(g * n for g, n in zip(by_z, normal, strict=True)),
        sum(by_z),
        tuple(sum(row[c] * value for row, value in zip(by_logit, z, strict=True)) for c in range(len(net.v))),
    )


def train(
    net: Shared, kept: Statistics, samples: Sequence[float], labels: Sequence[int], rate: float, momentum: float
) -> tuple[Shared, Statistics]:
    """One step at a centre, and its statistics after it."""
    by = gradient(net, samples, labels)
    at = [net.w * x for x in samples]
    stepped = Shared(
        net.w - rate * by.w,
        net.gamma - rate * by.gamma,
        net.beta - rate * by.beta,
        tuple(v - rate * g for v, g in zip(net.v, by.v, strict=True)),
    )
    return stepped, Statistics(
        (1 - momentum) * kept.mean + momentum * mean_of(at),
        (1 - momentum) * kept.variance + momentum * variance_of(at, len(at) - 1),
    )


def average(nets: Sequence[Shared], samples: Sequence[int]) -> Shared:
    """The server's mean by samples."""
    by = [count / sum(samples) for count in samples]

    def mixed(values: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(by, values, strict=True))

    return Shared(
        mixed([net.w for net in nets]),
        mixed([net.gamma for net in nets]),
        mixed([net.beta for net in nets]),
        tuple(mixed(column) for column in zip(*(net.v for net in nets), strict=True)),
    )


def unseen(net: Shared, samples: Sequence[float]) -> Statistics:
    """An unseen centre's statistics, of all its samples."""
    at = [net.w * x for x in samples]
    return Statistics(mean_of(at), variance_of(at, len(at)))
