"""Conversion of stored samples to network inputs, and augmentation of whole batches on their device.

All random parameters are drawn per sample from a generator on the CPU, so a run sees the same images on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from fedshift.data.domain import Preprocessing
from fedshift.errors import UserError, nearest
from fedshift.functional.colour import adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation, grey
from fedshift.functional.geometry import affine_matrices, cut_out, resample
from fedshift.section import Section

Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1)]
AugmentationPolicy = Literal["rand_augment", "trivial_augment", "augmix"]


class Augmentation(Section):
    """Random changes of training images. The defaults change nothing."""

    # bounds of the share of the image's area that a resized crop keeps; None: no crop
    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # bounds of the crop's width / height
    flip: Probability = 0.0  # probability of a horizontal flip
    brightness: Strength = 0.0  # s; a factor is drawn from [1 - s, 1 + s]
    contrast: Strength = 0.0  # the same
    saturation: Strength = 0.0  # likewise
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0  # h; a shift is drawn from [-h, h], in turns of the colour circle
    greyscale: Probability = 0.0  # probability that colour is removed
    flip_vertical: Probability = 0.0  # probability of a vertical flip
    # h; each axis is sheared by a factor from [-h, h]. Sheared along both axes, an image also turns a little
    shear: Annotated[float, Field(ge=0, lt=1)] = 0.0
    scale: Annotated[float, Field(ge=0, lt=1)] = 0.0  # s; each axis is scaled by a factor from [1 - s, 1 + s]
    shift: Annotated[float, Field(ge=0, le=1)] = 0.0  # t; the image moves by [-t, t] of its width and height
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0  # largest angle of a rotation, in degrees
    # side of a square that is replaced by the image's mean colour, as a share of the shorter side. Masks stay whole
    cut_out: Annotated[float, Field(ge=0, le=1)] = 0.0
    # rand_augment, trivial_augment or augmix, torchvision's with the published settings: one image after the other,
    # before the other changes. The first two rotate images by up to 30 and 135 degrees. None: none
    policy: AugmentationPolicy | None = None

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
        return self == Augmentation(crop_ratio=self.crop_ratio)

    @property
    def is_affine(self) -> bool:
        """Whether images are sheared, scaled, shifted or rotated."""
        return any((self.shear, self.scale, self.shift, self.rotate))


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
    """A named augmentation. UserError if there is no such augmentation; names the nearest one."""
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
    """Stored samples as float32 on the device: images as value / 255 in [0, 1], features as they are. Tokens stay.

    Images get the channels-last layout, with which CPU convolutions were measured to be 1.4 to 1.7 times faster.
    """
    values = inputs.to(device)
    if values.dtype == torch.int64:
        return values
    values = values.float().div_(255) if values.dtype == torch.uint8 else values.float()
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values


def normalise(values: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(value - mean) / std per channel or column; unchanged if the preprocessing has no mean and std."""
    if preprocessing.mean is None or preprocessing.std is None:
        return values
    mean, std = (_per_channel(numbers, values) for numbers in (preprocessing.mean, preprocessing.std))
    return (values - mean) / std


def to_pixels(values: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The inverse of `normalise`: values as stored, pixels in [0, 1]."""
    if preprocessing.mean is None or preprocessing.std is None:
        return values
    mean, std = (_per_channel(numbers, values) for numbers in (preprocessing.mean, preprocessing.std))
    return values * std + mean


def _per_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """One number per channel or column of ``like``, shaped to be broadcast over it."""
    return like.new_tensor(numbers).view(1, -1, *(1 for _ in like.shape[2:]))


def to_network(inputs: Tensor, preprocessing: Preprocessing, device: torch.device | str) -> Tensor:
    """Network inputs on ``device``: float32 from samples (n, c, h, w) uint8 or (n, d) float, tokens as they are."""
    return normalise(to_unit(inputs, device), preprocessing)


def augment(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Randomly changed copies of images.

    Crop, flips, shear, scale, shift and rotation are one bilinear resampling. The four colour changes are applied in
    one random order per batch (torchvision draws an order per image). Hue, saturation and greyscale do not change
    images of one channel. Squares are cut out last.

    ``images``: (n, c, h, w) with values in [0, 1]. Returns images of the same shape with values in [0, 1].
    """
    return augment_with_masks(images, None, augmentation, generator)[0]


def augment_with_masks(
    images: Tensor, masks: Tensor | None, augmentation: Augmentation, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """`augment` for images and their masks, if they have any, which are moved together.

    Masks (n, structures, h, w) of 0 and 1 are resampled bilinearly with a threshold of one half.

    UserError if a policy, which would move images and not their masks.
    """
    if augmentation.is_identity:
        return images, masks
    if augmentation.policy is not None:
        if masks is not None:
            raise UserError(
                f"augmentation.policy: {augmentation.policy} cannot move masks with their images; leave it out"
            )
        images = with_policy(images, augmentation.policy, generator)
    channels = images.shape[1]
    moved = _warp(images if masks is None else torch.cat([images, masks], dim=1), augmentation, generator)
    images = _recolour(moved[:, :channels], augmentation, generator)
    if augmentation.cut_out:
        images = cut_out(images, torch.rand(len(images), 2, generator=generator), augmentation.cut_out)
    return images, None if masks is None else (moved[:, channels:] > 0.5).to(masks.dtype)


def training_inputs(
    images: Tensor,
    masks: Tensor | None,
    preprocessing: Preprocessing,
    augmentation: Augmentation,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor | None]:
    """What a network trains on: images, volumes or vectors before normalisation, randomly changed, and their masks.

    Args:
        images: as `to_unit` gives them.
        masks: of the images or volumes; None: there are none.
        preprocessing: how they are normalised, and the size of the parts of volumes.
    """
    if images.dim() == 4:
        images, masks = augment_with_masks(images, masks, augmentation, generator)
    elif preprocessing.patch is not None:
        images, masks = random_parts(images, masks, preprocessing.patch, generator)
    inputs = normalise(images, preprocessing)
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs, masks


def random_parts(
    volumes: Tensor, masks: Tensor | None, size: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """A part of each volume, anywhere inside it with equal probability, and the same part of its masks.

    Args:
        volumes: (n, c, d, h, w).
        masks: (n, structures, d, h, w); None: there are none.
        size: of the parts, at most that of the volumes.
    """
    free = torch.tensor(volumes.shape[2:]) - torch.tensor(size)
    first = (torch.rand(len(volumes), 3, generator=generator) * (free + 1)).long().minimum(free)
    places = [tuple(slice(int(at), int(at) + side) for at, side in zip(row, size, strict=True)) for row in first]

    def cut(whole: Tensor) -> Tensor:
        return torch.stack([sample[(slice(None), *index)] for sample, index in zip(whole, places, strict=True)])

    return cut(volumes), None if masks is None else cut(masks)


def with_policy(images: Tensor, policy: AugmentationPolicy, generator: torch.Generator) -> Tensor:
    """Images changed by one of torchvision's policies, one after the other, on the processor, with 8 bits per value.

    ``rand_augment``: 2 operations of magnitude 9 of 30 (Cubuk et al., NeurIPS 2020). ``trivial_augment``: one operation
    of any magnitude, the wide set (Müller & Hutter, ICCV 2021). ``augmix``: mixed chains of operations (Hendrycks et
    al., ICLR 2020), without that paper's consistency loss.

    ``images``: (n, c, h, w) with values in [0, 1], grey or colour; ``generator``: draws the seed of all images; torch's
    own generator is restored.
    """
    from torchvision import transforms

    change: nn.Module = {
        "rand_augment": transforms.RandAugment,
        "trivial_augment": transforms.TrivialAugmentWide,
        "augmix": transforms.AugMix,
    }[policy]()
    seed = int(torch.randint(2**62, (), generator=generator))
    pixels = (images.detach() * 255).round().to("cpu", torch.uint8)
    with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's own generator
        torch.default_generator.manual_seed(seed)
        changed = torch.stack([change(image) for image in pixels])
    return (changed.to(images.device).float() / 255).contiguous(memory_format=torch.channels_last)


def _recolour(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Images after all changes of colour, whose numbers are drawn first."""
    colour = images.shape[1] == 3
    changes: list[tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = []
    for number in torch.randperm(4, generator=generator).tolist():
        change, strength, middle = (
            (adjust_brightness, augmentation.brightness, 1),
            (adjust_contrast, augmentation.contrast, 1),
            (adjust_saturation, augmentation.saturation if colour else 0, 1),
            (adjust_hue, augmentation.hue if colour else 0, 0),
        )[number]
        if strength:
            changes.append((change, _uniform(images, middle - strength, middle + strength, generator)))
    greyscale = augmentation.greyscale if colour else 0
    chosen = _uniform(images, 0, 1, generator) < greyscale if greyscale else None
    for applied, draws in changes:
        images = applied(images, draws)
    return images if chosen is None else torch.where(chosen, grey(images).expand_as(images), images)


def _uniform(images: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """A number from [low, high) for each image, as (n, 1, 1, 1) on their device."""
    draws = torch.rand(len(images), generator=generator, dtype=torch.float32) * (high - low) + low
    return draws.view(-1, 1, 1, 1).to(images.device)


def _warp(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Cropped, flipped, sheared, scaled, shifted and rotated images, resampled once, or not at all if only flipped."""
    number = len(images)
    flipped = _choose(number, augmentation.flip, generator)
    window = _window(number, augmentation, generator) if augmentation.crop_scale is not None else None
    upside_down = _choose(number, augmentation.flip_vertical, generator)
    if window is None and not augmentation.is_affine:
        for axis, chosen in ((-1, flipped), (-2, upside_down)):
            if chosen is not None:
                images = torch.where(chosen.view(-1, 1, 1, 1).to(images.device), images.flip(axis), images)
        return images
    matrix = torch.eye(2, 3).repeat(number, 1, 1) if window is None else window
    for column, chosen in ((0, flipped), (1, upside_down)):
        if chosen is not None:
            matrix[:, :, column] = torch.where(chosen[:, None], -matrix[:, :, column], matrix[:, :, column])
    if augmentation.is_affine:
        turned, moved = _affine(number, augmentation, images.shape[3] / images.shape[2], generator)
        moved = matrix[:, :, 2] + torch.einsum("nij,nj->ni", matrix[:, :, :2], moved)
        matrix = torch.cat([matrix[:, :, :2] @ turned, moved[:, :, None]], 2)
    return resample(images, matrix)


def _choose(number: int, probability: float, generator: torch.Generator) -> Tensor | None:
    return torch.rand(number, generator=generator) < probability if probability else None


def _window(number: int, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Where the pixels of random crops come from, (n, 2, 3)."""
    assert augmentation.crop_scale is not None
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
    matrix[:, 0, 0] = width
    matrix[:, 1, 1] = height
    matrix[:, 0, 2] = (2 * across - 1) * (1 - width)
    matrix[:, 1, 2] = (2 * down - 1) * (1 - height)
    return matrix


def _affine(
    number: int, augmentation: Augmentation, aspect: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`affine_matrices` of random changes. All are drawn, so that one does not change the draws of another."""
    draws = 2 * torch.rand(7, number, generator=generator) - 1
    return affine_matrices(
        math.radians(augmentation.rotate) * draws[0],
        augmentation.shear * draws[1:3].T,
        1 + augmentation.scale * draws[3:5].T,
        augmentation.shift * draws[5:7].T,
        aspect,
    )


STRONG = Augmentation(crop_scale=(0.5, 1.0), brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, greyscale=0.2)
"""The strong view. No flip: if flips preserve the class, the weak view already flips."""


def strong_view(
    inputs: Tensor, augmentation: Augmentation, preprocessing: Preprocessing, generator: torch.Generator
) -> Tensor:
    """A second, stronger augmentation of network inputs.

    ``inputs``: images (n, c, h, w) as a network reads them, or vectors, which do not change. Returns inputs of the same
    shape.
    """
    if inputs.dim() != 4:
        return inputs
    images = to_pixels(inputs, preprocessing).clamp(0, 1)
    changed = normalise(augment(images, augmentation, generator), preprocessing)
    return changed.contiguous(memory_format=torch.channels_last)
