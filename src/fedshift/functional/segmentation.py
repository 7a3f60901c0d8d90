"""Losses on masks and the morphology they need: Dice, and FedDG-ELCFS's boundary term (Liu et al., CVPR 2021)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError

RING = 5
"""Steps of dilation that make the surroundings of a structure (ELCFS)."""


def dice_loss(probabilities: Tensor, masks: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Dice loss ``1 − (1/C) Σ_c (2 Σ s·t + ε)/(Σ s + Σ t + ε)``, a scalar (ELCFS).

    The sums run over the whole batch, for each structure c.

    Args:
        probabilities: s in [0, 1], (n, C, …).
        masks: t, the same shape.
        epsilon: ε.

    Raises:
        UserError: the shapes differ.

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


def dilate(masks: Tensor, steps: int = 1) -> Tensor:
    """Grow masks to their four neighbours, in volumes six. Outside the image everything is empty.

    Args:
        masks: (n, C, h, w) or (n, C, d, h, w).
        steps: how often.

    Example:
        >>> dilate(torch.tensor([0.0, 0.0, 1.0]).view(1, 1, 1, 3)).flatten()
        tensor([0., 1., 1.])
    """
    axes = masks.dim() - 2
    pool = functional.max_pool2d if axes == 2 else functional.max_pool3d
    along = [tuple(3 if axis == other else 1 for other in range(axes)) for axis in range(axes)]
    for _ in range(steps):
        grown = [pool(masks, size, 1, tuple(side // 2 for side in size)) for size in along]
        masks = functools.reduce(torch.maximum, grown)
    return masks


def erode(masks: Tensor, steps: int = 1) -> Tensor:
    """Shrink masks from their four neighbours, in volumes six. Outside the image everything is empty.

    Args:
        masks: (n, C, h, w) or (n, C, d, h, w).
        steps: how often.

    Example:
        >>> erode(torch.ones(1, 1, 3, 3))[0, 0]
        tensor([[0., 0., 0.],
                [0., 1., 0.],
                [0., 0., 0.]])
    """
    axes = masks.dim() - 2
    outside = functional.pad(1 - masks, [steps] * 2 * axes, value=1.0)
    inner = 1 - dilate(outside, steps)
    if not steps:
        return masks
    for axis in range(2, masks.dim()):
        inner = inner.narrow(axis, steps, masks.shape[axis])
    return inner


def contour(masks: Tensor) -> Tensor:
    """A mask minus its one-step erosion (ELCFS): (n, C, …) → (n, C, …).

    Example:
        >>> contour(torch.ones(1, 1, 3, 3))[0, 0]
        tensor([[1., 1., 1.],
                [1., 0., 1.],
                [1., 1., 1.]])
    """
    return masks - erode(masks)


def surroundings(masks: Tensor) -> Tensor:
    """The five-step dilation of a mask minus the mask (ELCFS): (n, C, …) → (n, C, …).

    Example:
        >>> surroundings(torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0]).view(1, 1, 1, 8)).flatten()
        tensor([0., 0., 1., 1., 1., 1., 1., 0.])
    """
    return dilate(masks, RING) - masks


def region_means(maps: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean feature of each region.

    Args:
        maps: features, (n, F, …).
        regions: masks, (n, C, …).

    Returns:
        Means (n, C, F), and which regions have pixels, (n, C) bool.

    Example:
        >>> region_means(torch.tensor([[[[2.0, 4.0, 9.0]]]]), torch.tensor([[[[1.0, 1.0, 0.0]]]]))
        (tensor([[[3.]]]), tensor([[True]]))
    """
    sums = torch.einsum("nfp,ncp->ncf", maps.flatten(2), regions.flatten(2))
    sizes = regions.flatten(2).sum(2)
    return sums / sizes.clamp(min=1)[..., None], sizes > 0


def contrastive_loss(embeddings: Tensor, labels: Tensor, temperature: float = 0.05) -> Tensor:
    """NT-Xent with labels: mean of ``−log( e^{s_ap/τ} / (e^{s_ap/τ} + Σ_n e^{s_an/τ}) )``, a scalar (ELCFS).

    The mean is over all pairs (a, p), a ≠ p, of one label; n runs over the other labels; s is cosine similarity. It is
    zero where no two embeddings have the same label.

    Args:
        embeddings: (m, F).
        labels: (m,).
        temperature: τ.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> contrastive_loss(embeddings, torch.tensor([0, 0, 1]), temperature=1.0)  # log(1 + e⁻¹)
        tensor(0.3133)
    """
    directions = functional.normalize(embeddings, dim=1)
    similarities = directions @ directions.T / temperature
    same = labels[:, None] == labels[None, :]
    negatives = similarities.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    losses = functional.softplus(negatives - similarities)
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return (losses * pairs).sum() / pairs.sum().clamp(min=1)


def boundary_loss(maps: Tensor, masks: Tensor, temperature: float = 0.05, *, added: bool = False) -> Tensor:
    """ELCFS's L_boundary: contrast contours with surroundings, over images and their copies; mean over structures.

    Args:
        maps: features of images and copies, (n, F, …), at the resolution of the masks.
        masks: (n, C, …). A structure that an image lacks gives no embedding.
        temperature: τ.
        added: the sum over structures in place of the mean (released code).

    Example:
        >>> mask = torch.zeros(2, 1, 6, 6)
        >>> mask[..., :2, :2] = 1
        >>> boundary_loss(torch.cat([mask, 1 - mask], 1), mask, temperature=1.0)  # log(1 + 2e⁻¹)
        tensor(0.5514)
    """
    (edges, has_edge), (rings, has_ring) = region_means(maps, contour(masks)), region_means(maps, surroundings(masks))
    losses = []
    for structure in range(masks.shape[1]):
        inner, outer = edges[:, structure][has_edge[:, structure]], rings[:, structure][has_ring[:, structure]]
        labels = torch.cat([torch.ones(len(inner)), torch.zeros(len(outer))]).to(maps.device)
        losses.append(contrastive_loss(torch.cat([inner, outer]), labels, temperature))
    whole = torch.stack(losses)
    return whole.sum() if added else whole.mean()
