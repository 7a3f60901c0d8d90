"""Domains told apart by a classifier that the features learn to fool: gradient reversal, FADA, MDAN, CMSS and CDAN.

The domain classifier D answers in logits; a positive one means "source". All losses are in nats.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


def reverse_gradient(features: Tensor, strength: float = 1.0) -> Tensor:
    """``features`` as they are; gradients that pass backwards are multiplied by ``−strength`` (DANN, Ganin et al., JMLR
    2016). Any shape. The result shares memory with ``features``."""
    reversed_features: Tensor = _ReverseGradient.apply(features, strength)
    return reversed_features


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def domain_identifier_loss(source_logits: Tensor, target_logits: Tensor) -> Tensor:
    """``−E log D(s) − E log(1 − D(t))``, a scalar that the domain identifier minimises (FADA, Peng et al., ICLR
    2020; MDAN's d_k).

    source_logits, target_logits: (n,) or (n, 1), (m,) or (m, 1). At D = ½ on both sides it is 2 ln 2. Raises UserError
    when one side is empty.
    """
    return _surprise(source_logits).mean() + _surprise(-target_logits).mean()


def generator_loss(source_logits: Tensor, target_logits: Tensor) -> Tensor:
    """``−E log D(s) − E log D(t)``, a scalar that both feature generators minimise, the identifier fixed (FADA).
    Shapes and errors as `domain_identifier_loss`."""
    return _surprise(source_logits).mean() + _surprise(target_logits).mean()


def weighted_adversarial_loss(source_logits: Tensor, target_logits: Tensor, weights: Tensor) -> Tensor:
    """``−E_s w·log D(s) − E_t log(1 − D(t))``, a scalar (CMSS, Yang et al., ECCV 2020).

    D minimises it; features and curriculum network maximise it: pass both through `reverse_gradient`.
    weights: one per source sample, shaped as ``source_logits``; from `curriculum_weights`. Other shapes and errors as
    `domain_identifier_loss`; also UserError when weights and source logits differ in shape.
    """
    if weights.shape != source_logits.shape:
        raise UserError(
            f"the adversarial loss needs one weight per source sample, found weights {tuple(weights.shape)} for "
            f"logits {tuple(source_logits.shape)}"
        )
    return (weights * _surprise(source_logits)).mean() + _surprise(-target_logits).mean()


def curriculum_weights(scores: Tensor) -> Tensor:
    """``w = N·softmax(scores)`` over the N samples of a source batch, with mean 1 (CMSS).

    scores: (n,) or (n, 1), of which the result has the shape. Differentiable. Equal scores give ones.
    """
    return scores.numel() * scores.flatten().softmax(0).view_as(scores)


def combine_domains(
    source_losses: Tensor,
    domain_losses: Tensor,
    mu: float = 1e-2,
    gamma: float = 10.0,
    rule: Literal["dynamic", "maxmin"] = "dynamic",
) -> Tensor:
    """One loss, a scalar, from the source sites' errors ℓ_k and domain losses d_k (MDAN, Zhao et al., NeurIPS 2018).

    source_losses, domain_losses: (K,), each. The features behind d_k pass through `reverse_gradient`.
    rule: ``"dynamic"`` ``1/γ · log Σ_k exp(γ(ℓ_k + μ d_k))``, whose gradient weights sites by the softmax of ``γ(ℓ_k +
        μ d_k)``; ``"maxmin"`` ``max_k ℓ_k + μ · min_k d_k``, the released code's hard version, where one site counts.
    Raises UserError when there is no site, the shapes differ, or γ is not positive.
    """
    if source_losses.dim() != 1 or source_losses.shape != domain_losses.shape or not len(source_losses):
        raise UserError(
            f"MDAN needs one source loss and one domain loss per source site, found {tuple(source_losses.shape)} and "
            f"{tuple(domain_losses.shape)}"
        )
    if rule == "maxmin":
        return source_losses.max() + mu * domain_losses.min()
    if not gamma > 0:
        raise UserError(f"gamma must be positive, found {gamma}")
    return (gamma * (source_losses + mu * domain_losses)).logsumexp(0) / gamma


def conditioned(features: Tensor, probabilities: Tensor, projections: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Features conditioned on predictions, ``p ⊗ f`` flattened: (n, d), (n, C) → (n, C·d) (CDAN, Long et al., NeurIPS
    2018).

    projections: random matrices R_f (d, m) and R_p (C, m) for ``(f R_f ⊙ p R_p)/√m`` (n, m) in its place.
    """
    if projections is None:
        return (probabilities[:, :, None] * features[:, None, :]).flatten(1)
    of_features, of_predictions = projections
    projected: Tensor = (features @ of_features) * (probabilities @ of_predictions) / math.sqrt(of_features.shape[1])
    return projected


def certainty_weights(entropies: Tensor) -> Tensor:
    """``1 + e^(−H)`` of each sample, divided by their sum: (n,) → (n,), which sums to 1 (CDAN+E).

    1 + e^(−H) is 2 for a certain prediction, 1 + 1/C for one that knows nothing.
    """
    weights = 1 + (-entropies).exp()
    return weights / weights.sum().detach()


def conditional_adversarial_loss(
    source_logits: Tensor, target_logits: Tensor, source_weights: Tensor, target_weights: Tensor
) -> Tensor:
    """``−½ Σ_s w·log D(s) − ½ Σ_t w·log(1 − D(t))``, a scalar; weights of each side sum to 1 (CDAN).

    source_logits, target_logits: (n, 1), (m, 1). source_weights, target_weights: (n,), (m,). ln 2 at D = ½. Errors as
    `domain_identifier_loss`.
    """
    source, target = _surprise(source_logits).flatten(), _surprise(-target_logits).flatten()
    return ((source_weights * source).sum() + (target_weights * target).sum()) / 2


def _surprise(logits: Tensor) -> Tensor:
    """``−log sigmoid(logits)`` of each sample."""
    if not logits.numel():
        raise UserError("the adversarial loss needs at least one sample of each domain")
    return -functional.logsigmoid(logits)
