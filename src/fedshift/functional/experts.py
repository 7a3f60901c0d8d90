"""DAEL: one expert per source domain, taught by the other experts (Zhou et al., IEEE TIP 2021).

Experts answer in probabilities because their outputs are averaged. ε = 1e-5 inside logarithms keeps gradients finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def expert_cross_entropy(probabilities: Tensor, labels: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Cross-entropy of probabilities, ``−log(p_y + ε)`` of each sample, in nats.

    The mean for each expert on its own domain, averaged over experts, is DAEL's L_x.

    Args:
        probabilities: (b, C).
        labels: (b,) class numbers.
        epsilon: ε.

    Returns:
        (b,).

    Example:
        >>> expert_cross_entropy(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([0, 1])).round(decimals=3) + 0.0
        tensor([0.6930, 0.0000])
    """
    return -(probabilities.gather(1, labels[:, None]).squeeze(1) + epsilon).log()


def consensus_regularisation(
    expert_probabilities_strong: Tensor, teacher_probabilities_weak: Tensor, domain: int
) -> Tensor:
    """Consistency loss of domain k, ``E ‖mean_{j≠k} p_j(strong view) − p_k(weak view)‖²``, a scalar (DAEL's L_cr).

    The squared error is summed over classes and averaged over the batch. The caller averages over k.

    Args:
        expert_probabilities_strong: all experts on strongly augmented images of the domain, (K, b, C).
        teacher_probabilities_weak: the domain's own expert on the same images, weakly augmented, (b, C). Constant for
            back-propagation.
        domain: k, the teacher's row among the experts. It takes no part in the mean.

    Raises:
        UserError: fewer than two experts, an unknown domain, or shapes that do not match.

    Example:
        >>> strong = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]])
        >>> consensus_regularisation(strong, torch.tensor([[0.0, 1.0]]), domain=0)
        tensor(2.)
    """
    _check_experts(expert_probabilities_strong)
    experts, *batch = expert_probabilities_strong.shape
    if experts < 2 or not 0 <= domain < experts:
        raise UserError(f"consensus needs an expert of the domain and another one, found domain {domain} of {experts}")
    if [*teacher_probabilities_weak.shape] != batch:
        raise UserError(
            f"the teacher's probabilities {tuple(teacher_probabilities_weak.shape)} are not of the experts' samples "
            f"and classes {tuple(batch)}"
        )
    others = [expert for expert in range(experts) if expert != domain]
    consensus = expert_probabilities_strong[others].mean(0)
    return (consensus - teacher_probabilities_weak.detach()).square().sum(1).mean()


@torch.no_grad()
def confident_pseudo_labels(expert_probabilities: Tensor, threshold: float = 0.95) -> tuple[Tensor, Tensor]:
    """Class of the most confident expert for every sample, and whether it is sure enough (DAEL).

    Args:
        expert_probabilities: (K, b, C), on weakly augmented target images.
        threshold: the least probability that is sure enough.

    Returns:
        Labels (b,) int64 and a mask (b,) bool.

    Raises:
        UserError: other shapes.

    Example:
        >>> confident_pseudo_labels(torch.tensor([[[0.6, 0.4]], [[0.02, 0.98]]]))
        (tensor([1]), tensor([True]))
    """
    _check_experts(expert_probabilities)
    # The most confident expert's best class is the best class over all experts.
    confidence, labels = expert_probabilities.amax(0).max(1)
    return labels, confidence >= threshold


def unlabelled_ensemble_loss(
    expert_probabilities_strong: Tensor, labels: Tensor, mask: Tensor, epsilon: float = 1e-5
) -> Tensor:
    """Loss on pseudo-labels, ``−E[m · log(mean_k p_k(strong view)_ŷ + ε)]``, a scalar in nats (DAEL's L_u).

    E is the mean over all b samples, those with m = 0 included. So a batch with few sure labels counts little.

    Args:
        expert_probabilities_strong: (K, b, C), on strongly augmented target images.
        labels: ŷ, (b,), from `confident_pseudo_labels` of the same images.
        mask: m, (b,), likewise.
        epsilon: ε.

    Raises:
        UserError: other shapes.

    Example:
        >>> strong = torch.full((2, 4, 2), 0.5)
        >>> mask = torch.tensor([True, True, False, False])
        >>> unlabelled_ensemble_loss(strong, torch.zeros(4, dtype=torch.int64), mask, epsilon=0.0)  # ½ ln 2
        tensor(0.3466)
    """
    _check_experts(expert_probabilities_strong)
    samples = expert_probabilities_strong.shape[1]
    if labels.shape != (samples,) or mask.shape != (samples,):
        raise UserError(
            f"{samples} samples need as many labels and mask entries, found {tuple(labels.shape)} and "
            f"{tuple(mask.shape)}"
        )
    return (mask * expert_cross_entropy(expert_probabilities_strong.mean(0), labels, epsilon)).mean()


def _check_experts(probabilities: Tensor) -> None:
    if probabilities.dim() != 3 or not probabilities.numel():
        raise UserError(f"experts need probabilities (K, b, C) of a batch, found {tuple(probabilities.shape)}")
