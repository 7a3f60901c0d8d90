"""Dice and Hausdorff distance of masks: numbers by hand, scipy's directed distance as the reference, invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.distance import directed_hausdorff

from fedshift.evaluation.segmentation import dice, hausdorff


def blob(seed: int, size: int = 20) -> Any:
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(1, 1, size, size)), (0, 0, 2, 2))
    return noise > 0.1


def square(top: int, left: int, side: int, size: int = 12) -> Any:
    mask = np.zeros((1, 1, size, size), dtype=bool)
    mask[..., top : top + side, left : left + side] = True
    return mask


def test_by_hand() -> None:
    a, b = square(2, 2, 4), square(2, 4, 4)  # 8 of 16 pixels in common, moved by 2
    assert dice(a, b).item() == 50
    assert hausdorff(a, b).item() == 2
    assert hausdorff(square(0, 0, 1), square(3, 4, 1)).item() == 5
    assert hausdorff(square(0, 0, 9), square(3, 3, 3)).item() == pytest.approx(math.hypot(3, 3))  # corner to corner


def test_empty_masks() -> None:
    empty = np.zeros((1, 1, 12, 12), dtype=bool)
    assert dice(empty, empty).item() == 100
    assert hausdorff(empty, empty).item() == 0
    assert dice(empty, square(0, 0, 3)).item() == 0
    assert hausdorff(empty, square(0, 0, 3)).item() == pytest.approx(11 * math.sqrt(2))


@given(st.integers(0, 999), st.integers(0, 999))
@settings(max_examples=40)
def test_against_scipy(one: int, other: int) -> None:
    a, b = blob(one), blob(other)
    contours = [np.argwhere(mask[0, 0] & ~ndimage.binary_erosion(mask[0, 0])) for mask in (a, b)]
    if all(len(points) for points in contours):
        there, back = directed_hausdorff(*contours)[0], directed_hausdorff(*contours[::-1])[0]
        assert hausdorff(a, b).item() == pytest.approx(max(there, back))
    assert hausdorff(a, b) == hausdorff(b, a)
    assert hausdorff(a, a).item() == 0
    assert dice(a, b) == dice(b, a)
    assert dice(a, a).item() == 100
    assert 0 <= dice(a, b).item() <= 100


def test_every_image_and_structure_has_its_own_number() -> None:
    a = np.concatenate([square(0, 0, 4), square(4, 4, 4)])
    both = np.concatenate([a, square(0, 0, 4).repeat(2, axis=0)], axis=1)
    assert dice(both, both[:, ::-1]).shape == (2, 2)
    assert dice(both, both[:, ::-1]).tolist() == [[100, 100], [0, 0]]


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="shape"):
        dice(square(0, 0, 2), square(0, 0, 2, size=13))
    with pytest.raises(ValueError, match="no images"):
        hausdorff(square(0, 0, 2)[:0], square(0, 0, 2)[:0])


def test_a_hole_is_measured_from_contour_to_contour() -> None:
    """A square of 11 × 11 against the same without its centre: the hole's rim is 4 from the square's own rim.

    Between the areas themselves the distance would be 1, from the centre to its neighbour.
    """
    whole = np.zeros((1, 1, 15, 15), np.uint8)
    whole[0, 0, 2:13, 2:13] = 1
    holed = whole.copy()
    holed[0, 0, 7, 7] = 0
    assert hausdorff(whole, holed).tolist() == hausdorff(holed, whole).tolist() == [[4.0]]
