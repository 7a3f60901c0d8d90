"""Contrast between models (MOON), by classes (SupCon), of images and texts (CLIP); gradients that agree (FedIIR)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def model_contrastive_loss(features: Tensor, common: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """``−log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )``, the mean over samples.

    ``sim`` is the cosine. Source: MOON (Li, He, Song, CVPR 2021, equation 3).

    Args:
        features: z of the model that trains, (n, d).
        common: z_glob of the common model, (n, d).
        previous: z_prev of the site's model of the round before, (n, d).
        temperature: τ.

    Example:
        >>> z = torch.tensor([[1.0, 0.0]])
        >>> model_contrastive_loss(z, common=z, previous=-z, temperature=1.0)  # ln(1 + e⁻²)
        tensor(0.1269)
    """
    near = F.cosine_similarity(features, common) / temperature
    far = F.cosine_similarity(features, previous) / temperature
    return F.softplus(far - near).mean()


def supervised_contrast(embeddings: Tensor, labels: Tensor, temperature: float, *, with_itself: bool = True) -> Tensor:
    """``log Σ_(j ≠ i) exp(s_ij/τ) − mean over j with y_j = y_i of s_ij/τ``, the mean over samples i.

    ``s`` is the cosine. Sources: SupCon (Khosla et al., NeurIPS 2020, equation 2), whose mean leaves i out; FedCCRL
    (Wang, Tang, arXiv 2410.11267), SanphouWang/FedCCRL, `supervised_contrastive_loss`, whose mean counts i itself.

    Args:
        embeddings: (n, d).
        labels: (n,).
        temperature: τ.
        with_itself: whether the mean counts i, whose s is 1; else a sample that is the only one of its class counts 0.

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


def paired_loss(scores: Tensor) -> Tensor:
    """``½·(CE(S, diagonal) + CE(Sᵀ, diagonal))``: each image is to find its text in the batch, each text its image.

    Source: CLIP (Radford et al., ICML 2021, figure 3).

    Args:
        scores: S (n, n), of each image (row) with each text (column); the pairs lie on the diagonal.

    Example:
        >>> paired_loss(torch.zeros(2, 2))
        tensor(0.6931)
    """
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def gradient_gap(gradients: Sequence[Tensor], references: Sequence[Tensor]) -> Tensor:
    """``Σ ‖g − ḡ‖²`` over tensors: how far a site's gradient is from the mean of all sites'.

    Source: FedIIR (Guo, Guo, Cao, Wu, Chang, ICML 2023, equation 10).

    Args:
        gradients: g.
        references: ḡ, in the same shapes.

    Example:
        >>> gradient_gap([torch.tensor([1.0, 2.0])], [torch.tensor([0.0, 2.0])])
        tensor(1.)
    """
    return torch.stack([(g - r).square().sum() for g, r in zip(gradients, references, strict=True)]).sum()
