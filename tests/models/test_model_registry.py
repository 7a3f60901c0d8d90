"""Names, options and the seeded construction of networks."""

from __future__ import annotations

import pytest
import torch

from fedshift.errors import UserError
from fedshift.models import registry

OTHERS = ("mlp", "linear", "frozen", "unet", "clip", "clip_text")
"""Networks that do not read images alone."""
NEEDED: dict[str, dict[str, object]] = {
    "frozen": {"backbone": {"name": "resnet18", "pretrained": True}},
    "clip": {"pretrained": "folder"},
    "clip_text": {"pretrained": "folder", "class_names": ["a", "b"]},
}
"""Fields without a default."""
IMAGE_NETWORKS = tuple(name for name in registry.names() if name not in OTHERS)


def test_every_name_leads_to_options_of_that_name() -> None:
    assert set(OTHERS) <= set(registry.names())
    for name in registry.names():
        options = registry.parse({"name": name, **NEEDED.get(name, {})})
        assert options.name == name
        assert type(options) is registry.options_class(name)
        assert registry.parse(options.model_dump(mode="json")) == options


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "resnet81"}, r"unknown model 'resnet81'; did you mean 'resnet18'\?"),
        ({}, r"model\.name: .*known: alexnet, "),
        ({"name": 3}, r"model\.name"),
        ({"name": "mnist_cnn", "hiden": 64}, r"model\.hiden: .*did you mean 'hidden'\?"),
        ({"name": "mnist_cnn", "hidden": 0}, r"model\.hidden: .*greater than 0"),
        ({"name": "mnist_cnn", "channels": [16]}, r"model\.channels\.1: "),
        ({"name": "mlp", "hidden": []}, r"model\.hidden: .*at least (1|one)"),
        ({"name": "mlp", "dropout": 1.0}, r"model\.dropout: .*less than 1"),
        ({"name": "digit_cnn", "variant": "codes"}, r"model\.variant: .*'code' or 'paper'"),
        ({"name": "mlp", "pretrained": True}, r"model\.pretrained: model 'mlp' has no such field"),
    ],
)
def test_bad_options_are_told_in_one_line(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        registry.parse(mapping)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_image_networks_refuse_vectors(name: str) -> None:
    with pytest.raises(UserError, match=rf"'{name}' .*images.* vectors of 1280 .*mlp"):  # else it belongs into OTHERS
        registry.build(registry.parse({"name": name}), (1280,), 7, 0)


def test_no_class_is_refused() -> None:
    with pytest.raises(UserError, match="no class"):
        registry.build(registry.parse({"name": "linear"}), (4,), 0, 0)


@pytest.mark.parametrize(
    ("name", "shape"), [("mnist_cnn", (1, 28, 28)), ("mlp", (13,)), ("linear", (13,)), ("mobilenet_v2", (3, 64, 64))]
)
def test_the_seed_alone_decides_the_weights(name: str, shape: tuple[int, ...]) -> None:
    options = registry.parse({"name": name})
    torch.manual_seed(5)
    first = registry.build(options, shape, 7, seed=3).state_dict()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = registry.build(options, shape, 7, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator must not move"
    other = registry.build(options, shape, 7, seed=4).state_dict()
    assert registry.build(options, shape, 7, seed=4).seed == 4
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_image_networks_are_channels_last() -> None:
    network = registry.build(registry.parse({"name": "mnist_cnn"}), (3, 28, 28), 10, 0)
    kernels = network.get_submodule("features.conv2.0").weight
    assert isinstance(kernels, torch.Tensor)
    assert kernels.is_contiguous(memory_format=torch.channels_last)
    assert not kernels.is_contiguous()
