"""How far a model that was trained without labels keeps what the model before it was sure of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.label_spreading import equally_frequent


@torch.no_grad()
def kept_answers(before: Tensor, after: Tensor, surest: float = 0.25) -> float:
    """Share of a model's surest answers that another model gives, too.

    1. Scale ``before`` until all classes are equally frequent (`equally_frequent`).

    2. Of the samples take those whose largest probability is then largest, ``surest`` of them.

    3. On these, count how often ``after`` names the same class.

    Two models that differ on a share d of samples differ by at most d in accuracy there, the triangle inequality
    behind bounds of adaptation (Ben-David et al., Machine Learning 2010). And where a model is surest it is right more
    often than elsewhere. So what is trained without labels may change unsure answers, but a model that changes most of
    the sure ones has left the classes which the labels gave. Scaling matters where ``before`` names few classes: it is
    then surest of those, everywhere.

    Args:
        before: (n, C), probabilities of the model before, each row a softmax.
        after: (n, C), probabilities or logits of the other model for the same samples.
        surest: in (0, 1]; the number of samples is rounded up.

    Returns:
        Between 0 and 1.

    Raises:
        UserError: there is no sample, or the shapes differ.

    Example:
        >>> before = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.1, 0.9]])
        >>> after = torch.tensor([[0.8, 0.2], [0.1, 0.9], [0.9, 0.1], [0.7, 0.3]])
        >>> kept_answers(before, after, surest=0.5)  # sure of the first and the last; the last changed
        0.5
    """
    if before.dim() != 2 or before.shape != after.shape or not before.numel():
        raise UserError(
            f"kept answers need two models' predictions (n, C) of the same samples, found {tuple(before.shape)} and "
            f"{tuple(after.shape)}"
        )
    sureness, classes = equally_frequent(before.cpu().double()).max(1)
    order = sureness.argsort(descending=True, stable=True)[: math.ceil(surest * len(before))]
    return (classes == after.cpu().argmax(1))[order].double().mean().item()
