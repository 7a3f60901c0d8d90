"""Losses on distances between embeddings: triplets (MASF, EISNet), and classes that confuse alike (MASF)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.errors import UserError


def semi_hard_triplet_loss(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean of ``max(0, ‖a − p‖² − ‖a − n‖² + ξ)`` over all anchors and positives.

    n is the semi-hard negative of a pair: the nearest one that is farther than the positive or, without one, the
    farthest. Source: FaceNet (Schroff et al., CVPR 2015); MASF (Dou et al., NeurIPS 2019, equation 6).

    Args:
        embeddings: (n, d).
        labels: (n,).
        margin: ξ.

    Returns:
        A scalar; 0 where there is no pair of one class, or only one class.

    Example:
        >>> semi_hard_triplet_loss(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 0, 1]), margin=4.0)
        tensor(2.5000)
    """
    distances = squared_distances(embeddings, embeddings)
    same = labels[:, None] == labels[None]
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device) & (~same).any(1, keepdim=True)
    with torch.no_grad():  # every anchor's negatives in order: a binary search finds the first one beyond a positive
        negatives, order = distances.masked_fill(same, torch.inf).sort(1)
        first = torch.searchsorted(negatives, distances.where(pairs, torch.inf), right=True)
        chosen = order.gather(1, first.minimum((~same).sum(1, keepdim=True) - 1).clamp_min(0))
    losses = (distances - distances.gather(1, chosen) + margin).clamp_min(0)
    return losses.where(pairs, 0).sum() / pairs.sum().clamp_min(1)


def momentum_triplet_loss(
    queries: Tensor,
    keys: Tensor,
    labels: Tensor,
    queue: Tensor,
    queue_labels: Tensor,
    margin: float,
    number: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean of ``max(0, ‖q − p‖² − ‖q − n‖² + ξ)`` over the triplets of a batch and a queue of keys.

    A positive pair is a query and the key of a *later* sample of the batch of its class. Its negatives are drawn among
    the `semi_hard` keys of the queue, as often as there are such keys but at most k times, with repetition.

    Source: EISNet (Wang et al., ECCV 2020, equation 4) as its code has it (EmmaW8/EISNet,
    code/utils/anchor_selector.py, KSemihardNegativeTripletSelectorFromMomentum).

    Args:
        queries: (n, d).
        keys: Of the same samples, (n, d).
        labels: (n,).
        queue: Keys of this and of earlier batches, (m, d).
        queue_labels: (m,).
        margin: ξ.
        number: k.
        generator: Draws, on the CPU; None: each semi-hard key once, the expectation of a draw where k is large.

    Returns:
        A scalar; 0 where there is no triplet.

    Example:
        >>> points, queue = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.25], [2.0]])
        >>> momentum_triplet_loss(points, points, torch.tensor([0, 0]), queue, torch.tensor([1, 1]), margin=1.0)
        tensor(0.4375)
    """
    i, j = ((labels[:, None] == labels[None]).triu(1)).nonzero().T
    positive = squared_distances(queries, keys)[i, j][:, None]
    other = squared_distances(queries, queue)[i]
    with torch.no_grad():
        result = semi_hard(positive, other, margin) & (labels[i][:, None] != queue_labels[None])
        times = (
            result.to(other.dtype) if generator is None else drawn_with_repetition(result, number, generator).to(other)
        )
    losses = (positive - other + margin).clamp_min(0)
    return (losses * times).sum() / times.sum().clamp_min(1)


def semi_hard(positive: Tensor, other: Tensor, margin: float) -> Tensor:
    """Which negatives are farther than the positive, but within the margin: ``0 < d_p − d_n + ξ < ξ``.

    Args:
        positive: Squared distances d_p to the positives, (pairs, 1).
        other: Squared distances d_n to all keys, (pairs, m).
        margin: ξ.

    Example:
        >>> semi_hard(torch.tensor([[1.0]]), torch.tensor([[0.5, 1.5, 3.5]]), margin=2.0)
        tensor([[False,  True, False]])
    """
    return (other > positive) & (positive - other + margin > 0)  # not by the gap alone, which may round to the margin


def drawn_with_repetition(allowed: Tensor, number: int | None, generator: torch.Generator) -> Tensor:
    """How often each entry is drawn: in each row as many draws as there are entries, at most ``number``.

    Args:
        allowed: Which entries may be drawn, (rows, m) bool.
        number: The most draws; None: no bound.
        generator: Draws, on the CPU.

    Returns:
        (rows, m), whole numbers.

    Example:
        >>> drawn_with_repetition(torch.tensor([[True, False], [False, False]]), 5, torch.Generator())
        tensor([[1., 0.],
                [0., 0.]])
    """
    chances = allowed.cpu().float()
    sizes = chances.sum(1)
    times = torch.zeros_like(chances)
    rows = sizes.nonzero().flatten()
    draws = sizes if number is None else sizes.clamp_max(number)
    if len(rows):
        most = int(draws.max())
        chosen = torch.multinomial(chances[rows], most, replacement=True, generator=generator)
        counted = (torch.arange(most)[None] < draws[rows][:, None]).float()
        times[rows] = torch.zeros_like(chances[rows]).scatter_add_(1, chosen, counted)
    return times.to(allowed.device)


def squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """``‖a‖² + ‖b‖² − 2a·b`` of every pair, a matrix product: on a processor eight times faster than `torch.cdist`.

    Args:
        left: (n, d).
        right: (m, d).

    Returns:
        (n, m), at least 0.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[25.,  0.]])
    """
    lengths = left.square().sum(1, keepdim=True) + right.square().sum(1)
    return torch.addmm(lengths, left, right.T, alpha=-2).clamp_min(0)


def class_confusion(logits: Tensor, labels: Tensor, classes: int, temperature: float) -> tuple[Tensor, Tensor]:
    """``s_c = softmax(z̄_c / τ)`` with z̄_c the mean logits of class c, and which classes there are.

    Source: MASF (Dou et al., NeurIPS 2019, section 3.2), after Hinton et al.

    Args:
        logits: (n, C).
        labels: (n,).
        classes: C.
        temperature: τ.

    Returns:
        (C, C), whose rows without samples are uniform; (C,) bool.

    Example:
        >>> class_confusion(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]), 2, temperature=1.0)
        (tensor([[0.7311, 0.2689],
                [0.5000, 0.5000]]), tensor([ True, False]))
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise UserError(f"class confusions need logits (n, C) and n labels, found {tuple(logits.shape)}")
    chosen = F.one_hot(labels, classes).to(logits.dtype)
    counts = chosen.sum(0)
    means = chosen.T @ logits / counts.clamp_min(1)[:, None]
    return (means / temperature).softmax(1), counts > 0


def confusion_divergence(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """``1/C Σ_c ½[KL(s_c ‖ s'_c) + KL(s'_c ‖ s_c)]`` over the classes that both domains have.

    Source: MASF (Dou et al., NeurIPS 2019, equation 4). A probability that is rounded to 0 counts in a logarithm as the
    smallest number above 0.

    Args:
        first: What `class_confusion` says of one domain.
        second: Of another one.

    Example:
        >>> one = torch.tensor([[0.8, 0.2], [0.5, 0.5]]), torch.tensor([True, True])
        >>> confusion_divergence(one, one)
        tensor(0.)
    """
    (left, in_left), (right, in_right) = first, second
    both = in_left & in_right
    least = torch.finfo(left.dtype).tiny
    symmetric = ((left - right) * (left.clamp_min(least).log() - right.clamp_min(least).log())).sum(1) / 2
    return torch.where(both, symmetric, 0.0).sum() / len(both)
