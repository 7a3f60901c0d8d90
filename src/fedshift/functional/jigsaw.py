"""Tiles of images in another order (JiGen, EISNet)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError

GRID = 3
"""Tiles in a row and in a column."""
MOST = 71
"""Permutations that `tile_permutations` knows beside the order itself."""


def tile_permutations(number: int) -> Tensor:
    """The order itself and ``number`` permutations of the nine tiles, any two of which agree in at most one tile.

    They are the maps i → a·i + b of the field with nine elements; that two of them agree at most once is the largest
    distance that more than nine permutations can have. JiGen (Carlucci et al., CVPR 2019) searches for permutations of
    large Hamming distance at random.

    Args:
        number: P, at most 71.

    Returns:
        (P + 1, 9) int64; row 0 is the order itself.

    Raises:
        UserError: There are not that many.

    Example:
        >>> tile_permutations(1)
        tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8],
                [0, 2, 1, 6, 8, 7, 3, 5, 4]])
    """
    if not 0 <= number <= MOST:
        raise UserError(f"there are {MOST} permutations of nine tiles that differ enough, not {number}")
    result = [[_sum(_product(a, i), b) for i in range(9)] for b in range(9) for a in range(1, 9)]
    return torch.tensor(result[: number + 1])


def _sum(left: int, right: int) -> int:
    """The sum of two numbers x + y·√−1 with x and y modulo 3, each written as x + 3y."""
    return (left + right) % 3 + 3 * ((left // 3 + right // 3) % 3)


def _product(left: int, right: int) -> int:
    a, b, c, d = left % 3, left // 3, right % 3, right // 3
    return (a * c - b * d) % 3 + 3 * ((a * d + b * c) % 3)


def shuffled_tiles(images: Tensor, orders: Tensor) -> Tensor:
    """Images whose nine tiles lie in another order. Rows and columns beyond a multiple of three stay.

    Source: JiGen (Carlucci et al., CVPR 2019, section 3).

    Args:
        images: (n, c, h, w), at least 3×3.
        orders: (n, 9); tile ``orders[i, k]`` of image i comes to place k.

    Raises:
        UserError: Other shapes.

    Example:
        >>> shuffled_tiles(torch.arange(9.0).view(1, 1, 3, 3), torch.arange(8, -1, -1)[None]).flatten()
        tensor([8., 7., 6., 5., 4., 3., 2., 1., 0.])
    """
    if images.dim() != 4 or min(images.shape[2:]) < GRID or orders.shape != (len(images), GRID * GRID):
        raise UserError(
            f"tiles need images (n, c, h, w) of at least {GRID}×{GRID} pixels and n orders of nine, found "
            f"{tuple(images.shape)} and {tuple(orders.shape)}"
        )
    number, channels = images.shape[:2]
    high, wide = (side // GRID for side in images.shape[2:])
    top, left = ((side % GRID) // 2 for side in images.shape[2:])
    inner = images[:, :, top : top + GRID * high, left : left + GRID * wide]
    tiles = inner.reshape(number, channels, GRID, high, GRID, wide).permute(0, 2, 4, 1, 3, 5)
    tiles = tiles.reshape(number, GRID * GRID, channels, high, wide)
    moved = tiles[torch.arange(number, device=images.device)[:, None], orders]
    moved = moved.reshape(number, GRID, GRID, channels, high, wide).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[:, :, top : top + GRID * high, left : left + GRID * wide] = moved.reshape(inner.shape)
    return result
