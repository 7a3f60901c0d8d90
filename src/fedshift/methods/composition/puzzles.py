"""Jigsaw puzzles at work: the tiles of images are shuffled, and a head names their order (see `methods.pooled.jigen`).

As a plug-in the puzzles have a pass of their own, so the method's loss sees the images as they are.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError
from fedshift.federation.site import Batch, LossOf, PlugIn, Site
from fedshift.functional.colour import grey
from fedshift.methods.composition.plug_in import GRID, MOST, LocalOption, check_tiles
from fedshift.models.network import Network


class JigsawOption(LocalOption):
    """JiGen's puzzles (Carlucci et al., CVPR 2019): ``L + α · CE(head(features), p)``. The head stays at its site."""

    tasks = WITHOUT_MASKS
    memory_names = ("jigsaw", "jigsaw_optimizer")
    cost = 1.1

    name: Literal["jigsaw"] = "jigsaw"
    weight: NonNegativeFloat = Field(0.7, description="α")
    permutations: Annotated[int, Field(ge=1, le=MOST)] = Field(30, description="P")
    ordered: Annotated[float, Field(ge=0, le=1)] = Field(0.9, description="β: probability that an image stays in order")
    tile_greyscale: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="probability that a tile of a colour image loses its colour"
    )

    def at(self, site: Site) -> PlugIn:
        return _Jigsaw(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_tiles(self.name, input_shape)


class _Jigsaw(PlugIn):
    name = "jigsaw"

    def __init__(self, site: Site, option: JigsawOption) -> None:
        super().__init__(site)
        self._option = option
        self._puzzles = Puzzles(site, option.permutations, option.ordered, option.tile_greyscale)

    def make_head(self, model: Network) -> nn.Module:
        return nn.Linear(model.embedding_size, self._option.permutations + 1)

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        assert self.model is not None
        assert self.head is not None
        inputs, orders = self._puzzles.of(batch.inputs)
        puzzled = F.cross_entropy(self.head(self.model.features(inputs)), orders)
        return loss_of(batch) + self._option.weight * puzzled


class Puzzles:
    """Shuffles the tiles of some images of a batch.

    ``site``: whose images these are; its generator for "puzzles" draws. ``ordered``: β.
    """

    def __init__(self, site: Site, permutations: int, ordered: float, greyscale: float) -> None:
        self.site, self.ordered, self.greyscale = site, ordered, greyscale
        self.table = tile_permutations(permutations)
        self.draws = site.generator_for("puzzles")

    def orders(self, number: int) -> Tensor:
        """The permutation of each image, (n,): uniformly drawn, the order itself included, and then 0 with β."""
        orders = torch.randint(len(self.table), (number,), generator=self.draws)
        orders[torch.rand(number, generator=self.draws) < self.ordered] = 0
        return orders

    def of(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The batch with some images shuffled, and each image's permutation, (n,); 0: in order."""
        orders = self.orders(len(inputs))
        faded = torch.rand(len(inputs), GRID * GRID, generator=self.draws) < self.greyscale
        pixels = self.site.pixels(inputs)
        if pixels.shape[1] == 3 and self.greyscale:
            # In all images: were it in shuffled ones alone, colour would tell which these are.
            pixels = torch.where(tile_mask(faded, pixels), grey(pixels).expand_as(pixels), pixels)
        return self.site.inputs_of(shuffled_tiles(pixels, self.table[orders].to(pixels.device))), orders.to(
            inputs.device
        )


def tile_mask(chosen: Tensor, images: Tensor) -> Tensor:
    """Which pixels lie in the chosen tiles: (n, 9) → (n, 1, h, w)."""
    height, width = images.shape[2:]
    rows = ((torch.arange(height) - (height % GRID) // 2) // (height // GRID)).clamp(0, GRID - 1)
    columns = ((torch.arange(width) - (width % GRID) // 2) // (width // GRID)).clamp(0, GRID - 1)
    return chosen[:, rows[:, None] * GRID + columns][:, None].to(images.device)


def tile_permutations(number: int) -> Tensor:
    """The order itself and ``number`` permutations of the nine tiles, any two of which agree in at most one tile.

    They are the maps i → a·i + b of the field with nine elements; that two of them agree at most once is the largest
    distance that more than nine permutations can have. JiGen (Carlucci et al., CVPR 2019) searches for permutations of
    large Hamming distance at random.
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
