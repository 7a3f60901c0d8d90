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


def hard_negative_triplet_loss(
    queries: Tensor, labels: Tensor, keys: Tensor, key_labels: Tensor, margin: float, number: int
) -> Tensor:
    """Mean of ``max(0, ‖q − p‖² − ‖q − n‖² + ξ)``, p the farthest key of the query's class.

    n is each of the k nearest keys of other classes.

    Source: EISNet (Wang et al., ECCV 2020, equation 4: triplets with K-hard negatives).

    Args:
        queries: (n, d).
        labels: (n,).
        keys: (m, d).
        key_labels: (m,).
        margin: ξ.
        number: k; all others where there are fewer.

    Returns:
        A scalar; 0 where no query has both a positive and a negative.

    Example:
        >>> keys, labels = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1])
        >>> hard_negative_triplet_loss(torch.tensor([[0.0]]), torch.tensor([0]), keys, labels, margin=2.0, number=2)
        tensor(0.)
        >>> hard_negative_triplet_loss(torch.tensor([[0.0]]), torch.tensor([0]), keys, labels, margin=4.0, number=2)
        tensor(0.5000)
    """
    distances = squared_distances(queries, keys)
    same = labels[:, None] == key_labels[None]
    with torch.no_grad():
        farthest, positive = distances.where(same, -torch.inf).max(1, keepdim=True)
        nearest, chosen = distances.where(~same, torch.inf).topk(min(number, len(keys)), largest=False, sorted=False)
        usable = (farthest != -torch.inf) & (nearest != torch.inf)
    losses = (distances.gather(1, positive) - distances.gather(1, chosen) + margin).clamp_min(0)
    return losses.where(usable, 0).sum() / usable.sum().clamp_min(1)


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
