"""Clusters: spherical k-means (MDFNet), deep clustering (SRDC), compactness (FADA), first neighbours (PARDON)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.functional.metric_learning import squared_distances


@dataclass(frozen=True)
class Clusters:
    """The result of `spherical_kmeans`.

    Attributes:
        labels: class of each sample, (n,).
        centroids: (C, d), zero where a class never had a sample.
        passes: how often samples were assigned. The last pass changed nothing, unless the limit came first.
    """

    labels: Tensor
    centroids: Tensor
    passes: int


@torch.no_grad()
def spherical_kmeans(features: Tensor, labels: Tensor, classes: int, limit: int = 100) -> Clusters:
    """k-means by cosine distance ``d = ½(1 − cos(g, O_k))``, started from given labels (MDFNet).

    A centroid ``O_k`` is at first the mean of its class, then ``Σ_{ŷ=k} g/‖g‖``. Samples go to the nearest centroid
    until no label changes. A class that loses all samples keeps its last centroid; a class that is empty at the start
    takes no part. A zero vector has cosine 0 with everything and goes to the first class that takes part.

    Args:
        features: g, (n, d).
        labels: first labels, (n,) int64 in 0 … classes−1.
        classes: number of classes.
        limit: the most passes.

    Raises:
        UserError: other shapes, or no sample.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]])
        >>> spherical_kmeans(points, torch.tensor([0, 1, 1]), 2).labels
        tensor([0, 0, 1])
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
    """The mean feature of each class.

    Args:
        features: (n, d).
        labels: (n,) int64 in 0 … classes−1.
        classes: C.

    Returns:
        Means (C, d), zero for a class without samples, and which classes have samples, (C,) bool.

    Example:
        >>> class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), 2)
        (tensor([[2.],
                [0.]]), tensor([ True, False]))
    """
    sums, counts = _sums(features, labels, classes)
    return sums / counts.clamp(min=1)[:, None], counts > 0


def nearest_mean_classifier(means: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """A linear classifier whose largest score is that of the nearest mean: ``2 m_j·z − ‖m_j‖²``.

    It is ``‖z‖² − ‖z − m_j‖²``, and ‖z‖² is the same for all classes.

    Args:
        means: m, (C, d).
        present: which classes have a mean, (C,) bool; the others have the score −1e9.

    Returns:
        Weight (C, d) and bias (C,).

    Source:
        FedProto (Tan et al., AAAI 2022) predicts with the nearest prototype.

    Example:
        >>> weight, bias = nearest_mean_classifier(torch.tensor([[1.0], [3.0]]), torch.tensor([True, True]))
        >>> (torch.tensor([[2.5]]) @ weight.T + bias).argmax()
        tensor(1)
    """
    return 2 * means * present[:, None], torch.where(present, -means.square().sum(1), -1e9)


@torch.no_grad()
def spread_rows(rows: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Rows that lie far from each other, drawn by k-means++: each with the square of its distance to those before it.

    Source: Arthur, Vassilvitskii (SODA 2007, section 2.2). Of equal rows alone, any is drawn.

    Args:
        rows: (n, d).
        number: how many, 1 to n.
        generator: draws, on the CPU.

    Returns:
        Row numbers (number,).

    Example:
        >>> spread_rows(torch.tensor([[0.0], [9.0], [9.0]]), 2, torch.Generator().manual_seed(0)).sort().values[0]
        tensor(0)
    """
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    nearest = torch.full((len(rows),), torch.inf)
    while len(chosen) < number:
        nearest = torch.minimum(nearest, squared_distances(rows, rows[chosen[-1:]])[:, 0].cpu().clamp(min=0))
        nearest[chosen[-1]] = 0
        shares = nearest if nearest.any() else torch.ones_like(nearest)
        chosen.append(int(torch.multinomial(shares, 1, generator=generator)))
    return torch.tensor(chosen)


@torch.no_grad()
def kmeans_from(features: Tensor, start: Tensor, passes: int, present: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k-means by squared distances from given centres, with a fixed number of assignments (SRDC, Tang et al., 2020).

    A cluster's number is that of its centre. One that has lost all its samples has the centre 0, as in the released
    code of SRDC (trainer.py, k_means).

    Args:
        features: f, (n, d).
        start: The centres at first, (C, d).
        passes: How often samples are assigned, at least 1.
        present: Which centres take part, (C,) bool; all by default. The others have no sample, and the centre 0.

    Returns:
        The clusters of the last pass, (n,), and their means, (C, d).

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


@torch.no_grad()
def first_neighbour_partitions(rows: Tensor) -> list[Tensor]:
    """FINCH: each row is in one group with the row whose cosine to it is the largest, then the groups' means likewise.

    It ends before all are one group, unless the rows themselves are, and where nothing is joined any more. Of equal
    cosines the first row counts. Source: Sarfraz, Sharma, Stiefelhagen (CVPR 2019, equation 1 and algorithm 1).

    Args:
        rows: (n, d), at least one.

    Returns:
        Partitions from the finest to the coarsest, each (n,) int64 with groups 0, 1, …

    Example:
        >>> rows = torch.tensor([[0.0, 9.0], [1.0, 9.0], [9.0, 0.0], [9.0, 1.0]])
        >>> first_neighbour_partitions(rows)
        [tensor([0, 0, 1, 1])]
    """
    partitions: list[Tensor] = []
    groups, count = torch.arange(len(rows)), len(rows)
    while True:
        joined = _joined_to_neighbours(class_means(rows, groups.to(rows.device), count)[0].cpu())
        before, count = count, int(joined.max()) + 1
        if partitions and count in (1, before):
            return partitions
        groups = joined[groups]
        partitions.append(groups)
        if count == 1:
            return partitions


def _joined_to_neighbours(rows: Tensor) -> Tensor:
    """The group of each row, (n,), where rows hang together through their nearest others."""
    directions = functional.normalize(rows)
    nearest = (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(1)
    groups = torch.arange(len(rows))
    while True:
        lowest = torch.minimum(groups, groups[nearest])
        lowest = lowest.scatter_reduce(0, nearest, lowest, "amin")
        if torch.equal(lowest, groups):
            numbers: Tensor = torch.unique(groups, return_inverse=True)[1]
            return numbers
        groups = lowest


def compactness(features: Tensor, labels: Tensor) -> float:
    """The gap statistic ``I = Σ_r 1/(2n_r) Σ_{i,j∈r} ‖f_i − f_j‖²``; smaller means tighter clusters (FADA).

    It is computed as the sum of squared distances to the cluster means, in float64, which is equal.

    Args:
        features: (n, d).
        labels: cluster of each row, (n,), any integers.

    Raises:
        UserError: other shapes.

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

    Args:
        features: (n, d).
        clusters: how many, at least 1.
        seed: seed of the starting centroids; its last 32 bits count.

    Raises:
        UserError: other shapes, no row, or no cluster.

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


def auxiliary_distribution(probabilities: Tensor) -> Tensor:
    """Target distribution ``q_ic ∝ p_ic / √(Σ_i p_ic)``, rows sum to 1 (SRDC, Tang et al., CVPR 2020).

    Classes that are predicted often count less. In a small batch, a class that happens to be absent counts far too
    much.

    Args:
        probabilities: p, (n, C).

    Returns:
        q, (n, C).

    Example:
        >>> auxiliary_distribution(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).round(decimals=2)
        tensor([[0.3700, 0.6300],
                [1.0000, 0.0000]])
    """
    raw = probabilities / probabilities.sum(0).clamp(min=torch.finfo(probabilities.dtype).tiny).sqrt()
    return raw / raw.sum(1, keepdim=True)


def student_assignment(features: Tensor, centres: Tensor) -> Tensor:
    """Logarithm of the soft assignment to centres, ``softmax_c (1 + ‖f − c‖²)^−1`` (SRDC).

    Args:
        features: f, (n, d).
        centres: c, (C, d).

    Returns:
        (n, C).

    Example:
        >>> student_assignment(torch.tensor([[0.0]]), torch.tensor([[1.0], [-1.0]])).exp()
        tensor([[0.5000, 0.5000]])
    """
    squared = features.square().sum(1, keepdim=True) + centres.square().sum(1) - 2 * features @ centres.T
    return (1 / (1 + squared.clamp(min=0))).log_softmax(1)


def soft_cross_entropy(labels: Tensor, log_probabilities: Tensor) -> Tensor:
    """Cross-entropy with soft labels, ``−Σ_c q_c log p_c``, mean over the rows, in nats.

    Args:
        labels: q, (n, C).
        log_probabilities: log p, (n, C).

    Example:
        >>> soft_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]).log())
        tensor(0.6931)
    """
    return -(labels * log_probabilities).sum(1).mean()
