"""Affine changes of images against numbers worked out by hand, and against torch's own flips and turns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshift.functional.geometry import affine_matrices, cut_out, resample


def changed(images: Tensor, angle: float = 0.0, **parts: tuple[float, float]) -> Tensor:
    """Every image with the same change."""
    number = len(images)
    parts = {"shear": (0.0, 0.0), "scale": (1.0, 1.0), "shift": (0.0, 0.0), **parts}
    tensors = {name: torch.tensor([value] * number) for name, value in parts.items()}
    aspect = images.shape[3] / images.shape[2]
    matrix, moved = affine_matrices(torch.full((number,), angle), **tensors, aspect=aspect)
    return resample(images, torch.cat([matrix, moved[:, :, None]], 2))


IMAGES = torch.arange(32.0).view(2, 1, 4, 4)


def test_a_shift_of_a_quarter_moves_four_pixels_by_one() -> None:
    """To the right and up; the edge's pixels fill the gap."""
    found = changed(IMAGES, shift=(0.25, -0.25))
    rows, columns = torch.tensor([1, 2, 3, 3]), torch.tensor([0, 0, 1, 2])
    torch.testing.assert_close(found, IMAGES[:, :, rows][..., columns], atol=1e-5, rtol=0)


def test_a_quarter_turn_is_torch_s() -> None:
    found = changed(IMAGES, angle=math.pi / 2)
    torch.testing.assert_close(found, IMAGES.rot90(-1, (2, 3)), atol=1e-4, rtol=0)


def test_turning_a_wide_image_keeps_its_pixels_square() -> None:
    """A bar of three pixels stands up after a quarter turn, and is not stretched."""
    image = torch.zeros(1, 1, 5, 9)
    image[0, 0, 2, 3:6] = 1
    expected = torch.zeros(1, 1, 5, 9)
    expected[0, 0, 1:4, 4] = 1
    torch.testing.assert_close(changed(image, angle=math.pi / 2), expected, atol=1e-4, rtol=0)


def test_content_grows_with_the_scale() -> None:
    """Twice as wide: between pixel centres, linear in between. 0 1 2 3 becomes .75 1.25 1.75 2.25."""
    row = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(1, 1, 4, 4)
    found = changed(row, scale=(2.0, 1.0))
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.75, 1.25, 1.75, 2.25]))


def test_a_shear_along_x_moves_rows_by_their_height() -> None:
    """x' = x + h·y: with h = 1 the row 1.5 pixels below the centre moves 1.5 pixels to the right."""
    image = torch.arange(8.0).expand(1, 1, 4, 8)
    found = changed(image, shear=(1.0, 0.0))[0, 0]
    for row in range(4):
        torch.testing.assert_close(found[row, 3:5], torch.tensor([3.0, 4.0]) - (row - 1.5), atol=1e-5, rtol=0)


def test_matrices_undo_the_change() -> None:
    """A·A⁻¹ = 1 with A = R·H·S written out."""
    angle, shear, scale = torch.tensor([0.3]), torch.tensor([[0.2, -0.1]]), torch.tensor([[1.2, 0.7]])
    inverse, moved = affine_matrices(angle, shear, scale, torch.tensor([[0.1, 0.2]]))
    turn = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])
    whole = turn @ torch.tensor([[1.0, 0.2], [-0.1, 1.0]]) @ torch.diag(torch.tensor([1.2, 0.7]))
    torch.testing.assert_close(whole @ inverse[0], torch.eye(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(whole @ moved[0], torch.tensor([-0.2, -0.4]), atol=1e-6, rtol=0)


def test_a_square_at_the_edge_is_partly_lost() -> None:
    images = torch.ones(2, 3, 8, 4)
    images[1] = torch.rand(3, 8, 4, generator=torch.Generator().manual_seed(0))
    found = cut_out(images, torch.tensor([[0.5, 0.5], [0.0, 0.5]]), side=0.5)
    assert torch.equal(found[0], images[0])  # its mean is its colour
    inside = torch.zeros(8, 4, dtype=torch.bool)
    inside[:1, 1:3] = True  # of the two rows only the lower
    torch.testing.assert_close(found[1][:, inside], images[1].mean((1, 2))[:, None].expand(3, 2))
    assert torch.equal(found[1][:, ~inside], images[1][:, ~inside])
