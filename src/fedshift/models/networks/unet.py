"""The network for segmentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import Task
from fedshift.errors import UserError
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions, image_shape


class SegmentationOptions(NetworkOptions):
    """Base of networks whose scores (n, structures, …) become masks by a sigmoid and a threshold."""

    task: ClassVar[Task] = "segmentation"

    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.75, description="sigmoid above which a pixel belongs to a structure (ELCFS's code)"
    )
    largest_component: bool = Field(
        True, description="keep only the largest connected part of a predicted structure, and fill its holes"
    )

    def masks(self, scores: Tensor) -> npt.NDArray[np.bool_]:
        masks = (scores.sigmoid() > self.threshold).cpu().numpy()
        if self.largest_component:
            for image in masks:
                for number in range(len(image)):
                    image[number] = _largest(image[number])
        return masks


def _largest(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The largest connected part of a mask, with holes filled; the first one on ties. Four neighbours count, or six."""
    from scipy import ndimage

    parts, number = ndimage.label(mask)
    if number == 0:
        return mask
    if number > 1:
        mask = parts == 1 + np.bincount(parts.ravel())[1:].argmax()
    filled: npt.NDArray[np.bool_] = ndimage.binary_fill_holes(mask)
    return filled


class UNet(SegmentationOptions):
    """U-Net with instance normalisation, as ELCFS uses it; for volumes every layer has a third axis.

    Level l has width·2^l channels and half the side length of the level above. The features are the last map of the
    upward path: twice the base width, full resolution. The classifier is a 1×1 convolution with one score per
    structure. The network has no buffers. Stages: ``down1``, ``down2``, … and ``up1``, which is the features. Sources:
    Ronneberger, Fischer, Brox, MICCAI 2015; Liu et al., CVPR 2021.
    """

    name: Literal["unet"] = "unet"
    levels: Annotated[int, Field(ge=2, le=7)] = Field(
        5, description="number of resolutions, that of the image included"
    )
    width: PositiveInt = Field(16, description="channels of the first level")

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, *sides = input_shape if len(input_shape) == 4 else image_shape(self.name, input_shape)
        step = 2 ** (self.levels - 1)
        if any(side % step for side in sides) or min(sides) < 2 * step:
            raise UserError(
                f"model 'unet' with {self.levels} levels halves images {self.levels - 1} times: sides must be "
                f"multiples of {step} and at least {2 * step}, but the data set has {'×'.join(map(str, sides))}; "
                "change data.size or model.levels"
            )
        layers = _VOLUMES if len(sides) == 3 else _IMAGES
        return Network(
            _Body(channels, self.width, self.levels, layers),
            layers.convolution(2 * self.width, classes, 1),
            embedding_size=2 * self.width,
            classes=classes,
            stages={
                **{f"down{level + 1}": f"features.down.{level}" for level in range(self.levels)},
                "up1": "features",
            },
            alignment_stages=(f"down{self.levels}",),
        )


class _Layers(NamedTuple):
    """The layers of images, or of volumes."""

    convolution: type[nn.Conv2d] | type[nn.Conv3d]
    rise: type[nn.ConvTranspose2d] | type[nn.ConvTranspose3d]
    normalisation: type[nn.InstanceNorm2d] | type[nn.InstanceNorm3d]
    pool: Callable[[Tensor, int], Tensor]


_IMAGES = _Layers(nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d, nn.functional.max_pool2d)
_VOLUMES = _Layers(nn.Conv3d, nn.ConvTranspose3d, nn.InstanceNorm3d, nn.functional.max_pool3d)


class _Body(nn.Module):
    """The downward and the upward path: (n, c, …) → (n, 2·width, …)."""

    def __init__(self, channels: int, width: int, levels: int, layers: _Layers) -> None:
        super().__init__()
        self._pool = layers.pool
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(before, after, layers), _convolution(after, after, layers))
            for before, after in zip([channels, *widths], widths, strict=False)
        )
        # On the upward path every map above the deepest level has twice the channels of its level.
        below = [*(2 * w for w in widths[1:-1]), widths[-1]]
        self.rise = nn.ModuleList(
            layers.rise(before, after, 2, 2) for before, after in zip(below, widths, strict=False)
        )
        self.up = nn.ModuleList(_convolution(2 * size, 2 * size, layers) for size in widths[:-1])

    def forward(self, images: Tensor) -> Tensor:
        maps: list[Tensor] = []
        values = images
        for level, block in enumerate(self.down):
            values = block(self._pool(values, 2) if level else values)
            maps.append(values)
        for level in reversed(range(len(self.up))):
            values = self.up[level](torch.cat([maps[level], self.rise[level](values)], dim=1))
        return values


def _convolution(inputs: int, outputs: int, layers: _Layers) -> nn.Sequential:
    # No bias: instance normalisation would subtract it.
    return nn.Sequential(
        layers.convolution(inputs, outputs, 3, padding=1, bias=False),
        layers.normalisation(outputs),
        nn.ReLU(inplace=True),
    )
