"""KD3A's knowledge vote: what several teachers agree on, and how a student learns it (Feng et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError

Ballots = Literal["rows", "top1"]

UNSUPPORTED = 0.001
"""Support n_p of a sample that no teacher supports."""


@dataclass(frozen=True)
class Consensus:
    """The teachers' common answer for n samples.

    Attributes:
        probabilities: (n, C), rows that sum to 1.
        support: the number n_p of teachers behind each row, (n,); 0.001 where there is none.
        labels: winners of the vote, (n,) class numbers.
    """

    probabilities: Tensor
    support: Tensor
    labels: Tensor


def knowledge_vote(predictions: Tensor, gate: float, *, ballots: Ballots = "rows") -> Consensus:
    """Mean prediction and number of the teachers that are confident and agree, for every sample (KD3A, eq. 3 to 5).

    A teacher passes the gate if its highest probability is above ``gate``. Teachers that pass vote for a class. The
    result is the mean over those of them whose own first class won.

    If none is left, the result is the mean over all teachers with support 0.001. This happens if no teacher passes the
    gate, or if the sum elects a class that is no teacher's first. If no teacher passes, all vote. The first of equal
    classes wins.

    Args:
        predictions: each teacher's probabilities, (K, n, C).
        gate: g, at least 0 and below 1.
        ballots: what a voter adds. ``"rows"``: its whole row (paper). ``"top1"``: its highest probability, to that
            class alone (released code).

    Raises:
        UserError: other shapes, K = 0 or C = 0, or an impossible gate.

    Example:
        >>> teachers = torch.tensor([[[0.95, 0.03, 0.02]], [[0.92, 0.05, 0.03]], [[0.02, 0.96, 0.02]]])
        >>> found = knowledge_vote(teachers, gate=0.9)
        >>> found.probabilities, found.support, found.labels
        (tensor([[0.9350, 0.0400, 0.0250]]), tensor([2.]), tensor([0]))
    """
    check_predictions(predictions, gate)
    confidence, choice = predictions.max(2)
    passing = confidence > gate
    voting = passing | ~passing.any(0)
    if ballots == "rows":
        votes = _masked_sum(predictions, voting)
    else:
        votes = predictions.new_zeros(predictions.shape[1:]).scatter_add_(1, choice.T, (confidence * voting).T)
    labels = votes.argmax(1)
    agreeing = passing & (choice == labels)
    count = agreeing.sum(0)
    averaged = agreeing | (count == 0)
    probabilities = _masked_sum(predictions, averaged) / averaged.sum(0)[:, None]
    support = count.to(predictions.dtype)
    return Consensus(probabilities, support.masked_fill_(count == 0, UNSUPPORTED), labels)


def mean_ensemble(predictions: Tensor) -> Consensus:
    """The mean of all teachers, each sample with support 1: KD3A without its vote (ablation of the paper's Figure 3).

    Args:
        predictions: (K, n, C).

    Raises:
        UserError: other shapes, K = 0 or C = 0.

    Example:
        >>> mean_ensemble(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])).probabilities
        tensor([[0.7500, 0.2500]])
    """
    check_predictions(predictions)
    probabilities = predictions.mean(0)
    return Consensus(probabilities, probabilities.new_ones(len(probabilities)), probabilities.argmax(1))


def released_labels(consensus: Consensus) -> tuple[Tensor, Tensor]:
    """Targets of KD3A's released code. They replace probabilities and support in `mixup` and `distillation_loss`.

    Args:
        consensus: a result of `knowledge_vote`.

    Returns:
        One-hot winners (n, C), and weights (n,): 1 where a teacher supports the winner, else 0.

    Example:
        >>> released_labels(knowledge_vote(torch.tensor([[[0.7, 0.3]], [[0.9, 0.1]]]), gate=0.8))
        (tensor([[1., 0.]]), tensor([1.]))
    """
    probabilities = consensus.probabilities
    hard = torch.zeros_like(probabilities).scatter_(1, consensus.labels[:, None], 1)
    return hard, (consensus.support >= 1).to(probabilities.dtype)


def distillation_loss(logits: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Distillation ``n_p · KL(p ‖ softmax(logits))``, mean over the batch, in nats (KD3A, equation 6).

    0·log 0 counts as 0. For one-hot p it is the cross-entropy. For mixed one-hot p, as in the released code, it is
    lower than the cross-entropy by the labels' entropy, with the same gradient.

    Args:
        logits: (b, C).
        probabilities: p, (b, C).
        support: n_p, (b,).

    Raises:
        UserError: other shapes.

    Example:
        >>> logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> distillation_loss(logits, torch.tensor([[0.935, 0.04, 0.025]]), torch.tensor([2.0]))
        tensor(0.3432)
    """
    if logits.dim() != 2 or logits.shape != probabilities.shape or support.shape != logits.shape[:1]:
        raise UserError(
            f"distillation needs logits and probabilities (b, C) and support (b,), found {tuple(logits.shape)}, "
            f"{tuple(probabilities.shape)} and {tuple(support.shape)}"
        )
    divergence = functional.kl_div(logits.log_softmax(1), probabilities, reduction="none").sum(1)
    return (support * divergence).mean()


def mixup(inputs: Tensor, probabilities: Tensor, lam: float, permutation: Tensor) -> tuple[Tensor, Tensor]:
    """Mix pairs of samples, ``λx + (1−λ)x_π`` and ``λp + (1−λ)p_π``. KD3A leaves the support unmixed.

    Source: mixup (Zhang et al., ICLR 2018), as in KD3A.

    Args:
        inputs: x, (b, …), floats.
        probabilities: p, (b, C).
        lam: λ.
        permutation: π, (b,) indices.

    Example:
        >>> mixup(torch.tensor([[0.0], [1.0]]), torch.eye(2), 0.75, torch.tensor([1, 0]))
        (tensor([[0.2500],
                [0.7500]]), tensor([[0.7500, 0.2500],
                [0.2500, 0.7500]]))
    """
    return (
        torch.lerp(inputs[permutation], inputs, lam),
        torch.lerp(probabilities[permutation], probabilities, lam),
    )


def check_predictions(predictions: Tensor, gate: float = 0.0) -> None:
    """Raise UserError unless predictions are (K, n, C) with K and C at least 1 and ``0 ≤ gate < 1``.

    Example:
        >>> check_predictions(torch.full((3, 8, 2), 0.5), gate=0.9)
    """
    if predictions.dim() != 3 or 0 in (predictions.shape[0], predictions.shape[2]):
        raise UserError(
            f"teachers' predictions must be (teachers, samples, classes) with at least one teacher and class, found "
            f"{tuple(predictions.shape)}"
        )
    if not 0 <= gate < 1:
        raise UserError(f"the confidence gate must be at least 0 and below 1, found {gate}")


def _masked_sum(predictions: Tensor, mask: Tensor) -> Tensor:
    """The sum of those teachers' rows that ``mask`` (K, n) keeps: (n, C)."""
    return torch.einsum("kn,knc->nc", mask.to(predictions.dtype), predictions)
