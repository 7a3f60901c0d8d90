"""Classifiers of templates, which a new site turns towards the features of its own samples, without labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.functional.losses import entropy_of_logits


@torch.no_grad()
def turned_templates(templates: Tensor, logits: Tensor, features: Tensor, prior: int) -> Tensor:
    """A linear classifier turned towards samples without labels, ``(1 − s)·w_k/‖w_k‖ + s·mean(z_i/‖z_i‖)``, (C, d).

    The mean is over the half of the samples predicted as class k whose prediction has the least entropy, rounded up. A
    class that is never predicted keeps w_k. Every row gets the same norm, the mean norm of the w_k, and there is no
    bias: it says how frequent the classes were where the classifier was trained.

    s = n/(n + N·C) is the same for all classes. Features of all classes have much in common, so a class that turned
    further towards its samples than another would win samples of the other.

    Source: T3A (Iwasawa, Matsuo, NeurIPS 2021), where samples come one by one, w_k counts as one sample of its class,
    and a fixed number of samples is kept for each class.

    Args:
        templates: w_k, the rows of the trained classifier, (C, d).
        logits: what that classifier answers, with its bias, (n, C).
        features: z_i, what it reads, (n, d).
        prior: N, how many samples of its class a trained row counts for.

    Example:
        >>> logits, features = torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 2.0]])
        >>> turned_templates(torch.eye(2), logits, features, prior=0)
        tensor([[0., 1.],
                [0., 1.]])
        >>> turned_templates(torch.eye(2), logits, features, prior=10**6).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    rows, size = functional.normalize(templates), templates.norm(dim=1).mean()
    unit, doubt, predicted = functional.normalize(features), entropy_of_logits(logits), logits.argmax(1)
    share = len(features) / (len(features) + prior * len(rows)) if len(features) else 0.0
    turned = rows.clone()
    for number in sorted(set(predicted.tolist())):
        members = (predicted == number).nonzero()[:, 0]
        surest = members[doubt[members].argsort(stable=True)[: math.ceil(len(members) / 2)]]
        turned[number] = (1 - share) * rows[number] + share * unit[surest].mean(0)
    result: Tensor = size * functional.normalize(turned)
    return result
