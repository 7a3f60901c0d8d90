"""Labels spread among neighbours: a model's predictions follow the samples' own clusters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError

_CHUNK = 1024  # rows whose similarities to all samples are in memory together


@torch.no_grad()
def spread_labels(
    samples: Tensor, probabilities: Tensor, *, neighbours: int = 10, share: float = 0.95, steps: int = 30
) -> Tensor:
    """Class of every sample after its prediction spread among its nearest neighbours.

    1. Scale the probabilities until all classes are equally frequent (`equally_frequent`).

    2. Spread them (`spread`).

    3. Scale them again; each sample takes its most probable class.

    A model that is hardly better than guessing predicts few classes, and those everywhere. Scaled, what is left of the
    difference between samples counts; spread, the samples of a cluster agree.

    Args:
        samples: (n, d). A sample's neighbours are those of largest cosine.
        probabilities: (n, C), each row a softmax.
        neighbours: k.
        share: α, see `spread`.
        steps: see `spread`.

    Returns:
        (n,) int64, on the device of the samples.

    Raises:
        UserError: there is no sample, or the numbers of rows differ.

    Example:
        >>> samples = torch.tensor([[9.0, 0.0], [8.0, 1.0], [7.0, 2.0], [0.0, 5.0], [1.0, 6.0]])
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [0.4, 0.6]])
        >>> spread_labels(samples, probabilities, neighbours=1)
        tensor([0, 0, 0, 1, 1])
    """
    if samples.dim() != 2 or probabilities.dim() != 2 or len(samples) != len(probabilities) or not len(samples):
        raise UserError(
            f"labels spread among samples (n, d) with probabilities (n, C), found {tuple(samples.shape)} and "
            f"{tuple(probabilities.shape)}"
        )
    near, similarity = nearest_neighbours(samples, neighbours)
    before = equally_frequent(probabilities.cpu().double())
    after = spread(before, near.cpu(), similarity.cpu().double(), share, steps)
    return equally_frequent(after).argmax(1).to(samples.device)


def nearest_neighbours(samples: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The other samples of largest cosine, (n, k) int64, and their cosines, (n, k); k is at most n − 1.

    The time grows with the square of the samples, the memory with their number.

    Example:
        >>> nearest_neighbours(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), 1)[0].T
        tensor([[1, 0, 0]])
    """
    directions = functional.normalize(samples)
    number = min(number, len(samples) - 1)
    near, cosines = [], []
    for begin in range(0, len(samples), _CHUNK):
        part = directions[begin : begin + _CHUNK] @ directions.T
        part.diagonal(begin).fill_(-2)  # a sample is not its own neighbour
        best = part.topk(number, dim=1)
        near.append(best.indices)
        cosines.append(best.values)
    return torch.cat(near), torch.cat(cosines)


def spread(probabilities: Tensor, near: Tensor, cosines: Tensor, share: float = 0.95, steps: int = 30) -> Tensor:
    """``Z ← α·S·Z + (1 − α)·P`` from Z = P, ``steps`` times; rows then sum to 1 (Zhou et al., NIPS 2003).

    S = D^(−½)·(W + Wᵀ)·D^(−½). W has the cubes of the cosines of each sample with its neighbours (Iscen et al., CVPR
    2019), 0 where they are negative, and D the sums of the rows of W + Wᵀ. A sample without neighbours keeps its row.

    Args:
        probabilities: P, (n, C).
        near: neighbours of each sample, (n, k) int64.
        cosines: with these neighbours, (n, k).
        share: α in [0, 1), what a sample takes from its neighbours.
        steps: a prediction reaches samples that are at most so many neighbours away.

    Example:
        >>> near = torch.tensor([[1], [0], [0]])
        >>> spread(torch.eye(3).double(), near, torch.ones(3, 1).double(), share=0.5, steps=1)[1].round(decimals=3)
        tensor([0.4490, 0.5510, 0.0000], dtype=torch.float64)
    """
    weights = cosines.clamp(min=0) ** 3
    degrees = weights.sum(1).index_add(0, near.flatten(), weights.flatten())
    roots = degrees.clamp(min=torch.finfo(degrees.dtype).tiny).rsqrt()
    scaled = weights * roots[:, None] * roots[near]
    result = probabilities
    for _ in range(steps):
        taken = torch.zeros_like(result)
        for others, part in zip(near.T, scaled.T.unsqueeze(2), strict=True):
            taken += part * result[others]
            taken.index_add_(0, others, part * result)
        result = share * taken + (1 - share) * probabilities
    return result / result.sum(1, keepdim=True)


def equally_frequent(probabilities: Tensor, steps: int = 20) -> Tensor:
    """Probabilities scaled, class by class and row by row in turn, until all classes are equally frequent.

    Classes that no row gives a probability stay without one. This is Sinkhorn's iteration.

    Args:
        probabilities: (n, C), rows that sum to 1.
        steps: how often both are scaled; rows come last.

    Example:
        >>> rows = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> equally_frequent(rows).round(decimals=2)
        tensor([[0.6000, 0.4000],
                [0.4000, 0.6000]])
    """
    result, tiny = probabilities, torch.finfo(probabilities.dtype).tiny
    for _ in range(steps):
        result = result / result.sum(0).clamp(min=tiny)
        result = result / result.sum(1, keepdim=True)
    return result
