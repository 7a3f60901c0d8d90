"""Contrast between models (MOON), by classes (SupCon), of images and texts (CLIP); gradients that agree (FedIIR)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def supervised_contrast(embeddings: Tensor, labels: Tensor, temperature: float, *, with_itself: bool = True) -> Tensor:
    """``log Σ_(j ≠ i) exp(s_ij/τ) − mean over j with y_j = y_i of s_ij/τ``, the mean over samples i.

    ``s`` is the cosine. Sources: SupCon (Khosla et al., NeurIPS 2020, equation 2), whose mean leaves i out; FedCCRL
    (Wang, Tang, arXiv 2410.11267), SanphouWang/FedCCRL, `supervised_contrastive_loss`, whose mean counts i itself.

    ``embeddings``: (n, d). ``labels``: (n,). ``temperature``: τ. ``with_itself``: whether the mean counts i, whose s is
    1; else a sample that is the only one of its class counts 0.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> supervised_contrast(embeddings[:2], torch.tensor([0, 0]), temperature=1.0)  # log e − 1
        tensor(0.)
        >>> supervised_contrast(embeddings, torch.tensor([0, 0, 1]), temperature=1.0)  # (2 log(e + 1) + log 2 − 3)/3
        tensor(0.1066)
        >>> supervised_contrast(embeddings, torch.tensor([0, 0, 1]), 1.0, with_itself=False)  # 2 (log(e + 1) − 1)/3
        tensor(0.2088)
    """
    directions = F.normalize(embeddings, dim=1)
    similarities = directions @ directions.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    same = labels[:, None] == labels[None]
    same = (same if with_itself else same & ~itself).to(similarities)
    near = (similarities * same).sum(1) / same.sum(1).clamp(min=1)
    apart = similarities.masked_fill(itself, -torch.inf).logsumexp(1) - near
    return (apart * (same.sum(1) > 0)).mean()
