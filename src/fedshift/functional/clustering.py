"""Clusters that stand for classes: spherical k-means (MDFNet), deep clustering (SRDC), how tight they are (FADA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


@dataclass(frozen=True)
class Clusters:
    """What `spherical_kmeans` found. labels: (n,). centroids: (C, d), zero where a class never had a sample.

    passes: how often samples were assigned, the last one without a change (unless the limit came first).
    """

    labels: Tensor
    centroids: Tensor
    passes: int


@torch.no_grad()
def spherical_kmeans(features: Tensor, labels: Tensor, classes: int, limit: int = 100) -> Clusters:
    """k-means by cosine distance ``d = ½(1 − cos(g, O_k))``, started from given labels (MDFNet, section 8.3, step 2).

    ``O_k`` is the mean of its class at first, then ``Σ_{ŷ=k} g/‖g‖``; samples go to the nearest, until none changes.
    A class that loses all its samples keeps its last centroid; one that has none from the start takes no part. A zero
    vector has cosine 0 with everything and goes to the first class that takes part.

    features: (n, d). labels: (n,) int64 in 0 … classes−1. Raises UserError for other shapes or no sample.
    """
    if features.dim() != 2 or labels.shape != features.shape[:1] or not len(features):
        raise UserError(
            f"k-means needs features (n, d) and a label for each, found {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    directions = functional.normalize(features)
    centroids, counts = _sums(features, labels, classes)
    centroids = centroids / counts.clamp(min=1)[:, None]
    absent = counts == 0
    for passes in range(1, limit + 1):
        cosines = directions @ functional.normalize(centroids).T
        nearest = cosines.masked_fill(absent, -torch.inf).argmax(1)
        if torch.equal(nearest, labels):
            return Clusters(labels, centroids, passes)
        labels = nearest
        sums, counts = _sums(directions, labels, classes)
        centroids = torch.where((counts > 0)[:, None], sums, centroids)
    return Clusters(labels, centroids, limit)


def _sums(rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of each class's rows (C, d), and its number of rows (C,)."""
    chosen = functional.one_hot(labels, classes).to(rows.dtype)
    return chosen.T @ rows, chosen.sum(0)


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean of each class (C, d), zero where it has no sample, and which classes have one (C,) bool."""
    sums, counts = _sums(features, labels, classes)
    return sums / counts.clamp(min=1)[:, None], counts > 0


def compactness(features: Tensor, labels: Tensor) -> float:
    """The gap statistic ``I = Σ_r 1/(2n_r) Σ_{i,j∈r} ‖f_i − f_j‖²``; smaller is tighter (FADA).

    Computed as what it equals, the sum of squared distances to the clusters' means, in float64.

    features: (n, d). labels: (n,), each row's cluster, any integers. Raises UserError for other shapes.
    """
    if features.dim() != 2 or labels.shape != features.shape[:1]:
        raise UserError(
            f"compactness needs features (n, d) and labels (n,), found {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    clusters, number, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    rows = features.double()
    means = rows.new_zeros(len(clusters), rows.shape[1]).index_add_(0, number, rows) / sizes[:, None]
    total: float = (rows - means[number]).square().sum().item()
    return total


@torch.no_grad()
def dispersion(features: Tensor, clusters: int, seed: int) -> float:
    """The `compactness` of features in the clusters that k-means finds (FADA).

    The same on any number of threads. With fewer distinct rows than clusters each distinct row is one.

    features: (n, d). clusters: at least 1. seed: of the starts, a whole number; its last 32 bits count.
    Raises UserError for other shapes, no row, or no cluster.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    if features.dim() != 2 or not len(features) or clusters < 1:
        raise UserError(f"k-means needs features (n, d) and a cluster, found {tuple(features.shape)} and {clusters}")
    rows = features.cpu()
    found = KMeans(min(clusters, len(torch.unique(rows, dim=0))), n_init=4, random_state=seed % 2**32)
    with threadpool_limits(1):  # sums whose order does not depend on the number of threads
        labels = found.fit_predict(rows.numpy())
    return compactness(rows, torch.from_numpy(labels).long())


def auxiliary_distribution(probabilities: Tensor) -> Tensor:
    """``q_ic ∝ p_ic / √(Σ_i p_ic)``, rows sum to 1: (n, C) → (n, C) (SRDC, Tang et al., CVPR 2020).

    Classes that are predicted often count less; in a small batch one that happens to be absent counts far too much.
    """
    raw = probabilities / probabilities.sum(0).clamp(min=torch.finfo(probabilities.dtype).tiny).sqrt()
    return raw / raw.sum(1, keepdim=True)


def student_assignment(features: Tensor, centres: Tensor) -> Tensor:
    """Logarithm of the soft assignment to centres, ``softmax_c (1 + ‖f − c‖²)^−1``: (n, d), (C, d) → (n, C) (SRDC)."""
    squared = features.square().sum(1, keepdim=True) + centres.square().sum(1) - 2 * features @ centres.T
    return (1 / (1 + squared.clamp(min=0))).log_softmax(1)


def soft_cross_entropy(labels: Tensor, log_probabilities: Tensor) -> Tensor:
    """``−Σ_c q_c log p_c``, mean over the rows, in nats."""
    return -(labels * log_probabilities).sum(1).mean()
