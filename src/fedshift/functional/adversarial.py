"""Adversarial alignment: losses of a domain classifier that the features learn to fool.

Used by DANN's gradient reversal, FADA, MDAN, CMSS and CDAN. The domain classifier D answers in logits; a positive logit
means "source". All losses are in nats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


def reverse_gradient(features: Tensor, strength: float = 1.0) -> Tensor:
    """Return the features unchanged; multiply gradients that pass backwards by ``−strength``.

    Source: DANN (Ganin et al., JMLR 2016).

    ``features``: any shape. The result shares memory with it. ``strength``: the factor of the reversed gradient.

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

    ``source_logits``: (n,) or (n, 1). ``target_logits``: (m,) or (m, 1). Raises UserError: one side is empty.

    Example:
        >>> domain_identifier_loss(torch.zeros(3), torch.zeros(2))
        tensor(1.3863)
    """
    return _surprise(source_logits).mean() + _surprise(-target_logits).mean()


def _surprise(logits: Tensor) -> Tensor:
    """``−log sigmoid(logits)`` of each sample."""
    if not logits.numel():
        raise UserError("the adversarial loss needs at least one sample of each domain")
    return -functional.logsigmoid(logits)
