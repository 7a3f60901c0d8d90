"""CMSS from its paper alone, in plain Python, without automatic differentiation: losses, gradients, one step.

Curriculum manager for source selection: features f = W x, a classifier A f, a domain classifier D = σ(u·f), the
probability of "source", and a curriculum network with a score s = m·x for each source sample. Over N source samples
and M target samples:
    w_j = N · softmax(s)_j,  of mean 1
    L_cls = mean CE(A f_j, y_j),  not weighted
    L_wdom = −1/N Σ_j w_j log D(f_j) − 1/M Σ_i log(1 − D(f_i))
    max over D, min over F, the classifier and the curriculum, of L_cls − λ L_wdom

Written before the library's method was looked at, and it knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Row = list[float]
Matrix = list[Row]


@dataclass(frozen=True)
class Networks:
    """The weights of all four: ``features`` W, ``classifier`` A, ``domains`` u, ``curriculum`` m."""

    features: Matrix
    classifier: Matrix
    domains: Row
    curriculum: Row


@dataclass(frozen=True)
class Losses:
    """Both losses, the weights w of the source samples, and the gradients of each loss."""

    classification: float
    domain: float
    weights: Row
    by_classification: Networks
    by_domain: Networks


def product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(scores: Row) -> Row:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def outer_sum(left: Matrix, right: Matrix) -> Matrix:
    """Σ_j of the outer products of both rows j."""
    return [
        [sum(a[r] * b[c] for a, b in zip(left, right, strict=True)) for c in range(len(right[0]))]
        for r in range(len(left[0]))
    ]


def losses(net: Networks, sources: Matrix, labels: Sequence[int], target: Matrix) -> Losses:
    """Losses and gradients by hand."""
    n, m = len(sources), len(target)
    at_source, at_target = ([[product(row, x) for row in net.features] for x in inputs] for inputs in (sources, target))
    shares = softmax([product(net.curriculum, x) for x in sources])
    judged, judged_target = ([sigmoid(product(net.domains, f)) for f in side] for side in (at_source, at_target))
    surprise = [-math.log(d) for d in judged]
    domain = product(shares, surprise) - sum(math.log(1 - d) for d in judged_target) / m

    likely = [softmax([product(row, f) for row in net.classifier]) for f in at_source]
    classification = -sum(math.log(p[y]) for p, y in zip(likely, labels, strict=True)) / n
    by_logit = [[(p - (c == y)) / n for c, p in enumerate(row)] for row, y in zip(likely, labels, strict=True)]
    by_feature = [[product(g, column) for column in zip(*net.classifier, strict=True)] for g in by_logit]

    # −w log σ(z) / N has the derivative w (σ(z) − 1) / N by z, and −log(1 − σ(z)) / M has σ(z) / M.
    by_judgement = [*(p * (d - 1) for p, d in zip(shares, judged, strict=True)), *(d / m for d in judged_target)]
    everything, features = sources + target, at_source + at_target
    # Σ_j softmax(s)_j ℓ_j has the derivative softmax(s)_j (ℓ_j − Σ_i softmax(s)_i ℓ_i) by s_j.
    mean = product(shares, surprise)
    by_score = [p * (loss - mean) for p, loss in zip(shares, surprise, strict=True)]
    nothing = [[0.0] * len(row) for row in net.classifier]
    return Losses(
        classification,
        domain,
        [n * share for share in shares],
        Networks(
            outer_sum(by_feature, sources),
            outer_sum(by_logit, at_source),
            [0.0] * len(net.domains),
            [0.0] * len(net.curriculum),
        ),
        Networks(
            outer_sum([[g * u for u in net.domains] for g in by_judgement], everything),
            nothing,
            outer_sum([[g] for g in by_judgement], features)[0],
            outer_sum([[g] for g in by_score], sources)[0],
        ),
    )


def step(net: Networks, at: Losses, rate: float, strength: float, of_domains: float) -> Networks:
    """One step of gradient descent on L_cls − λ L_wdom, of ascent for D.

    Args:
        net: The weights before it.
        at: Their losses.
        rate: Of learning.
        strength: λ for features and curriculum.
        of_domains: λ for D: the same in the paper's one objective, 1 where a layer turns the gradient.
    """

    def descended(weights: Row, by_classification: Row, by_domain: Row, sign: float) -> Row:
        gradients = zip(weights, by_classification, by_domain, strict=True)
        return [w - rate * (c + sign * d) for w, c, d in gradients]

    def rows(weights: Matrix, by_classification: Matrix, by_domain: Matrix) -> Matrix:
        return [descended(w, c, d, -strength) for w, c, d in zip(weights, by_classification, by_domain, strict=True)]

    by, told = at.by_classification, at.by_domain
    return Networks(
        rows(net.features, by.features, told.features),
        rows(net.classifier, by.classifier, told.classifier),
        descended(net.domains, by.domains, told.domains, of_domains),
        descended(net.curriculum, by.curriculum, told.curriculum, -strength),
    )
