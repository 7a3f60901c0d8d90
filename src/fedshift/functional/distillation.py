"""What a teacher hands to a student: softened probabilities and averaged weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def softened_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """``KL(softmax(z_T/τ) ‖ softmax(z_S/τ))``, the mean over rows, in nats.

    Source: Hinton, Vinyals, Dean (2015); with τ = 10 FACT's co-teacher (Xu et al., CVPR 2021, equation 6).

    ``teacher``: z_T, (n, C). ``student``: z_S, (n, C). ``temperature``: τ.

    Example:
        >>> softened_divergence(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]]), temperature=2.0)
        tensor(0.1109)
    """
    return F.kl_div(
        (student / temperature).log_softmax(1),
        (teacher / temperature).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )


def move_towards(average: Iterable[Tensor], values: Iterable[Tensor], momentum: float) -> None:
    """``θ̄ ← m·θ̄ + (1 − m)·θ``, in place: a mean teacher, a momentum encoder.

    Sources: Tarvainen & Valpola (NeurIPS 2017); MoCo (He et al., CVPR 2020).

    ``average``: θ̄; integers are copied. ``values``: θ, in the same order. ``momentum``: m.

    Example:
        >>> kept = torch.tensor([1.0])
        >>> move_towards([kept], [torch.tensor([3.0])], momentum=0.9)
        >>> kept
        tensor([1.2000])
    """
    with torch.no_grad():
        for old, new in zip(average, values, strict=True):
            if old.is_floating_point():
                old.lerp_(new, 1 - momentum)
            else:
                old.copy_(new)
