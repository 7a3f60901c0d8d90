"""Losses that several methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


def task_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of the task: cross-entropy in nats for classes, Dice loss of the sigmoid for masks.

    ``scores``: logits, (n, C) for classes or (n, C, h, w) for masks. ``targets``: class numbers (n,), or masks (n, C,
    h, w) of 0 and 1.

    Example:
        >>> task_loss(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
    """
    if targets.dim() == 1:
        return functional.cross_entropy(scores, targets)
    return dice_loss(scores.sigmoid(), targets)


def smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.1,
    form: Literal["uniform", "others"] = "uniform",
) -> Tensor:
    """Cross-entropy with smoothed labels, mean over the batch, in nats.

    ``logits``: (n, C). ``labels``: (n,) class numbers. ``smoothing``: α or ε, in [0, 1]. ``form``: ``"uniform"`` has
    targets ``(1−α)·1[c=y] + α/C`` (CSAC, SHOT). ``"others"`` has ``1−ε`` for the label and ``ε/(C−1)`` for every other
    class (FedADG). Raises UserError: ``smoothing`` is outside [0, 1], or ``"others"`` with a single class.

    Example:
        >>> logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> smoothed_cross_entropy(logits, labels, 0.1), smoothed_cross_entropy(logits, labels, 0.0)
        (tensor(0.2269), tensor(0.1269))
    """
    if not 0 <= smoothing <= 1:
        raise UserError(f"label smoothing must be between 0 and 1, found {smoothing}")
    if smoothing == 0:
        return functional.cross_entropy(logits, labels)
    classes = logits.shape[1]
    if form == "others":
        if classes < 2:
            raise UserError("label smoothing over the other classes needs at least two classes")
        # ε/(C−1) on the others is the uniform form with α = εC/(C−1).
        smoothing = smoothing * classes / (classes - 1)
    log_probabilities = logits.log_softmax(1)
    plain = functional.nll_loss(log_probabilities, labels)
    return (1 - smoothing) * plain - smoothing * log_probabilities.mean()


def proximal_penalty(parameters: Iterable[tuple[str, Tensor]], reference: Mapping[str, Tensor], mu: float) -> Tensor:
    """FedProx's penalty ``μ/2 · ‖w − w_global‖²``, with gradient ``μ(w − w_global)`` (Li et al., MLSys 2020, eq. 2).

    ``parameters``: ``module.named_parameters()``. Buffers are not pulled. ``reference``: the global model's state dict.
    ``mu``: μ. Raises UserError: there are no parameters, or ``reference`` lacks one.

    Example:
        >>> proximal_penalty([("w", torch.tensor([3.0]))], {"w": torch.tensor([1.0])}, mu=0.5)
        tensor(1.)
    """
    gaps: list[Tensor] = []
    for name, parameter in parameters:
        if name not in reference:
            raise UserError(f"the global model has no parameter '{name}'; do all sites use the same model?")
        gaps.append((parameter - reference[name]).square().sum())
    if not gaps:
        raise UserError("the proximal penalty needs at least one parameter")
    return mu / 2 * torch.stack(gaps).sum()


def entropy(probabilities: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Entropy ``−Σ_c p_c log(p_c + ε)`` of each row, in nats. ε keeps gradients finite (SHOT's released code).

    ``probabilities``: (…, C). ``epsilon``: ε. Returns (…).

    Example:
        >>> entropy(torch.tensor([0.7, 0.2, 0.1]), epsilon=0.0)
        tensor(0.8018)
    """
    return -(probabilities * (probabilities + epsilon).log()).sum(-1)


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy ``−Σ_c p_c log p_c`` of each row's softmax, in nats. Finite for all logits without an ε.

    ``logits``: (…, C). Returns (…).

    Example:
        >>> entropy_of_logits(torch.zeros(4))  # ln 4
        tensor(1.3863)
    """
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def dice_loss(probabilities: Tensor, masks: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Dice loss ``1 − (1/C) Σ_c (2 Σ s·t + ε)/(Σ s + Σ t + ε)``, a scalar (ELCFS).

    The sums run over the whole batch, for each structure c.

    ``probabilities``: s in [0, 1], (n, C, …). ``masks``: t, the same shape. ``epsilon``: ε. Raises UserError: the
    shapes differ.

    Example:
        >>> masks = torch.tensor([1.0, 0.0, 1.0]).view(1, 1, 3)
        >>> dice_loss(torch.tensor([0.8, 0.2, 0.6]).view(1, 1, 3), masks).round(decimals=4)
        tensor(0.2222)
    """
    if probabilities.shape != masks.shape:
        raise UserError(f"predictions {tuple(probabilities.shape)} and masks {tuple(masks.shape)} differ in shape")
    axes = [axis for axis in range(probabilities.dim()) if axis != 1]
    both = (probabilities * masks).sum(axes)
    sizes = probabilities.sum(axes) + masks.sum(axes)
    return 1 - ((2 * both + epsilon) / (sizes + epsilon)).mean()
