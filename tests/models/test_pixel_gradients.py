"""The convolution with fast gradients by its inputs is the plain one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from fedshift.models.instance_methods import has_method
from fedshift.models.pixel_gradients import gradient_by_images, with_pixel_gradients


@pytest.mark.parametrize(("channels", "kernel", "padding"), [(1, (5, 5), (0, 0)), (3, (3, 2), (1, 1)), (1, 4, (2, 0))])
def test_it_is_the_gradient_of_a_convolution(channels: int, kernel: int, padding: tuple[int, int]) -> None:
    convolution = nn.Conv2d(channels, 4, kernel, padding=padding).double()
    images = torch.randn(2, channels, 7, 6, dtype=torch.float64, requires_grad=True)
    said = convolution(images)
    (expected,) = torch.autograd.grad(said, images, outer := torch.randn_like(said))
    torch.testing.assert_close(gradient_by_images(outer, convolution.weight, padding), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_network_keeps_outputs_gradients_and_second_gradients(bias: bool) -> None:
    plain = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(3, 1, 2)).double()
    fast = with_pixel_gradients(copy.deepcopy(plain))
    assert has_method(fast[0], "forward")
    assert not has_method(fast[2], "forward")
    assert fast.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(2, 1, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(fast(images), plain(images))
    found = [torch.autograd.grad(one(images).square().sum(), [images, *one.parameters()]) for one in (fast, plain)]
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)
    weights = tuple(fast[0].parameters())
    assert gradcheck(lambda x, *_: fast[0](x), (images, *weights))
    assert gradgradcheck(lambda x, *_: fast[0](x), (images, *weights))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3),
        nn.Conv2d(1, 3, 3, stride=2),
        nn.Conv2d(1, 3, 3, dilation=2),
        nn.Conv2d(1, 3, 3, padding="same"),
        nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect"),
        nn.Linear(1, 3),
    ],
)
def test_other_layers_stay(layer: nn.Module) -> None:
    assert not has_method(with_pixel_gradients(layer), "forward")


def test_without_a_gradient_by_the_inputs_it_is_torch_s() -> None:
    layer = with_pixel_gradients(nn.Conv2d(1, 2, 3))
    assert "ConvolutionBackward" in repr(_graph(layer(torch.zeros(1, 1, 4, 4))))
    assert "ByImages" in repr(_graph(layer(torch.zeros(1, 1, 4, 4, requires_grad=True))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "ConvolutionBackward" in repr(_graph(layer(torch.zeros(1, 1, 4, 4, requires_grad=True))))


def _graph(found: Tensor) -> object:
    return found.grad_fn
