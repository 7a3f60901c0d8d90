"""Losses on masks and the morphology they need: Dice, and the boundary term of FedDG-ELCFS (Liu et al., CVPR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError

RING = 5
"""Steps of dilation that make the surroundings of a structure (ELCFS)."""


def dice_loss(probabilities: Tensor, masks: Tensor, epsilon: float = 1e-5) -> Tensor:
    """``1 − (1/C) Σ_c (2 Σ s·t + ε)/(Σ s + Σ t + ε)``, sums over the whole batch of each structure (ELCFS).

    probabilities: s in [0, 1], (n, C, …). masks: t, the same shape. Raises UserError when the shapes differ.
    """
    if probabilities.shape != masks.shape:
        raise UserError(f"predictions {tuple(probabilities.shape)} and masks {tuple(masks.shape)} differ in shape")
    own = [axis for axis in range(probabilities.dim()) if axis != 1]
    both = (probabilities * masks).sum(own)
    sizes = probabilities.sum(own) + masks.sum(own)
    return 1 - ((2 * both + epsilon) / (sizes + epsilon)).mean()


def dilate(masks: Tensor, steps: int = 1) -> Tensor:
    """Masks (n, C, h, w) grown by ``steps`` to their four neighbours; what lies outside the image is empty."""
    for _ in range(steps):
        masks = torch.maximum(
            functional.max_pool2d(masks, (3, 1), 1, (1, 0)), functional.max_pool2d(masks, (1, 3), 1, (0, 1))
        )
    return masks


def erode(masks: Tensor, steps: int = 1) -> Tensor:
    """Masks (n, C, h, w) shrunk by ``steps`` from their four neighbours; what lies outside the image is empty."""
    outside = functional.pad(1 - masks, [steps] * 4, value=1.0)
    inner = 1 - dilate(outside, steps)
    return inner[..., steps:-steps, steps:-steps] if steps else masks


def contour(masks: Tensor) -> Tensor:
    """A mask minus its one-step erosion (ELCFS): (n, C, h, w) → (n, C, h, w)."""
    return masks - erode(masks)


def surroundings(masks: Tensor) -> Tensor:
    """The five-step dilation of a mask minus the mask (ELCFS): (n, C, h, w) → (n, C, h, w)."""
    return dilate(masks, RING) - masks


def region_means(maps: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean feature of each region: maps (n, F, h, w), regions (n, C, h, w) → (n, C, F); and (n, C), which exist."""
    sums = torch.einsum("nfhw,nchw->ncf", maps, regions)
    sizes = regions.sum((2, 3))
    return sums / sizes.clamp(min=1)[..., None], sizes > 0


def contrastive_loss(embeddings: Tensor, labels: Tensor, temperature: float = 0.05) -> Tensor:
    """NT-Xent with labels: the mean over all pairs (a, p), a ≠ p, of one label of
    ``−log( e^{s_ap/τ} / (e^{s_ap/τ} + Σ_n e^{s_an/τ}) )``, n running over the other labels, s cosine similarity.

    embeddings: (m, F). labels: (m,). Zero where no two embeddings have the same label.
    """
    directions = functional.normalize(embeddings, dim=1)
    similarities = directions @ directions.T / temperature
    same = labels[:, None] == labels[None, :]
    negatives = similarities.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    losses = functional.softplus(negatives - similarities)
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return (losses * pairs).sum() / pairs.sum().clamp(min=1)


def boundary_loss(maps: Tensor, masks: Tensor, temperature: float = 0.05) -> Tensor:
    """L_boundary: contours against surroundings of each structure, over images and their copies; the mean over
    structures (ELCFS).

    maps: features (n, F, h, w) of images and copies, at the resolution of the masks. masks: (n, C, h, w). A structure
    that an image lacks gives no embedding.
    """
    (edges, has_edge), (rings, has_ring) = region_means(maps, contour(masks)), region_means(maps, surroundings(masks))
    losses = []
    for structure in range(masks.shape[1]):
        inner, outer = edges[:, structure][has_edge[:, structure]], rings[:, structure][has_ring[:, structure]]
        labels = torch.cat([torch.ones(len(inner)), torch.zeros(len(outer))]).to(maps.device)
        losses.append(contrastive_loss(torch.cat([inner, outer]), labels, temperature))
    return torch.stack(losses).mean()
