"""Shapes of stages, sizes of inputs, gradients and modes of every network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.networks.frozen import Extractor, Frozen
from fedshift.models.networks.vision import GreyToColour, TensorFlowConv2d
from tried import slow_after


def network(shape: tuple[int, ...], classes: int = 7, **options: object) -> Network:
    return registry.build(registry.parse(options), shape, classes, seed=0)


def shapes_of_stages(model: Network, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shape of each stage for one sample; also checks logits and embedding."""
    with torch.no_grad():
        model.eval()
        inputs = torch.rand(2, *shape, device=model.classifier.weight.device)
        logits, seen = model.with_stages(inputs, tuple(model.stages))
        assert logits.shape == (2, model.classes)
        assert model.features(inputs).shape == (2, model.embedding_size)
    assert set(model.alignment_stages) <= set(model.stages)
    return {name: tuple(output.shape[1:]) for name, output in seen.items()}


def test_stages_of_mnist_cnn() -> None:
    assert shapes_of_stages(network((1, 28, 28), name="mnist_cnn"), (1, 28, 28)) == {
        "conv1": (16, 12, 12),
        "conv2": (32, 4, 4),
        "hidden": (128,),
    }
    wide = network((3, 28, 28), name="mnist_cnn", channels=(32, 64), hidden=512)
    assert wide.alignment_stages == ("conv1", "conv2")
    assert shapes_of_stages(wide, (3, 28, 28))["conv2"] == (64, 4, 4)


@pytest.mark.parametrize(("size", "conv2"), [(8, 2), (15, 3), (16, 1), (28, 4), (32, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_mnist_cnn_pads_only_below_16_pixels(size: int, conv2: int, channels: int) -> None:
    shape = (channels, size, size)
    assert shapes_of_stages(network(shape, name="mnist_cnn"), shape)["conv2"] == (32, conv2, conv2)


@pytest.mark.slow
@given(channels=st.integers(1, 4), height=st.integers(4, 40), width=st.integers(4, 40))
def test_digit_networks_take_any_size_from_4_pixels(channels: int, height: int, width: int) -> None:
    shape = (channels, height, width)
    with torch.device("meta"):
        for name in ("mnist_cnn", "digit_cnn"):
            shapes_of_stages(network(shape, name=name), shape)


def test_mnist_cnn_says_when_nothing_is_left() -> None:
    with pytest.raises(UserError, match=r"8x8 .*padding 0.* model\.padding"):
        network((1, 8, 8), name="mnist_cnn", padding=0)
    with pytest.raises(UserError, match="images of 3x9"):
        network((1, 3, 9), name="mnist_cnn")


def test_stages_of_digit_cnn() -> None:
    with torch.device("meta"):
        code = network((3, 32, 32), 10, name="digit_cnn")
        paper = network((3, 32, 32), 10, name="digit_cnn", variant="paper")
        convolutions = {"conv1": (64, 16, 16), "conv2": (64, 8, 8), "conv3": (128, 8, 8)}
        assert shapes_of_stages(code, (3, 32, 32)) == {**convolutions, "hidden1": (3072,), "hidden2": (2048,)}
        assert shapes_of_stages(paper, (3, 32, 32)) == convolutions
        narrow = network((3, 32, 32), 10, name="digit_cnn", variant="paper", channels=[4, 8, 6])
        expected = {"conv1": (4, 16, 16), "conv2": (8, 8, 8), "conv3": (6, 8, 8)}
        assert shapes_of_stages(narrow, (3, 32, 32)) == expected
    assert paper.embedding_size == 8192
    assert narrow.embedding_size == 384


def test_mlp_of_kd3a_and_its_switches() -> None:
    model = network((5000,), 2, name="mlp", hidden=[1000, 500, 100])
    assert shapes_of_stages(model, (5000,)) == {"hidden1": (1000,), "hidden2": (500,), "hidden3": (100,)}
    assert model.alignment_stages == ("hidden1", "hidden2", "hidden3")
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.Dropout)]
    switched = network((5,), name="mlp", hidden=(4, 3), batch_norm=True, dropout=0.25)
    assert [module.num_features for module in switched.modules() if isinstance(module, nn.BatchNorm1d)] == [4, 3]
    assert [module.p for module in switched.modules() if isinstance(module, nn.Dropout)] == [0.25, 0.25]


def test_linear_is_a_linear_map_of_its_inputs() -> None:
    model = network((6,), name="linear")
    inputs = torch.randn(4, 6)
    logits, seen = model.with_stages(inputs, model.alignment_stages)
    assert torch.equal(seen["input"], inputs)
    assert torch.allclose(logits, inputs @ model.classifier.weight.T + model.classifier.bias, atol=1e-6)


def test_vector_networks_flatten_images() -> None:
    for name in ("mlp", "linear"):
        assert network((3, 4, 5), name=name)(torch.rand(2, 3, 4, 5)).shape == (2, 7)


EXPECTED_STAGES = {
    "resnet18": {
        "stem": (64, 56, 56),
        "block1": (64, 56, 56),
        "block2": (128, 28, 28),
        "block3": (256, 14, 14),
        "block4": (512, 7, 7),
    },
    "resnet50": {
        "stem": (64, 56, 56),
        "block1": (256, 56, 56),
        "block2": (512, 28, 28),
        "block3": (1024, 14, 14),
        "block4": (2048, 7, 7),
    },
    "alexnet": {
        "conv1": (64, 55, 55),
        "conv2": (192, 27, 27),
        "conv3": (384, 13, 13),
        "conv4": (256, 13, 13),
        "conv5": (256, 6, 6),
    },
    "mobilenet_v2": {
        "stem": (32, 112, 112),
        "block1": (16, 112, 112),
        "block2": (24, 56, 56),
        "block3": (32, 28, 28),
        "block4": (96, 14, 14),
        "block5": (320, 7, 7),
        "last": (1280, 7, 7),
    },
}


@pytest.mark.parametrize("name", EXPECTED_STAGES)
def test_stages_of_vision_networks_at_224_pixels(name: str) -> None:
    with torch.device("meta"):
        model = network((3, 224, 224), name=name)
        assert shapes_of_stages(model, (3, 224, 224)) == EXPECTED_STAGES[name]


def test_csac_aligns_the_stages_of_the_paper() -> None:
    with torch.device("meta"):
        assert network((3, 224, 224), name="resnet18").alignment_stages == ("block2", "block3", "block4")
        assert network((3, 224, 224), name="alexnet").alignment_stages == ("conv3", "conv4", "conv5")


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("resnet18", 64), ("mobilenet_v2", 64), ("alexnet", 63)])
@pytest.mark.parametrize("channels", slow_after(1, [1, 3]))
def test_vision_networks_take_small_and_grey_images(name: str, size: int, channels: int) -> None:
    with torch.device("meta"):
        model = network((channels, size, size), name=name, bottleneck=32)
        shapes_of_stages(model, (channels, size, size))
    assert model.embedding_size == 32


def test_vision_networks_refuse_what_they_cannot_read() -> None:
    with pytest.raises(UserError, match=r"'alexnet' .*63x63.*62x80"):
        network((3, 62, 80), name="alexnet")
    with pytest.raises(UserError, match=r"grey or colour.* 4 channels"):
        network((4, 64, 64), name="resnet18")


def test_grey_images_are_seen_as_colour() -> None:
    grey = torch.rand(2, 1, 64, 64)
    single, colour = network((1, 64, 64), name="mobilenet_v2").eval(), network((3, 64, 64), name="mobilenet_v2").eval()
    assert single.state_dict().keys() == colour.state_dict().keys()
    assert torch.equal(GreyToColour()(grey), torch.cat([grey] * 3, dim=1))
    assert torch.allclose(single(grey), colour(grey.repeat(1, 3, 1, 1)), atol=1e-5)


def test_last_layer_of_alexnet_has_gain_a_tenth() -> None:
    model = network((3, 64, 64), name="alexnet")
    bound = 0.1 * (6 / (4096 + 7)) ** 0.5
    assert 0.9 * bound < float(model.classifier.weight.detach().abs().max()) <= bound
    assert not model.classifier.bias.any()


@pytest.mark.parametrize("size", [6, 7])
def test_tensorflow_padding(size: int) -> None:
    convolution = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
    same = TensorFlowConv2d.like(convolution)
    inputs = torch.randn(3, 2, size, size)
    # At even sizes one zero at the bottom and right; at odd sizes one on every side, as torchvision does.
    padded = functional.pad(inputs, (0, 1, 0, 1) if size == 6 else (1, 1, 1, 1))
    by_hand = functional.conv2d(padded, convolution.weight, convolution.bias, stride=2, groups=2)
    assert torch.equal(same(inputs), by_hand)
    assert torch.allclose(same(inputs), convolution(inputs), atol=1e-6) == (size == 7)


SMALL = {
    "mnist_cnn": ((1, 12, 12), {}),
    "digit_cnn": ((3, 8, 8), {}),
    "mlp": ((9,), {"batch_norm": True, "dropout": 0.5}),
    "linear": ((9,), {}),
    "resnet18": ((3, 32, 32), {"bottleneck": 16}),
    "mobilenet_v2": ((1, 32, 32), {"padding": "tensorflow"}),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient_and_eval_takes_one_sample(name: str) -> None:
    shape, options = SMALL[name]
    model = network(shape, name=name, **options)
    functional.cross_entropy(model.train()(torch.rand(8, *shape)), torch.arange(8) % 7).backward()
    assert not [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    model.eval()
    with torch.no_grad():
        batch = torch.rand(3, *shape)
        assert torch.allclose(model(batch[:1]), model(batch)[:1], atol=1e-4)


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("alexnet", 64), ("mobilenet_v2", 32)])
def test_collected_stages_are_not_changed_by_later_layers(name: str, size: int) -> None:
    """torchvision's activations work in place: a stage must not be a tensor that a later layer overwrites."""
    model = network((3, size, size), name=name).eval()
    copies: dict[str, torch.Tensor] = {}
    for stage, path in model.stages.items():

        def keep(_module: nn.Module, _inputs: object, output: torch.Tensor, stage: str = stage) -> None:
            copies[stage] = output.clone()

        model.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        _, seen = model.with_stages(torch.rand(1, 3, size, size), tuple(model.stages))
    for stage in model.stages:
        assert torch.equal(seen[stage], copies[stage]), stage


STAGES = [("resnet18", "block4"), ("resnet18", "block1"), ("alexnet", "conv5"), ("mobilenet_v2", "block5")]


@pytest.mark.parametrize(("name", "stage"), slow_after(1, STAGES))
def test_stages_before_the_first_trained_one_stay(name: str, stage: str) -> None:
    """One step of training changes nothing up to the stage before, and every parameter of the stage."""
    model = network((3, 64, 64), name=name, trained_from=stage).train()
    names = list(model.stages)
    before = names[names.index(stage) - 1]
    inputs = torch.rand(4, 3, 64, 64)
    _, seen = model.with_stages(inputs, (before,))
    optimizer = torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=0.1)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    functional.cross_entropy(model(inputs), torch.arange(4)).backward()
    optimizer.step()
    model.train()
    _, after = model.with_stages(inputs, (before,))
    assert torch.equal(seen[before], after[before]), "its BatchNorm kept its statistics too"
    moved = {key for key, value in model.state_dict().items() if not torch.equal(start[key], value)}
    fixed = {key for key, value in model.named_parameters() if not value.requires_grad}
    assert not fixed & moved
    assert fixed
    assert {key for key, value in model.named_parameters() if value.requires_grad} <= moved
    whole = network((3, 64, 64), name=name)
    assert {key: value.shape for key, value in whole.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }


def test_stored_statistics_are_used_in_training_and_never_change() -> None:
    model = network((3, 32, 32), name="resnet18", batch_norm="stored").train()
    start = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    inputs = torch.rand(4, 3, 32, 32)
    trained = model(inputs)
    assert torch.equal(trained, model.eval()(inputs))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in start.items())
    functional.cross_entropy(trained, torch.arange(4)).backward()
    assert not [key for key, value in model.named_parameters() if value.grad is None], "scales are still trained"


def test_a_stage_that_is_not_there_cannot_be_the_first_trained_one() -> None:
    with pytest.raises(UserError, match=r"model\.trained_from: 'resnet18' has no stage 'block9'; did you mean"):
        network((3, 32, 32), name="resnet18", trained_from="block9")


def test_unknown_stage_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"no stage 'conv3'; did you mean 'conv"):
        network((1, 28, 28), name="mnist_cnn").with_stages(torch.rand(1, 1, 28, 28), ["conv3"])


def test_an_extractor_learns_nothing() -> None:
    options = Frozen.model_construct(size=8, scale="imagenet")
    extractor = Extractor(nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)), options).train()
    before = {name: value.clone() for name, value in extractor.state_dict().items()}
    assert not extractor(torch.randint(0, 255, (4, 3, 8, 8), dtype=torch.uint8)).requires_grad
    assert not any(parameter.requires_grad for parameter in extractor.parameters())
    assert all(torch.equal(value, before[name]) for name, value in extractor.state_dict().items())
