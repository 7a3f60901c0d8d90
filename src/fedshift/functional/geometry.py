"""Affine changes of whole batches of images: shear, scale, shift, rotation, and squares that are cut out.

Coordinates are those of `torch.nn.functional.affine_grid`: -1 and 1 are the edges of the image, x to the right, y down.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.errors import UserError


def affine_matrices(
    angle: Tensor, shear: Tensor, scale: Tensor, shift: Tensor, aspect: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The map from pixels of a changed image to those of the original: ``input = A⁻¹(output − t)`` with ``A = R·H·S``.

    ``R = [[cos, −sin], [sin, cos]]``, ``H = [[1, h_x], [h_y, 1]]``, ``S = diag(s_x, s_y)``. The image is scaled first.

    ``angle``: radians, clockwise on the screen, (n,). ``shear``: h_x and h_y, (n, 2). ``scale``: s_x and s_y, (n, 2);
    above 1 the content grows. ``shift``: shares of width and height by which the content moves to the right and down,
    (n, 2). ``aspect``: width / height of the images. Angles and shears are those of pixels. Returns A⁻¹ (n, 2, 2), and
    −A⁻¹t (n, 2). Raises UserError: shears with h_x·h_y = 1, or a scale of 0, which have no inverse.

    Example:
        >>> zero, none = torch.zeros(1), torch.zeros(1, 2)
        >>> affine_matrices(zero, none, torch.tensor([[2.0, 1.0]]), torch.tensor([[0.25, 0.0]]))
        (tensor([[[0.5000, -0.0000],
                 [-0.0000, 1.0000]]]), tensor([[-0.2500,  0.0000]]))
    """
    cos, sin = angle.cos(), angle.sin()
    across, down = shear.unbind(1)
    right, below = scale.unbind(1)
    a, b = (cos - sin * down) * right, (cos * across - sin) * below
    c, d = (sin + cos * down) * right, (sin * across + cos) * below
    determinant = a * d - b * c
    if bool((determinant == 0).any()):
        raise UserError("an image cannot be sheared or scaled to a line")
    inverse = torch.stack([torch.stack([d, -b], 1), torch.stack([-c, a], 1)], 1) / determinant[:, None, None]
    inverse[:, 0, 1] = inverse[:, 0, 1] / aspect
    inverse[:, 1, 0] = inverse[:, 1, 0] * aspect
    return inverse, 0.0 - torch.einsum("nij,nj->ni", inverse, 2 * shift)


def resample(images: Tensor, matrices: Tensor) -> Tensor:
    """Images with each output pixel taken from ``matrix·(x, y, 1)``, bilinearly; beyond an edge, the edge's pixel.

    ``images``: (n, c, h, w). ``matrices``: (n, 2, 3).

    Example:
        >>> left = torch.tensor([[[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]]])  # a quarter of the width: one of four pixels
        >>> resample(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), left).round(decimals=3)
        tensor([[[[2., 3., 4., 4.]]]])
    """
    grid = F.affine_grid(matrices.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def cut_out(images: Tensor, centres: Tensor, side: float) -> Tensor:
    """Images in which one square has the image's mean colour (DeVries & Taylor 2017, where normalised images have 0).

    ``images``: (n, c, h, w). ``centres``: of the squares, as shares of height and width, (n, 2). The part outside of
    the image is lost. ``side``: of the squares, as a share of the shorter side of the image.

    Example:
        >>> cut_out(torch.tensor([[[[0.0, 0.0, 0.0, 1.0]]]]).expand(1, 1, 4, 4), torch.tensor([[0.75, 0.75]]), side=0.5)
        tensor([[[[0.0000, 0.0000, 0.0000, 1.0000],
                  [0.0000, 0.0000, 0.0000, 1.0000],
                  [0.0000, 0.0000, 0.2500, 0.2500],
                  [0.0000, 0.0000, 0.2500, 0.2500]]]])
    """
    height, width = images.shape[2:]
    half = side * min(height, width) / 2
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    inside = ((rows - centres[:, :1] * height).abs() <= half)[:, None, :, None] & (
        (columns - centres[:, 1:] * width).abs() <= half
    )[:, None, None, :]
    return torch.where(inside.to(images.device), images.mean((2, 3), keepdim=True), images)
