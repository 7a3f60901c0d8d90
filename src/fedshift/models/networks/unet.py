"""The network for segmentation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import Task
from fedshift.errors import UserError
from fedshift.models.network import Network
from fedshift.models.options import NetworkOptions, image_shape


class SegmentationOptions(NetworkOptions):
    """Base of networks whose scores (n, structures, h, w) become masks by a sigmoid and a threshold."""

    task: ClassVar[Task] = "segmentation"

    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.75, description="sigmoid above which a pixel belongs to a structure (ELCFS's code)"
    )
    largest_component: bool = Field(
        True, description="keep only the largest connected part of a predicted structure, and fill its holes"
    )

    def masks(self, scores: Tensor) -> npt.NDArray[np.bool_]:
        """Predicted masks.

        Args:
            scores: the network's output, (n, structures, h, w).

        Returns:
            Masks of that shape.
        """
        found = (scores.sigmoid() > self.threshold).cpu().numpy()
        if self.largest_component:
            for image in found:
                for number in range(len(image)):
                    image[number] = _largest(image[number])
        return found


def _largest(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The largest connected part of a mask (h, w), with holes filled; the first one on ties. Four neighbours count."""
    from scipy import ndimage

    parts, number = ndimage.label(mask)
    if number == 0:
        return mask
    if number > 1:
        mask = parts == 1 + np.bincount(parts.ravel())[1:].argmax()
    filled: npt.NDArray[np.bool_] = ndimage.binary_fill_holes(mask)
    return filled


class UNet(SegmentationOptions):
    """2-D U-Net with instance normalisation, as ELCFS uses it.

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
        channels, height, width = image_shape(self.name, input_shape)
        step = 2 ** (self.levels - 1)
        if height % step or width % step or min(height, width) < 2 * step:
            raise UserError(
                f"model 'unet' with {self.levels} levels halves images {self.levels - 1} times: sides must be "
                f"multiples of {step} and at least {2 * step}, but the data set has {height}×{width}; "
                "change data.size or model.levels"
            )
        return Network(
            _Body(channels, self.width, self.levels),
            nn.Conv2d(2 * self.width, classes, 1),
            embedding_size=2 * self.width,
            classes=classes,
            stages={
                **{f"down{level + 1}": f"features.down.{level}" for level in range(self.levels)},
                "up1": "features",
            },
            alignment_stages=(f"down{self.levels}",),
        )


class _Body(nn.Module):
    """The downward and the upward path: (n, c, h, w) → (n, 2·width, h, w)."""

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(before, after), _convolution(after, after))
            for before, after in zip([channels, *widths], widths, strict=False)
        )
        # On the upward path every map above the deepest level has twice the channels of its level.
        below = [*(2 * w for w in widths[1:-1]), widths[-1]]
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 2, 2) for before, after in zip(below, widths, strict=False)
        )
        self.up = nn.ModuleList(_convolution(2 * own, 2 * own) for own in widths[:-1])

    def forward(self, images: Tensor) -> Tensor:
        maps: list[Tensor] = []
        values = images
        for level, block in enumerate(self.down):
            values = block(nn.functional.max_pool2d(values, 2) if level else values)
            maps.append(values)
        for level in reversed(range(len(self.up))):
            values = self.up[level](torch.cat([maps[level], self.rise[level](values)], dim=1))
        return values


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    # No bias: instance normalisation would subtract it.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.InstanceNorm2d(outputs), nn.ReLU(inplace=True)
    )
