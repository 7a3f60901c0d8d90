"""Tiles: permutations that differ as much as they can, and images whose tiles lie in another order."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.methods.composition.plug_in import MOST
from fedshift.methods.composition.puzzles import shuffled_tiles, tile_permutations


def test_permutations_are_permutations_that_agree_in_at_most_one_tile() -> None:
    table = tile_permutations(MOST)
    assert torch.equal(table[0], torch.arange(9))
    assert all(sorted(row.tolist()) == list(range(9)) for row in table)
    assert all(int((one == other).sum()) <= 1 for one, other in itertools.combinations(table, 2))
    assert torch.equal(table[:31], tile_permutations(30))


@given(st.integers(3, 11), st.integers(3, 11), st.integers(0, MOST))
def test_a_permutation_and_its_inverse(height: int, width: int, number: int) -> None:
    images = torch.arange(2.0 * 2 * height * width).view(2, 2, height, width)
    order = tile_permutations(MOST)[number]
    shuffled = shuffled_tiles(images, order.expand(2, 9))
    assert torch.equal(shuffled_tiles(shuffled, order.argsort().expand(2, 9)), images)
    assert torch.equal(shuffled, images) == (number == 0)
    assert sorted(shuffled.flatten().tolist()) == images.flatten().tolist()


def test_tiles_go_where_the_order_says_and_the_rest_stays() -> None:
    """Written with slices: a 7×8 image has tiles of 2×2 pixels, from row 0 and column 1 on."""
    image = torch.arange(56.0).view(1, 1, 7, 8)
    order = torch.tensor([[3, 1, 2, 0, 4, 5, 6, 8, 7]])
    expected = image.clone()
    for place, tile in enumerate(order[0].tolist()):
        to, at = (slice(2 * (k // 3), 2 * (k // 3) + 2) for k in (place, tile))
        into, of = (slice(1 + 2 * (k % 3), 3 + 2 * (k % 3)) for k in (place, tile))
        expected[0, 0, to, into] = image[0, 0, at, of]
    assert torch.equal(shuffled_tiles(image, order), expected)
