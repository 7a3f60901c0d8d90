"""CIE L*a*b* colours of sRGB images, for the D65 white (IEC 61966-2-1; CIE 15); grey, and changes of colour."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError

_TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
_BEND = 6 / 29
_GREY = (0.2989, 0.587, 0.114)


def rgb_to_lab(images: Tensor) -> Tensor:
    """Convert sRGB images to L*a*b*.

    ``images``: (n, 3, h, w), values in [0, 1]. Returns (n, 3, h, w): L* in [0, 100], a* and b*. Raises UserError: the
    images do not have three channels.

    Example:
        >>> rgb_to_lab(torch.ones(1, 3, 1, 1))[0, 0].round()  # white has L* = 100
        tensor([[100.]])
    """
    if images.dim() != 4 or images.shape[1] != 3:
        raise UserError(f"Lab needs colour images (n, 3, h, w), found {tuple(images.shape)}")
    linear = torch.where(images > 0.04045, ((images.clamp(min=0) + 0.055) / 1.055) ** 2.4, images / 12.92)
    relative = torch.einsum("ij,njhw->nihw", _matrix(images), linear)
    bent = torch.where(relative > _BEND**3, relative.clamp(min=1e-12) ** (1 / 3), relative / (3 * _BEND**2) + 4 / 29)
    x, y, z = bent.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


def lab_to_rgb(images: Tensor) -> Tensor:
    """The inverse of `rgb_to_lab`. Colours that sRGB cannot show fall outside [0, 1].

    ``images``: L*, a* and b*, (n, 3, h, w). Raises UserError: the images do not have three channels.

    Example:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> torch.allclose(lab_to_rgb(rgb_to_lab(red)), red, atol=1e-3)
        True
    """
    if images.dim() != 4 or images.shape[1] != 3:
        raise UserError(f"Lab needs colour images (n, 3, h, w), found {tuple(images.shape)}")
    lightness, a, b = images.unbind(1)
    y = (lightness + 16) / 116
    bent = torch.stack([y + a / 500, y, y - b / 200], 1)
    relative = torch.where(bent > _BEND, bent**3, 3 * _BEND**2 * (bent - 4 / 29))
    linear = torch.einsum("ij,njhw->nihw", _matrix(images).inverse(), relative)
    return torch.where(linear > 0.0031308, 1.055 * linear.clamp(min=1e-12) ** (1 / 2.4) - 0.055, 12.92 * linear)


def _matrix(like: Tensor) -> Tensor:
    """Linear sRGB to X, Y, Z relative to white."""
    matrix = torch.tensor(_TO_XYZ, dtype=torch.float64)
    return (matrix / matrix.sum(1, keepdim=True)).to(like)


def grey(images: Tensor) -> Tensor:
    """Luma (n, 1, h, w) of images (n, 3, h, w), with the weights of ITU-R BT.601.

    Example:
        >>> grey(torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1, 1))  # green is the brightest of the three
        tensor([[[[0.5870]]]])
    """
    red, green, blue = _GREY
    return red * images[:, 0:1] + green * images[:, 1:2] + blue * images[:, 2:3]


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """images·factor, clamped to [0, 1]; ``factor`` is (n, 1, 1, 1).

    Example:
        >>> adjust_brightness(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[2.0]]]]))
        tensor([[[[0.5000, 1.0000]]]])
    """
    return (images * factor).clamp(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend of each image with its mean grey: factor·image + (1 - factor)·mean.

    Example:
        >>> adjust_contrast(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[0.5]]]]))
        tensor([[[[0.3750, 0.6250]]]])
    """
    luma = grey(images) if images.shape[1] == 3 else images
    mean = luma.mean(dim=(1, 2, 3), keepdim=True)
    return (factor * images + (1 - factor) * mean).clamp(0, 1)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend of each image with its grey version: factor·image + (1 - factor)·grey.

    Example:
        >>> green = torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1, 1)
        >>> adjust_saturation(green, torch.zeros(1, 1, 1, 1)).flatten()
        tensor([0.5870, 0.5870, 0.5870])
    """
    return (factor * images + (1 - factor) * grey(images)).clamp(0, 1)


def adjust_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Images (n, 3, h, w) with their hue shifted by ``turn`` (n, 1, 1, 1), in turns of the colour circle.

    Uses the closed form of HSV → RGB: channel c = v - v·s·max(0, min(k, 4 - k, 1)) with k = (offset_c + 6·hue) mod 6,
    offsets 5, 3, 1 for red, green, blue.

    Example:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> adjust_hue(red, torch.full((1, 1, 1, 1), 0.5)).flatten()  # half a turn: cyan
        tensor([0., 1., 1.])
    """
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    safe = torch.where(chroma > 0, chroma, 1.0)
    sixths = torch.where(
        red == value,
        (green - blue) / safe,
        torch.where(green == value, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    offsets = torch.tensor([5.0, 3.0, 1.0], device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    position = (offsets + (sixths + 6 * turn)).remainder_(6)
    return (value - chroma * torch.minimum(position, 4 - position).clamp_(0, 1)).clamp_(0, 1)
