"""Mixing of inputs (mixup, CutMix) and of the styles of feature maps (MixStyle); steps along gradients (CrossGrad)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.styles import channel_styles


def mixed_styles(maps: Tensor, order: Tensor, weights: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``σ_mix (x − μ)/σ + μ_mix`` with ``σ_mix = λσ + (1−λ)σ'`` and ``μ_mix = λμ + (1−λ)μ'``, per sample and channel.

    ``σ = sqrt(var + ε)`` with the unbiased variance over positions. Means and deviations are constants for
    back-propagation. Source: MixStyle (Zhou, Yang, Qiao, Xiang, ICLR 2021, equations 3 to 5).

    Args:
        maps: x, (n, c, h, w).
        order: The place of each sample's partner, whose mean μ' and deviation σ' it takes a share of, (n,).
        weights: λ of each sample, (n,).
        epsilon: ε.

    Raises:
        UserError: Other shapes, or maps of a single position, which have no deviation.

    Example:
        >>> maps = torch.tensor([[[[0.0, 2.0, 4.0, 6.0]]], [[[1.0, 1.0, 1.0, 5.0]]]])
        >>> mixed_styles(maps, torch.tensor([1, 0]), torch.tensor([0.3, 1.0]))[0]
        tensor([[[-0.2267,  1.4578,  3.1422,  4.8267]]])
    """
    if maps.dim() != 4 or not order.shape == weights.shape == maps.shape[:1] or maps[0, 0].numel() < 2:
        raise UserError(
            f"styles mix in feature maps (n, c, h, w) of more than one position with n partners and n weights, found "
            f"{tuple(maps.shape)}, {tuple(order.shape)} and {tuple(weights.shape)}"
        )
    means, deviations = channel_styles(maps.detach(), epsilon, unbiased=True)
    mean, deviation = (torch.lerp(moments[order], moments, weights[:, None]) for moments in (means, deviations))
    scale = deviation / deviations
    return torch.addcmul((mean - means * scale)[:, :, None, None], maps, scale[:, :, None, None])


def mixed_inputs(inputs: Tensor, partners: Tensor, share: float) -> Tensor:
    """``λx + (1 − λ)x'`` (mixup, Zhang, Cisse, Dauphin, Lopez-Paz, ICLR 2018).

    Args:
        inputs: x.
        partners: x', the same shape.
        share: λ.

    Example:
        >>> mixed_inputs(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 2.0]), share=0.75)
        tensor([2., 2.])
    """
    return share * inputs + (1 - share) * partners


def paste(images: Tensor, partners: Tensor, share: float, centre: tuple[float, float]) -> tuple[Tensor, float]:
    """Images with a rectangle of their partners, of ``√(1 − λ)`` of the height and of the width (CutMix).

    Source: Yun, Han, Oh, Chun, Choe, Yoo (ICCV 2019, section 3.2). The part of the rectangle outside of the image is
    lost, and the share is computed anew.

    Args:
        images: (n, c, h, w).
        partners: the same shape.
        share: λ.
        centre: of the rectangle, as shares of height and width.

    Returns:
        The images, and the share of their pixels that is their own.

    Example:
        >>> paste(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), share=0.75, centre=(0.5, 0.75))
        (tensor([[[[0., 0., 1., 1.],
                  [0., 0., 0., 0.]]]]), 0.75)
    """
    height, width = images.shape[2:]
    part = (1 - share) ** 0.5
    top, left = (round((middle - part / 2) * size) for middle, size in zip(centre, (height, width), strict=True))
    rows = slice(max(0, top), min(height, top + round(part * height)))
    columns = slice(max(0, left), min(width, left + round(part * width)))
    mixed = images.clone()
    mixed[:, :, rows, columns] = partners[:, :, rows, columns]
    taken = max(0, rows.stop - rows.start) * max(0, columns.stop - columns.start)
    return mixed, 1 - taken / (height * width)


def partners_in_the_other_half(number: int, generator: torch.Generator) -> Tensor:
    """A partner for each sample: the other half of the batch, in a random order (MixStyle "with domain label").

    Each sample is the partner of one other, so half a batch of one domain takes the styles of a half of another.
    Source: Dassl.pytorch, dassl/modeling/ops/mixstyle.py, MixStyle.forward, ``crossdomain``.

    Args:
        number: n, of samples; the first half has the smaller part of an odd number, and then one partner comes twice.
        generator: Draws, on the CPU.

    Returns:
        Row numbers (n,).

    Example:
        >>> partners_in_the_other_half(2, torch.Generator())
        tensor([1, 0])
    """
    half = number // 2
    first, second = torch.randperm(half, generator=generator), half + torch.randperm(number - half, generator=generator)
    if half == 0:
        return second
    return torch.cat([second[:half], first, first[: number - 2 * half]])


def next_of_class(labels: Tensor) -> Tensor:
    """The next sample of each sample's class, after the last the first; a class's only sample is its own.

    Args:
        labels: (n,).

    Returns:
        Row numbers (n,).

    Example:
        >>> next_of_class(torch.tensor([0, 1, 0, 2, 0]))
        tensor([2, 1, 4, 3, 0])
    """
    after = torch.arange(len(labels), device=labels.device)
    gaps = (after[None] - after[:, None] - 1).remainder(len(labels))  # 0 for the next row, n − 1 for the row itself
    return gaps.masked_fill(labels[None] != labels[:, None], len(labels)).argmin(1)


def levelling_rows(labels: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Rows to repeat, so that the classes of a batch become equally frequent: each time one of a rarest class.

    Source: StableFDG (Park et al., NeurIPS 2023), the authors' code: dassl/modeling/ops/oma.py, OMA.

    Args:
        labels: (n,).
        number: how many rows.
        generator: draws among rarest classes, and a row of the class, on the CPU.

    Returns:
        Row numbers (number,); a row may come more than once.

    Example:
        >>> levelling_rows(torch.tensor([0, 0, 0, 1]), 2, torch.Generator().manual_seed(0))
        tensor([3, 3])
    """
    _, classes, counts = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    frequent, rows = counts.clone(), []
    for _ in range(number):
        rarest = (frequent == frequent.min()).nonzero()[:, 0]
        chosen = rarest[torch.randint(len(rarest), (), generator=generator)]
        frequent[chosen] += 1
        members = (classes == chosen).nonzero()[:, 0]
        rows.append(members[torch.randint(len(members), (), generator=generator)])
    return torch.stack(rows) if rows else torch.empty(0, dtype=torch.int64)


def rows_of_other_classes(labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each sample, another one of another class, drawn among all of them.

    Args:
        labels: (n,).
        generator: draws, on the CPU.

    Returns:
        Row numbers (n,); none, (0,), where all samples are of one class.

    Example:
        >>> rows_of_other_classes(torch.tensor([0, 0, 1]), torch.Generator())[:2]
        tensor([2, 2])
        >>> rows_of_other_classes(torch.tensor([0, 0]), torch.Generator())
        tensor([], dtype=torch.int64)
    """
    others = (labels[:, None] != labels[None]).cpu()
    if not others.any():
        return torch.empty(0, dtype=torch.int64)
    return torch.multinomial(others.double(), 1, generator=generator)[:, 0]


def gradient_perturbed(inputs: Tensor, gradients: Tensor, size: float, bound: float = 0.1) -> Tensor:
    """``x + ε·clip(∇_x L, ±bound)``, a constant for back-propagation.

    Source: CrossGrad (Shankar et al., ICLR 2018, Algorithm 1); the clipping is the released code's.

    Args:
        inputs: x, any shape.
        gradients: ∇_x L, the same shape.
        size: ε.
        bound: Bound of each entry of the gradient.

    Example:
        >>> gradient_perturbed(torch.tensor([1.0, 1.0]), torch.tensor([0.05, -3.0]), size=2.0)
        tensor([1.1000, 0.8000])
    """
    # In the inputs' place: a sum may have other strides, with which convolutions are slower.
    return inputs.detach().clone().add_(gradients.detach().clamp(-bound, bound), alpha=size)
