"""Losses that several methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.functional.segmentation import dice_loss


def task_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of the task: cross-entropy in nats for classes, Dice loss of the sigmoid for masks.

    Args:
        scores: logits, (n, C) for classes or (n, C, h, w) for masks.
        targets: class numbers (n,), or masks (n, C, h, w) of 0 and 1.

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

    Args:
        logits: (n, C).
        labels: (n,) class numbers.
        smoothing: α or ε, in [0, 1].
        form: ``"uniform"`` has targets ``(1−α)·1[c=y] + α/C`` (CSAC, SHOT). ``"others"`` has ``1−ε`` for the label and
            ``ε/(C−1)`` for every other class (FedADG).

    Raises:
        UserError: ``smoothing`` is outside [0, 1], or ``"others"`` with a single class.

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

    Args:
        parameters: ``module.named_parameters()``. Buffers are not pulled.
        reference: the global model's state dict.
        mu: μ.

    Raises:
        UserError: there are no parameters, or ``reference`` lacks one.

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

    Args:
        probabilities: (…, C).
        epsilon: ε.

    Returns:
        (…).

    Example:
        >>> entropy(torch.tensor([0.7, 0.2, 0.1]), epsilon=0.0)
        tensor(0.8018)
    """
    return -(probabilities * (probabilities + epsilon).log()).sum(-1)


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy ``−Σ_c p_c log p_c`` of each row's softmax, in nats. Finite for all logits without an ε.

    Args:
        logits: (…, C).

    Returns:
        (…).

    Example:
        >>> entropy_of_logits(torch.zeros(4))  # ln 4
        tensor(1.3863)
    """
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def inverse_frequencies(numbers: Tensor, classes: int) -> Tensor:
    """``w_c ∝ 1/n_c``, with sum 1: what makes classes of unequal size count alike. An absent class has weight 0.

    Source: DGER (Zhao et al., NeurIPS 2020).

    Args:
        numbers: the class of each sample, (n,).
        classes: C.

    Returns:
        (C,), in the default type of numbers.

    Example:
        >>> inverse_frequencies(torch.tensor([0, 0, 0, 1]), classes=3)
        tensor([0.2500, 0.7500, 0.0000])
    """
    counts = torch.bincount(numbers, minlength=classes).to(torch.get_default_dtype())
    inverse = torch.where(counts > 0, 1 / counts.clamp_min(1), 0.0)
    return inverse / inverse.sum()


def calibrated_scores(scores: Tensor, counts: Tensor, strength: float) -> Tensor:
    """``f_c − τ·n_c^{−1/4}``: scores lowered the more, the fewer samples their class has here.

    Source: FedLC (Zhang et al., ICML 2022), the calibrated logits.

    Args:
        scores: f, (n, C).
        counts: n_c, the samples of each class, (C,). A class without any has the score −∞.
        strength: τ; 0 leaves the scores as they are.

    Example:
        >>> calibrated_scores(torch.zeros(1, 3), torch.tensor([1, 16, 0]), strength=2.0)
        tensor([[-2., -1., -inf]])
    """
    return scores if strength == 0 else scores - strength * counts.to(scores.dtype) ** -0.25


def balanced_scores(scores: Tensor, counts: Tensor, strength: float = 1.0) -> Tensor:
    """``f_c + γ·log n_c``: cross-entropy of these is the balanced softmax loss, in which classes count alike.

    Sources: Ren et al. (NeurIPS 2020); FedROD (Chen and Chao, ICLR 2022).

    Args:
        scores: f, (n, C).
        counts: n_c, the samples of each class, (C,). A class without any has the score −∞.
        strength: γ; 0 leaves the scores as they are.

    Example:
        >>> balanced_scores(torch.zeros(1, 3), torch.tensor([1, 16, 0]))
        tensor([[0.0000, 2.7726,   -inf]])
    """
    return scores if strength == 0 else scores + strength * counts.to(scores.dtype).log()
