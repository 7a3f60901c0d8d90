"""CSAC's projections: the rule per axis, parameter counts and reproducible starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedshift.functional.projection import projection_convolution, projection_layer


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("size_from", "size_to", "kind", "kernel"),
    [
        ((14, 14), (7, 7), nn.Conv2d, (3, 3)),
        ((7, 7), (7, 7), nn.Conv2d, (1, 1)),
        ((13, 13), (6, 6), nn.Conv2d, (8, 8)),
        ((2, 2), (1, 1), nn.Conv2d, (3, 3)),
        ((3, 3), (6, 6), nn.ConvTranspose2d, (4, 4)),
        ((14, 5), (7, 5), nn.Conv2d, (3, 1)),
        ((14, 9), (7, 5), nn.Conv2d, (3, 5)),
        ((3, 5), (6, 5), nn.ConvTranspose2d, (4, 1)),
    ],
)
def test_rule_per_axis(size_from, size_to, kind, kernel) -> None:  # type: ignore[no-untyped-def]
    module = projection_convolution(3, size_from, 4, size_to)
    assert isinstance(module, kind)
    assert module.kernel_size == kernel
    assert module(torch.randn(2, 3, *size_from)).shape == (2, 4, *size_to)


@pytest.mark.parametrize(
    ("size_from", "size_to"), [((3, 3), (7, 7)), ((3, 8), (6, 4)), ((1, 1), (5, 4)), ((8, 2), (5, 3))]
)
def test_other_sizes_are_pooled(size_from: tuple[int, int], size_to: tuple[int, int]) -> None:
    module = projection_convolution(3, size_from, 4, size_to)
    assert isinstance(module[0], nn.AdaptiveAvgPool2d)
    assert module(torch.randn(2, 3, *size_from)).shape == (2, 4, *size_to)


def test_vectors_become_maps() -> None:
    module = projection_layer((10,), 4, (1, 1))
    assert count(module) == 44
    features = torch.randn(2, 10)
    torch.testing.assert_close(module(features)[..., 0, 0], features @ module[0].weight.T + module[0].bias)
    assert projection_layer((10,), 4, (3, 2))(features).shape == (2, 4, 3, 2)
    assert projection_layer((3, 6, 6), 4, (3, 3))(torch.randn(2, 3, 6, 6)).shape == (2, 4, 3, 3)


def test_start_comes_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = (
        projection_layer((3, 6, 6), 4, (3, 3), torch.Generator().manual_seed(seed)).state_dict() for seed in (5, 5)
    )
    other = projection_layer((3, 6, 6), 4, (3, 3), torch.Generator().manual_seed(6)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["weight"], other["weight"])


def test_start_is_that_of_torch() -> None:
    for ours, theirs in (
        (lambda: projection_convolution(8, (14, 14), 4, (7, 7)), lambda: nn.Conv2d(8, 4, 3, 2, 1)),
        (lambda: projection_convolution(8, (3, 3), 4, (6, 6)), lambda: nn.ConvTranspose2d(8, 4, 4, 2, 1)),
        (lambda: projection_layer((8,), 4, (1, 1))[0], lambda: nn.Linear(8, 4)),  # type: ignore[index]
    ):
        torch.manual_seed(3)
        found = ours().state_dict()
        torch.manual_seed(3)
        expected = theirs().state_dict()
        torch.testing.assert_close(found, expected)


def test_volumes_are_averaged_over_depth_and_sequences_are_rows() -> None:
    volumes, sequences = torch.rand(2, 3, 5, 4, 4), torch.rand(2, 3, 6)
    layer = projection_layer((3, 5, 4, 4), 7, (2, 2))
    flat = layer[2](volumes.mean(2))  # type: ignore[index]
    torch.testing.assert_close(layer(volumes), flat)
    assert flat.shape == (2, 7, 2, 2)
    layer = projection_layer((3, 6), 7, (1, 6))
    torch.testing.assert_close(layer(sequences), layer[1](sequences[:, :, None]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("sizes", "kernel", "stride"),
    [((12, 4), 3, 3), ((13, 6), 3, 2), ((28, 7), 4, 4), ((14, 7), 3, 2), ((7, 5), 3, 1), ((5, 5), 1, 1)],
)
def test_a_strided_projection_covers_the_map(sizes: tuple[int, int], kernel: int, stride: int) -> None:
    start, end = sizes
    module = projection_convolution(2, (start, start), 3, (end, end), reduction="strided")
    assert (module.kernel_size, module.stride) == ((kernel, kernel), (stride, stride))
    inputs = torch.randn(1, 2, start, start, requires_grad=True)
    result = module(inputs)
    assert result.shape == (1, 3, end, end)
    result.square().sum().backward()
    assert inputs.grad.ne(0).all()  # no position is left out


def test_a_pooled_projection_is_a_mean_and_a_pointwise_convolution() -> None:
    maps = torch.randn(2, 5, 12, 12)
    module = projection_layer((5, 12, 12), 3, (4, 4), reduction="pooled")
    means = maps.unflatten(2, (4, 3)).unflatten(4, (4, 3)).mean((3, 5))
    expected = torch.einsum("oc,nchw->nohw", module[1].weight[:, :, 0, 0], means) + module[1].bias[:, None, None]  # type: ignore[index]
    torch.testing.assert_close(module(maps), expected)
    assert isinstance(projection_layer((5, 4, 4), 3, (4, 4), reduction="pooled"), nn.Conv2d)
