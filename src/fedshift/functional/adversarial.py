"""Adversarial alignment: losses of a domain classifier that the features learn to fool.

Used by DANN's gradient reversal, FADA, MDAN, CMSS and CDAN. The domain classifier D answers in logits; a positive logit
means "source". All losses are in nats.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


def reverse_gradient(features: Tensor, strength: float = 1.0) -> Tensor:
    """Return the features unchanged; multiply gradients that pass backwards by ``−strength``.

    Source: DANN (Ganin et al., JMLR 2016).

    Args:
        features: any shape. The result shares memory with it.
        strength: the factor of the reversed gradient.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> reverse_gradient(x, 0.5).sum().backward()
        >>> x.grad
        tensor([-0.5000, -0.5000])
    """
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
    """Loss of the domain classifier, ``−E log D(s) − E log(1 − D(t))``, a scalar.

    It is 2 ln 2 where D answers ½ on both sides. Source: FADA (Peng et al., ICLR 2020); also d_k of MDAN.

    Args:
        source_logits: (n,) or (n, 1).
        target_logits: (m,) or (m, 1).

    Raises:
        UserError: one side is empty.

    Example:
        >>> domain_identifier_loss(torch.zeros(3), torch.zeros(2))
        tensor(1.3863)
    """
    return _surprise(source_logits).mean() + _surprise(-target_logits).mean()


def generator_loss(source_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Loss of both feature generators while D is fixed, ``−E log D(s) − E log D(t)``, a scalar.

    Source: FADA (Peng et al., ICLR 2020).

    Args:
        source_logits: (n,) or (n, 1).
        target_logits: (m,) or (m, 1).

    Raises:
        UserError: one side is empty.

    Example:
        >>> generator_loss(torch.zeros(3), torch.zeros(2))
        tensor(1.3863)
    """
    return _surprise(source_logits).mean() + _surprise(target_logits).mean()


def weighted_adversarial_loss(source_logits: Tensor, target_logits: Tensor, weights: Tensor) -> Tensor:
    """Domain loss with weighted source samples, ``−E_s w·log D(s) − E_t log(1 − D(t))``, a scalar.

    D minimises it. Features and the curriculum network maximise it: pass both through `reverse_gradient`. Source: CMSS
    (Yang et al., ECCV 2020).

    Args:
        source_logits: (n,) or (n, 1).
        target_logits: (m,) or (m, 1).
        weights: one per source sample, in the shape of ``source_logits``; see `curriculum_weights`.

    Raises:
        UserError: one side is empty, or weights and source logits differ in shape.

    Example:
        >>> weighted_adversarial_loss(torch.zeros(2), torch.zeros(1), torch.tensor([2.0, 0.0]))
        tensor(1.3863)
    """
    if weights.shape != source_logits.shape:
        raise UserError(
            f"the adversarial loss needs one weight per source sample, found weights {tuple(weights.shape)} for "
            f"logits {tuple(source_logits.shape)}"
        )
    return (weights * _surprise(source_logits)).mean() + _surprise(-target_logits).mean()


def curriculum_weights(scores: Tensor) -> Tensor:
    """Weights of the N samples of a source batch, ``w = N·softmax(scores)``; their mean is 1.

    Source: CMSS (Yang et al., ECCV 2020). Differentiable.

    Args:
        scores: (n,) or (n, 1).

    Returns:
        One weight per sample, in the shape of ``scores``.

    Example:
        >>> curriculum_weights(torch.tensor([0.0, 0.0, 0.0])).round(decimals=4)
        tensor([1., 1., 1.])
    """
    return scores.numel() * scores.flatten().softmax(0).view_as(scores)


def combine_domains(
    source_losses: Tensor,
    domain_losses: Tensor,
    mu: float = 1e-2,
    gamma: float = 10.0,
    rule: Literal["dynamic", "hard", "maxmin"] = "dynamic",
) -> Tensor:
    """Combine the source sites' errors ℓ_k and domain losses d_k into one scalar loss.

    Source: MDAN (Zhao et al., NeurIPS 2018). The features behind d_k pass through `reverse_gradient`.

    Args:
        source_losses: ℓ_k, (K,).
        domain_losses: d_k, (K,).
        mu: weight of the domain losses.
        gamma: sharpness of the dynamic rule, above 0.
        rule: ``"dynamic"`` is ``1/γ · log Σ_k exp(γ(ℓ_k + μ d_k))``; its gradient weights sites by the softmax of
            ``γ(ℓ_k + μ d_k)``. ``"hard"`` is ``max_k (ℓ_k + μ d_k)``, its limit for large γ and the paper's hard
            version. ``"maxmin"`` is ``max_k ℓ_k + μ · min_k d_k``, the hard version of the released code.

    Raises:
        UserError: there is no site, the shapes differ, or γ is not positive.

    Example:
        >>> combine_domains(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), mu=0.1, rule="maxmin")
        tensor(2.3000)
    """
    if source_losses.dim() != 1 or source_losses.shape != domain_losses.shape or not len(source_losses):
        raise UserError(
            f"MDAN needs one source loss and one domain loss per source site, found {tuple(source_losses.shape)} and "
            f"{tuple(domain_losses.shape)}"
        )
    if rule == "maxmin":
        return source_losses.max() + mu * domain_losses.min()
    if rule == "hard":
        return (source_losses + mu * domain_losses).max()
    if not gamma > 0:
        raise UserError(f"gamma must be positive, found {gamma}")
    return (gamma * (source_losses + mu * domain_losses)).logsumexp(0) / gamma


def condition(features: Tensor, probabilities: Tensor, projections: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Condition features on predictions: the outer product ``p ⊗ f``, flattened.

    Source: CDAN (Long et al., NeurIPS 2018).

    Args:
        features: f, (n, d).
        probabilities: p, (n, C).
        projections: random matrices R_f (d, m) and R_p (C, m). With them the result is ``(f R_f ⊙ p R_p)/√m`` instead.

    Returns:
        (n, C·d), or (n, m) with projections.

    Example:
        >>> condition(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.75]]))
        tensor([[0.2500, 0.5000, 0.7500, 1.5000]])
    """
    if projections is None:
        return (probabilities[:, :, None] * features[:, None, :]).flatten(1)
    of_features, of_predictions = projections
    projected: Tensor = (features @ of_features) * (probabilities @ of_predictions) / math.sqrt(of_features.shape[1])
    return projected


def certainty_weights(entropies: Tensor) -> Tensor:
    """Weight each sample by its certainty: ``1 + e^(−H)``, divided by the sum over the batch.

    Before the division the weight is 2 for a certain prediction and 1 + 1/C for a uniform one. Source: CDAN+E (Long et
    al., NeurIPS 2018).

    Args:
        entropies: H of each sample's prediction, (n,), in nats.

    Returns:
        (n,), which sums to 1. The sum is constant for back-propagation.

    Example:
        >>> certainty_weights(torch.tensor([0.0, 0.6931]))  # certain; two classes at 0.5
        tensor([0.5714, 0.4286])
    """
    weights = 1 + (-entropies).exp()
    return weights / weights.sum().detach()


def conditional_adversarial_loss(
    source_logits: Tensor, target_logits: Tensor, source_weights: Tensor, target_weights: Tensor
) -> Tensor:
    """Domain loss with weights on both sides, ``−½ Σ_s w·log D(s) − ½ Σ_t w·log(1 − D(t))``, a scalar.

    It is ln 2 where D answers ½. Source: CDAN (Long et al., NeurIPS 2018).

    Args:
        source_logits: (n, 1).
        target_logits: (m, 1).
        source_weights: (n,), which sum to 1.
        target_weights: (m,), which sum to 1.

    Raises:
        UserError: one side is empty.

    Example:
        >>> half = torch.tensor([0.5, 0.5])
        >>> conditional_adversarial_loss(torch.zeros(2, 1), torch.zeros(2, 1), half, half)
        tensor(0.6931)
    """
    source, target = _surprise(source_logits).flatten(), _surprise(-target_logits).flatten()
    return ((source_weights * source).sum() + (target_weights * target).sum()) / 2


def _surprise(logits: Tensor) -> Tensor:
    """``−log sigmoid(logits)`` of each sample."""
    if not logits.numel():
        raise UserError("the adversarial loss needs at least one sample of each domain")
    return -functional.logsigmoid(logits)
