"""The U-Net: shapes, sizes it cannot take, how masks are cut out of scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.networks.unet import UNet


@pytest.mark.parametrize(("levels", "width", "size"), [(5, 16, 32), (3, 4, 24), (2, 3, 10)])
def test_shapes(levels: int, width: int, size: int) -> None:
    options = UNet(levels=levels, width=width)
    network = registry.build(options, (3, size, size), 2, 0)
    images = torch.rand(2, 3, size, size)
    scores, stages = network.with_stages(images, [*network.stages])
    assert scores.shape == (2, 2, size, size)
    assert stages["up1"].shape == (2, 2 * width, size, size)
    for level in range(levels):
        side = size // 2**level
        assert stages[f"down{level + 1}"].shape == (2, width * 2**level, side, side)
    assert not list(network.buffers())
    assert sum(isinstance(module, nn.InstanceNorm2d) for module in network.modules()) == 3 * levels - 1


def test_one_structure_of_grey_images() -> None:
    network = registry.build(UNet(levels=3, width=4), (1, 16, 24), 1, 0)
    assert network(torch.rand(1, 1, 16, 24)).shape == (1, 1, 16, 24)


@pytest.mark.parametrize("size", [28, 16, 40])
def test_sizes_that_cannot_be_halved(size: int) -> None:
    with pytest.raises(UserError, match=r"multiples of 16 and at least 32.* data\.size"):
        registry.build(UNet(), (3, size, size), 2, 0)


def test_it_uses_all_levels() -> None:
    """A change far away reaches every score, and every parameter has a gradient."""
    network = registry.build(UNet(levels=3, width=4), (1, 16, 16), 2, 0)
    network(torch.rand(2, 1, 16, 16)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())


def test_masks_keep_the_largest_part_and_fill_it() -> None:
    scores = torch.full((1, 2, 12, 12), -5.0)
    scores[0, 0, 1:6, 1:6] = 5
    scores[0, 0, 3, 3] = -5  # a hole
    scores[0, 0, 9, 9] = 5  # a speck
    scores[0, 1, 2, 2] = 1.0  # sigmoid 0.73
    expected = np.zeros((12, 12), dtype=bool)
    expected[1:6, 1:6] = True
    found = UNet().masks(scores)
    np.testing.assert_array_equal(found[0, 0], expected)
    assert not found[0, 1].any()
    assert UNet(threshold=0.7).masks(scores)[0, 1, 2, 2]
    raw = UNet(largest_component=False).masks(scores)[0, 0]
    assert raw[9, 9]
    assert not raw[3, 3]
