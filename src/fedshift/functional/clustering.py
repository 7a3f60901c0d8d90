"""Clusters: spherical k-means (MDFNet), deep clustering (SRDC), compactness (FADA), first neighbours (PARDON)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.extras import import_extra


def _sums(rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of each class's rows (C, d), and its number of rows (C,)."""
    chosen = functional.one_hot(labels, classes).to(rows.dtype)
    return chosen.T @ rows, chosen.sum(0)


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean feature of each class.

    ``features``: (n, d). ``labels``: (n,) int64 in 0 … classes−1. ``classes``: C. Returns means (C, d), zero for a
    class without samples, and which classes have samples, (C,) bool.

    Example:
        >>> class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), 2)
        (tensor([[2.],
                [0.]]), tensor([ True, False]))
    """
    sums, counts = _sums(features, labels, classes)
    return sums / counts.clamp(min=1)[:, None], counts > 0


@torch.no_grad()
def kmeans_from(features: Tensor, start: Tensor, passes: int, present: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k-means by squared distances from given centres, with a fixed number of assignments (SRDC, Tang et al., 2020).

    A cluster's number is that of its centre. One that has lost all its samples has the centre 0, as in the released
    code of SRDC (trainer.py, k_means).

    ``features``: f, (n, d). ``start``: the centres at first, (C, d). ``passes``: how often samples are assigned, at
    least 1. ``present``: which centres take part, (C,) bool; all by default. The others have no sample, and the centre
    0. Returns the clusters of the last pass, (n,), and their means, (C, d).

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [9.0]])
        >>> kmeans_from(points, torch.tensor([[0.0], [4.0]]), passes=2)
        (tensor([0, 0, 1]), tensor([[0.5000],
                [9.0000]]))
    """
    centres = start
    labels = torch.zeros(len(features), dtype=torch.int64, device=features.device)
    for _ in range(passes):
        distances = squared_distances(features, centres)
        if present is not None:
            distances = distances.masked_fill(~present, torch.inf)
        labels = distances.argmin(1)
        centres, _ = class_means(features, labels, len(start))
    return labels, centres


def compactness(features: Tensor, labels: Tensor) -> float:
    """The gap statistic ``I = Σ_r 1/(2n_r) Σ_{i,j∈r} ‖f_i − f_j‖²``; smaller means tighter clusters (FADA).

    It is computed as the sum of squared distances to the cluster means, in float64, which is equal.

    ``features``: (n, d). ``labels``: cluster of each row, (n,), any integers. Raises UserError: other shapes.

    Example:
        >>> compactness(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0, 0, 1]))
        2.0
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

    The result does not depend on the number of threads. With fewer distinct rows than clusters, each distinct row is a
    cluster.

    ``features``: (n, d). ``clusters``: how many, at least 1. ``seed``: seed of the starting centroids; its last 32 bits
    count. Raises UserError: other shapes, no row, or no cluster.

    Example:
        >>> dispersion(torch.tensor([[0.0], [2.0], [9.0], [9.0]]), clusters=2, seed=0)
        2.0
    """
    from threadpoolctl import threadpool_limits

    cluster = import_extra("sklearn.cluster", extra="report", what="k-means")

    if features.dim() != 2 or not len(features) or clusters < 1:
        raise UserError(f"k-means needs features (n, d) and a cluster, found {tuple(features.shape)} and {clusters}")
    rows = features.cpu()
    kmeans = cluster.KMeans(min(clusters, len(torch.unique(rows, dim=0))), n_init=4, random_state=seed % 2**32)
    with threadpool_limits(1):  # fixes the order of sums
        labels = kmeans.fit_predict(rows.numpy())
    return compactness(rows, torch.from_numpy(labels).long())


def squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """``‖a‖² + ‖b‖² − 2a·b`` of every pair, a matrix product: on a processor eight times faster than `torch.cdist`.

    ``left``: (n, d). ``right``: (m, d). Returns (n, m), at least 0.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[25.,  0.]])
    """
    lengths = left.square().sum(1, keepdim=True) + right.square().sum(1)
    return torch.addmm(lengths, left, right.T, alpha=-2).clamp_min(0)
