"""Mixing of inputs (mixup, CutMix) and of the styles of feature maps (MixStyle); steps along gradients (CrossGrad)."""

from __future__ import annotations

from torch import Tensor


def mixed_inputs(inputs: Tensor, partners: Tensor, share: float) -> Tensor:
    """``λx + (1 − λ)x'`` (mixup, Zhang, Cisse, Dauphin, Lopez-Paz, ICLR 2018).

    ``inputs``: x. ``partners``: x', the same shape. ``share``: λ.

    Example:
        >>> import torch
        >>> mixed_inputs(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 2.0]), share=0.75)
        tensor([2., 2.])
    """
    return share * inputs + (1 - share) * partners


def paste(images: Tensor, partners: Tensor, share: float, centre: tuple[float, float]) -> tuple[Tensor, float]:
    """Images with a rectangle of their partners, of ``√(1 − λ)`` of the height and of the width (CutMix).

    Source: Yun, Han, Oh, Chun, Choe, Yoo (ICCV 2019, section 3.2). The part of the rectangle outside of the image is
    lost, and the share is computed anew.

    ``images``: (n, c, h, w). ``partners``: the same shape. ``share``: λ. ``centre``: of the rectangle, as shares of
    height and width. Returns the images, and the share of their pixels that is their own.

    Example:
        >>> import torch
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


def gradient_perturbed(inputs: Tensor, gradients: Tensor, size: float, bound: float = 0.1) -> Tensor:
    """``x + ε·clip(∇_x L, ±bound)``, a constant for back-propagation.

    Source: CrossGrad (Shankar et al., ICLR 2018, Algorithm 1); the clipping is the released code's.

    ``inputs``: x, any shape. ``gradients``: ∇_x L, the same shape. ``size``: ε. ``bound``: bound of each entry of the
    gradient.

    Example:
        >>> import torch
        >>> gradient_perturbed(torch.tensor([1.0, 1.0]), torch.tensor([0.05, -3.0]), size=2.0)
        tensor([1.1000, 0.8000])
    """
    # In the inputs' place: a sum may have other strides, with which convolutions are slower.
    return inputs.detach().clone().add_(gradients.detach().clamp(-bound, bound), alpha=size)
