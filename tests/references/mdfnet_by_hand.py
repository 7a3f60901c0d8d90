"""MDFNet from its paper alone, in NumPy, without automatic differentiation: losses, gradients, pseudo-labels, weights.

Privacy-protected multi-domain collaborative learning: an encoder of two layers whose output g is split by two masks of
Bernoulli draws into an invariant and a specific part, a decoder of both, a classifier of the invariant one. Where the
paper is silent or at odds with itself, what is taken is said beside the line. Written before the library's method was
looked at, and it knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Parts = Mapping[str, Floats]
"""Parameters or gradients: encoder ``E1, e1, E2, e2``, classifier ``C, c``, decoder ``D1, d1, D2, d2``, mask logits
``invariant, specific``. A layer's matrix is (outputs, inputs)."""


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def interaction(specific: Floats, invariant: Floats, smooth: float = 1e-6) -> float:
    """L_s: ⟨s, i⟩ / Σ(s + i − s ⊗ i), of the masks' probabilities: of features it has no lower bound."""
    both = specific * invariant
    return float((both.sum() + smooth) / ((specific + invariant - both).sum() + smooth))


def interaction_gradients(specific: Floats, invariant: Floats, smooth: float = 1e-6) -> tuple[Floats, Floats]:
    """∂L_s/∂s and ∂L_s/∂i by the quotient rule."""
    both = specific * invariant
    above, below = both.sum() + smooth, (specific + invariant - both).sum() + smooth

    def by(other: Floats) -> Floats:
        return (other * below - above * (1 - other)) / below**2

    return by(invariant), by(specific)


def embedding(parts: Parts, inputs: Floats) -> Floats:
    """g, with ReLU behind both layers, of which the paper is silent."""
    hidden = np.maximum(inputs @ parts["E1"].T + parts["e1"], 0)
    g: Floats = np.maximum(hidden @ parts["E2"].T + parts["e2"], 0)
    return g


def predictions(parts: Parts, masked: Floats) -> Floats:
    """The classifier's probabilities of g^I."""
    return softmax(masked @ parts["C"].T + parts["c"])


def client(
    parts: Parts, inputs: Floats, draws: tuple[Floats, Floats], labels: NDArray[np.int64], threshold: float | None
) -> tuple[float, dict[str, Floats]]:
    """The loss of a client's mini-batch, and its gradient by every parameter.

    Args:
        parts: The parameters.
        inputs: Features of the frozen backbone, (n, p).
        draws: The 0/1 masks of the samples, invariant and specific, each (n, d).
        labels: True ones, or the pseudo-labels.
        threshold: τ of an unlabelled client, whose predictions also lose their entropy; None: a labelled client.
    """
    n = len(inputs)
    first = inputs @ parts["E1"].T + parts["e1"]
    hidden = np.maximum(first, 0)
    second = hidden @ parts["E2"].T + parts["e2"]
    g = np.maximum(second, 0)
    kept, own = draws
    invariant, specific = kept * g, own * g
    p = predictions(parts, invariant)
    sure = np.ones(n) if threshold is None else (p.max(1) >= threshold).astype(np.float64)
    right = p[np.arange(n), labels]
    loss = float((-sure * np.log(right)).mean())
    by_logits = sure[:, None] * (p - np.eye(p.shape[1])[labels]) / n
    if threshold is not None:
        entropy = -(p * np.log(p)).sum(1)
        loss += float(entropy.mean())
        by_logits = by_logits - p * (np.log(p) + entropy[:, None]) / n

    joined = np.concatenate([specific, invariant], 1)
    third = joined @ parts["D1"].T + parts["d1"]
    inner = np.maximum(third, 0)
    restored = inner @ parts["D2"].T + parts["d2"]
    loss += float(((restored - inputs) ** 2).mean())  # the paper's sum would outweigh the rest
    by_restored = 2 * (restored - inputs) / inputs.size
    by_third = (by_restored @ parts["D2"]) * (third > 0)
    by_joined = by_third @ parts["D1"]

    chances = {name: sigmoid(parts[name]) for name in ("specific", "invariant")}
    loss += interaction(chances["specific"], chances["invariant"])
    by_chance = dict(
        zip(("specific", "invariant"), interaction_gradients(chances["specific"], chances["invariant"]), strict=True)
    )

    width = g.shape[1]
    by_specific = by_joined[:, :width]
    by_invariant = by_joined[:, width:] + by_logits @ parts["C"]
    by_g = (by_invariant * kept + by_specific * own) * (second > 0)
    by_hidden = (by_g @ parts["E2"]) * (first > 0)
    # Straight through: a draw's gradient is its chance's.
    by_mask = {"invariant": (by_invariant * g).sum(0), "specific": (by_specific * g).sum(0)}
    gradients = {
        "E1": by_hidden.T @ inputs, "e1": by_hidden.sum(0), "E2": by_g.T @ hidden, "e2": by_g.sum(0),
        "C": by_logits.T @ invariant, "c": by_logits.sum(0),
        "D1": by_third.T @ joined, "d1": by_third.sum(0), "D2": by_restored.T @ inner, "d2": by_restored.sum(0),
    }  # fmt: skip
    for name, chance in chances.items():
        gradients[name] = (by_mask[name] + by_chance[name]) * chance * (1 - chance)
    return loss, gradients


def learning_rate(progress: float) -> float:
    """0.01 / (1 + 10 r)^0.75, r the share of the training that is over."""
    return float(0.01 / (1 + 10 * progress) ** 0.75)


def share_of_unlabelled(progress: float, rho: float = 10.0) -> float:
    """η = (1 − e^{−ρr}) / (2 (1 + e^{−ρr})), which is tanh(ρr / 2) / 2."""
    return float(np.tanh(rho * progress / 2) / 2)


def consensus(labelled: list[Floats], unlabelled: list[Floats], progress: float) -> Floats:
    """θ = (1 − η)/L Σ labelled + η/U Σ unlabelled."""
    eta = share_of_unlabelled(progress)
    mean: Floats = (1 - eta) * np.mean(labelled, axis=0) + eta * np.mean(unlabelled, axis=0)
    return mean


def pseudo_labels(features: Floats, predicted: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Spherical k-means of g^I from the model's predictions: cosine distance, until no label changes.

    The first centroids are means, the later ones sums of directions. A class without samples keeps its centroid, and
    one that never had any is nobody's.
    """
    labels = predicted.copy()
    centres = np.full((classes, features.shape[1]), np.nan)
    for k in set(labels.tolist()):
        centres[k] = features[labels == k].mean(0)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / lengths
    for _ in range(100):
        cosine = directions @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T
        distance = np.where(np.isnan(cosine), np.inf, (1 - cosine) / 2)
        new = distance.argmin(1)
        for k in set(new.tolist()):
            centres[k] = directions[new == k].sum(0)
        if (new == labels).all():
            break
        labels = new
    return labels
