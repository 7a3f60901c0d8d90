"""What several teachers agree on and how a student learns it (KD3A: Feng et al., ICML 2021; section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError

Ballots = Literal["rows", "top1"]

UNSUPPORTED = 0.001
"""The weight n_p of a sample on which no teacher has a say."""


@dataclass(frozen=True)
class Consensus:
    """The teachers' common answer for n samples.

    probabilities: (n, C), rows that sum to 1. support: (n,), the number n_p of teachers behind each row, or 0.001 for
    none. labels: (n,) class indices, the winners of the vote.
    """

    probabilities: Tensor
    support: Tensor
    labels: Tensor


def knowledge_vote(predictions: Tensor, gate: float, *, ballots: Ballots = "rows") -> Consensus:
    """Mean prediction and number of the teachers that are confident and agree, for every sample (KD3A, section 7.1).

    Teachers whose highest probability is above ``gate`` vote for a class; the mean is over those of them whose own
    class won. Where none is left (nobody passes the gate, or the sum elects a class that is nobody's first) it is over
    all teachers, with support 0.001. Where nobody passes the gate everyone votes. The first of equal classes wins.

    predictions: (K, n, C), each teacher's probabilities. gate: g, at least 0 and below 1.
    ballots: what a voter adds, ``"rows"`` its whole row (paper), ``"top1"`` its highest probability to that class alone
        (released code, 7.4.3).
    Raises UserError for other shapes, K = 0 or C = 0, and for an impossible gate.
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
    """The mean of all teachers, each sample with support 1: KD3A without its vote (section 7.5).

    predictions: (K, n, C). Raises UserError for other shapes, K = 0 or C = 0.
    """
    check_predictions(predictions)
    probabilities = predictions.mean(0)
    return Consensus(probabilities, probabilities.new_ones(len(probabilities)), probabilities.argmax(1))


def released_labels(consensus: Consensus) -> tuple[Tensor, Tensor]:
    """The released code's targets: one-hot winners (n, C) and weights (n,), 1 where a teacher supports them, else 0.

    They take the place of probabilities and support in `mixup` and `distillation_loss` (section 7.4.1, 7.4.2).
    """
    probabilities = consensus.probabilities
    hard = torch.zeros_like(probabilities).scatter_(1, consensus.labels[:, None], 1)
    return hard, (consensus.support >= 1).to(probabilities.dtype)


def distillation_loss(logits: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """``n_p · KL(p ‖ softmax(logits))``, mean over the batch, in nats; 0·log 0 = 0 (KD3A, section 7.1, step 3).

    For one-hot p it is the cross-entropy; for mixed one-hot p it is less than that by their entropy, with the same
    gradient (7.4.11).

    logits, probabilities: (b, C). support: (b,). Raises UserError for other shapes.
    """
    if logits.dim() != 2 or logits.shape != probabilities.shape or support.shape != logits.shape[:1]:
        raise UserError(
            f"distillation needs logits and probabilities (b, C) and support (b,), found {tuple(logits.shape)}, "
            f"{tuple(probabilities.shape)} and {tuple(support.shape)}"
        )
    divergence = functional.kl_div(logits.log_softmax(1), probabilities, reduction="none").sum(1)
    return (support * divergence).mean()


def mixup(inputs: Tensor, probabilities: Tensor, lam: float, permutation: Tensor) -> tuple[Tensor, Tensor]:
    """``λx + (1−λ)x_π`` and ``λp + (1−λ)p_π``; KD3A leaves the support as it is (section 7.1, 7.4.10).

    inputs: (b, …), floats. probabilities: (b, C). permutation: π, (b,) indices.
    """
    return (
        torch.lerp(inputs[permutation], inputs, lam),
        torch.lerp(probabilities[permutation], probabilities, lam),
    )


def check_predictions(predictions: Tensor, gate: float = 0.0) -> None:
    """Raise UserError unless predictions are (K, n, C) with K and C at least 1 and ``0 ≤ gate < 1``."""
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
