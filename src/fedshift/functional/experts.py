"""DAEL: one expert per source domain, taught by the others (Zhou et al., IEEE TIP 2021).

Experts answer in probabilities, for their outputs are averaged; ε = 1e-5 inside logarithms keeps gradients finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def expert_cross_entropy(probabilities: Tensor, labels: Tensor, epsilon: float = 1e-5) -> Tensor:
    """``−log(p_y + ε)`` of each sample, in nats: (b, C) and labels (b,) → (b,). Its mean for an expert on its own
    domain, averaged over the experts, is L_x."""
    return -(probabilities.gather(1, labels[:, None]).squeeze(1) + epsilon).log()


def consensus_regularisation(
    expert_probabilities_strong: Tensor, teacher_probabilities_weak: Tensor, domain: int
) -> Tensor:
    """``E ‖mean_{j≠k} p_j(strong view) − p_k(weak view)‖²``, a scalar, for images of domain k (L_cr).

    The squared error is summed over classes and averaged over the batch; the mean over k is the caller's.
    expert_probabilities_strong: (K, b, C), all experts on strongly augmented images of the domain.
    teacher_probabilities_weak: (b, C), the domain's own expert on the same images weakly augmented; constant for
        back-propagation. domain: k, the teacher's row among the experts, which takes no part.
    Raises UserError for fewer than two experts, a domain that is not among them, and shapes that do not match.
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
    """The most confident expert's class for every sample, (b,) int64, and whether it is sure enough, (b,) bool.

    expert_probabilities: (K, b, C), on weakly augmented target images. threshold: the least probability of that class
        that is sure enough. Raises UserError for other shapes.
    """
    _check_experts(expert_probabilities)
    # The most confident expert's best class is the best class over all experts.
    confidence, labels = expert_probabilities.amax(0).max(1)
    return labels, confidence >= threshold


def unlabelled_ensemble_loss(
    expert_probabilities_strong: Tensor, labels: Tensor, mask: Tensor, epsilon: float = 1e-5
) -> Tensor:
    """``−E[m · log(mean_k p_k(strong view)_ŷ + ε)]``, a scalar in nats (L_u).

    E is the mean over all b samples, those with m = 0 included, so a batch with few sure labels counts little.
    expert_probabilities_strong: (K, b, C), on strongly augmented target images. labels, mask: (b,), from
        `confident_pseudo_labels` of the same images. Raises UserError for other shapes.
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
