"""What a teacher hands to a student: softened probabilities and averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def softened_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """``KL(softmax(z_T/τ) ‖ softmax(z_S/τ))``, the mean over rows, in nats.

    Source: Hinton, Vinyals, Dean (2015); with τ = 10 FACT's co-teacher (Xu et al., CVPR 2021, equation 6).

    Args:
        teacher: z_T, (n, C).
        student: z_S, (n, C).
        temperature: τ.

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


def spread_of_predictions(scores: Sequence[Tensor]) -> Tensor:
    """``1/V Σ_v KL(p_v ‖ p̄)`` with p̄ the mean of the p_v: the Jensen–Shannon divergence, the mean over rows, in nats.

    Source: AugMix (Hendrycks et al., ICLR 2020, equation 3), as FedCCRL has it. p̄ is at least 1e-7.

    Args:
        scores: of each version v, whose softmax is p_v, (n, C) each.

    Example:
        >>> spread_of_predictions([torch.tensor([[99.0, 0.0]]), torch.tensor([[0.0, 99.0]])])  # ln 2
        tensor(0.6931)
    """
    logs = torch.stack(list(scores)).log_softmax(2)  # of probabilities that round to 0, too
    each = logs.exp()
    return (each * (logs - each.mean(0).clamp(1e-7, 1).log())).sum(2).mean()


def move_towards(average: Iterable[Tensor], values: Iterable[Tensor], momentum: float) -> None:
    """``θ̄ ← m·θ̄ + (1 − m)·θ``, in place: a mean teacher, a momentum encoder.

    Sources: Tarvainen & Valpola (NeurIPS 2017); MoCo (He et al., CVPR 2020).

    Args:
        average: θ̄; integers are copied.
        values: θ, in the same order.
        momentum: m.

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


def other_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """Each row's scores of the classes that are not its own, in their order: FedNTD's not-true classes.

    Source: Lee et al., NeurIPS 2022.

    Args:
        scores: (n, C).
        labels: (n,) class numbers.

    Returns:
        (n, C − 1).

    Example:
        >>> other_scores(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([1, 0]))
        tensor([[1., 3.],
                [5., 6.]])
    """
    others = torch.arange(scores.shape[1], device=scores.device) != labels[:, None]
    return scores[others].view(len(scores), -1)
