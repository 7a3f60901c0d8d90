"""Conversion of stored samples to network inputs, and augmentation of whole batches on their device.

All random parameters are drawn per sample from a generator on the CPU, so a run sees the same images on any device.
"""

from __future__ import annotations

import math
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import Tensor

from fedshift.data.domain import Preprocessing
from fedshift.errors import UserError, nearest

_GREY = (0.2989, 0.587, 0.114)
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1)]


class Augmentation(BaseModel):
    """Random changes of training images. The defaults change nothing.

    Attributes:
        crop_scale: bounds of the share of the image's area that a resized crop keeps; None: no crop.
        crop_ratio: bounds of the crop's width / height.
        flip: probability of a horizontal flip.
        brightness: s; a factor is drawn from [1 - s, 1 + s].
        contrast: the same.
        saturation: the same.
        hue: h; a shift is drawn from [-h, h], in turns of the colour circle.
        greyscale: probability that colour is removed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: Probability = 0.0
    brightness: Strength = 0.0
    contrast: Strength = 0.0
    saturation: Strength = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    greyscale: Probability = 0.0

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale must be two numbers with 0 < low <= high <= 1, not {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= 1 <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio must be two numbers with 0 < low <= 1 <= high, not {self.crop_ratio}")
        return self

    @property
    def is_identity(self) -> bool:
        """Whether no image is ever changed."""
        return self.crop_scale is None and not any(
            (self.flip, self.brightness, self.contrast, self.saturation, self.hue, self.greyscale)
        )


def _photographs(low: float, jitter: float, greyscale: float) -> Augmentation:
    return Augmentation(
        crop_scale=(low, 1.0),
        flip=0.5,
        brightness=jitter,
        contrast=jitter,
        saturation=jitter,
        hue=jitter,
        greyscale=greyscale,
    )


PRESETS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "csac": _photographs(0.8, 0.4, 0.1),
    "fedsr": _photographs(0.7, 0.3, 0.1),
    "elcfs": Augmentation(crop_scale=(0.7, 1.0), flip=0.5, greyscale=0.1),
    "ccst": Augmentation(crop_scale=(0.8, 1.0), flip=0.5),
    "kd3a": Augmentation(crop_scale=(0.75, 1.0), flip=0.5),
    "digits": Augmentation(crop_scale=(0.8, 1.0), brightness=0.2, contrast=0.2),  # no flip: a mirrored 2 is not a 2
}


def preset(name: str) -> Augmentation:
    """A named augmentation.

    Raises:
        UserError: there is no such augmentation; names the nearest one.
    """
    if name not in PRESETS:
        raise UserError(f"unknown augmentation '{name}'; {nearest(name, PRESETS)}")
    return PRESETS[name]


def _by_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return preset(value)
    except UserError as error:
        raise ValueError(str(error)) from error  # pydantic adds the field's path


NamedAugmentation = Annotated[Augmentation, BeforeValidator(_by_name)]
"""An augmentation in settings: its fields, or the name of a preset."""


def to_unit(inputs: Tensor, device: torch.device | str) -> Tensor:
    """Stored samples as float32 on the device: images as value / 255 in [0, 1], features as they are.

    Images get the channels-last layout, with which CPU convolutions were measured to be 1.4 to 1.7 times faster.
    """
    values = inputs.to(device)
    values = values.float().div_(255) if values.dtype == torch.uint8 else values.float()
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values


def normalised(values: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(value - mean) / std per channel or column; unchanged if the preprocessing has no mean and std."""
    if preprocessing.mean is None or preprocessing.std is None:
        return values
    mean, std = (_per_channel(numbers, values) for numbers in (preprocessing.mean, preprocessing.std))
    return (values - mean) / std


def to_pixels(values: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The inverse of `normalised`: values as stored, pixels in [0, 1]."""
    if preprocessing.mean is None or preprocessing.std is None:
        return values
    mean, std = (_per_channel(numbers, values) for numbers in (preprocessing.mean, preprocessing.std))
    return values * std + mean


def _per_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """One number per channel or column of ``like``, shaped to be broadcast over it."""
    return like.new_tensor(numbers).view((1, -1, 1, 1) if like.dim() == 4 else (1, -1))


def to_network(inputs: Tensor, preprocessing: Preprocessing, device: torch.device | str) -> Tensor:
    """Network inputs (float32 on ``device``) from stored samples (n, c, h, w) uint8 or (n, d) float."""
    return normalised(to_unit(inputs, device), preprocessing)


def augment(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Randomly changed copies of images.

    Crop and flip are one bilinear resampling. The four colour changes are applied in one random order per batch
    (torchvision draws an order per image). Hue, saturation and greyscale do not change images of one channel.

    Args:
        images: (n, c, h, w) with values in [0, 1].
        augmentation: what is changed.
        generator: draws all parameters, on the CPU.

    Returns:
        Images of the same shape with values in [0, 1].
    """
    if augmentation.is_identity:
        return images
    return _recolour(_crop_and_flip(images, augmentation, generator), augmentation, generator)


def augment_with_masks(
    images: Tensor, masks: Tensor, augmentation: Augmentation, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`augment` for images and their masks, which are cropped and flipped together.

    Masks (n, structures, h, w) of 0 and 1 are resampled bilinearly with a threshold of one half.
    """
    if augmentation.is_identity:
        return images, masks
    channels = images.shape[1]
    moved = _crop_and_flip(torch.cat([images, masks], dim=1), augmentation, generator)
    return _recolour(moved[:, :channels], augmentation, generator), (moved[:, channels:] > 0.5).to(masks.dtype)


def _recolour(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    images = _jitter(images, augmentation, generator)
    if augmentation.greyscale and images.shape[1] == 3:
        chosen = _uniform(len(images), 0, 1, images, generator) < augmentation.greyscale
        images = torch.where(chosen, grey(images).expand_as(images), images)
    return images


def _uniform(number: int, low: float, high: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """``number`` draws from [low, high), as (n, 1, 1, 1) on the device of ``like``."""
    draws = torch.rand(number, generator=generator, dtype=torch.float32) * (high - low) + low
    return draws.view(-1, 1, 1, 1).to(like.device)


def _crop_and_flip(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    number = len(images)
    flipped = torch.rand(number, generator=generator) < augmentation.flip if augmentation.flip else None
    if augmentation.crop_scale is None:
        if flipped is None:
            return images
        return torch.where(flipped.view(-1, 1, 1, 1).to(images.device), images.flip(-1), images)
    low, high = augmentation.crop_scale
    area, ratio, across, down = torch.rand(4, number, generator=generator)
    area = low + area * (high - low)
    # The logarithm of the ratio is drawn from the part of its range in which the crop fits into the image.
    fits = -area.log()
    least = torch.maximum(torch.full_like(area, math.log(augmentation.crop_ratio[0])), -fits)
    most = torch.minimum(torch.full_like(area, math.log(augmentation.crop_ratio[1])), fits)
    ratio = torch.exp(least + ratio * (most - least))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    matrix = torch.zeros(number, 2, 3)
    matrix[:, 0, 0] = width if flipped is None else torch.where(flipped, -width, width)
    matrix[:, 1, 1] = height
    matrix[:, 0, 2] = (2 * across - 1) * (1 - width)
    matrix[:, 1, 2] = (2 * down - 1) * (1 - height)
    grid = F.affine_grid(matrix.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _jitter(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    colour = images.shape[1] == 3
    for number in torch.randperm(4, generator=generator).tolist():
        if number == 0 and augmentation.brightness:
            images = adjust_brightness(images, _factor(augmentation.brightness, images, generator))
        elif number == 1 and augmentation.contrast:
            images = adjust_contrast(images, _factor(augmentation.contrast, images, generator))
        elif number == 2 and augmentation.saturation and colour:
            images = adjust_saturation(images, _factor(augmentation.saturation, images, generator))
        elif number == 3 and augmentation.hue and colour:
            images = adjust_hue(images, _uniform(len(images), -augmentation.hue, augmentation.hue, images, generator))
    return images


def _factor(strength: float, images: Tensor, generator: torch.Generator) -> Tensor:
    return _uniform(len(images), 1 - strength, 1 + strength, images, generator)


def grey(images: Tensor) -> Tensor:
    """Luma (n, 1, h, w) of images (n, 3, h, w), with the weights of ITU-R BT.601."""
    red, green, blue = _GREY
    return red * images[:, 0:1] + green * images[:, 1:2] + blue * images[:, 2:3]


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """images·factor, clamped to [0, 1]; ``factor`` is (n, 1, 1, 1)."""
    return (images * factor).clamp(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend of each image with its mean grey: factor·image + (1 - factor)·mean."""
    luma = grey(images) if images.shape[1] == 3 else images
    mean = luma.mean(dim=(1, 2, 3), keepdim=True)
    return (factor * images + (1 - factor) * mean).clamp(0, 1)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend of each image with its grey version: factor·image + (1 - factor)·grey."""
    return (factor * images + (1 - factor) * grey(images)).clamp(0, 1)


def adjust_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Images (n, 3, h, w) with their hue shifted by ``turn`` (n, 1, 1, 1), in turns of the colour circle.

    Uses the closed form of HSV → RGB: channel c = v - v·s·max(0, min(k, 4 - k, 1)) with k = (offset_c + 6·hue) mod 6,
    offsets 5, 3, 1 for red, green, blue.
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
    place = (offsets + (sixths + 6 * turn)).remainder_(6)
    return (value - chroma * torch.minimum(place, 4 - place).clamp_(0, 1)).clamp_(0, 1)


STRONG = Augmentation(crop_scale=(0.5, 1.0), brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, greyscale=0.2)
"""The strong view. No flip: if flips preserve the class, the weak view already flips."""


def strong_view(
    inputs: Tensor, augmentation: Augmentation, preprocessing: Preprocessing, generator: torch.Generator
) -> Tensor:
    """A second, stronger augmentation of network inputs.

    Args:
        inputs: images (n, c, h, w) as a network reads them, or vectors, which do not change.
        augmentation: what is changed.
        preprocessing: how the images were normalised.
        generator: draws all parameters, on the CPU.

    Returns:
        Inputs of the same shape.
    """
    if inputs.dim() != 4:
        return inputs
    images = to_pixels(inputs, preprocessing).clamp(0, 1)
    changed = normalised(augment(images, augmentation, generator), preprocessing)
    return changed.contiguous(memory_format=torch.channels_last)
