"""Sizes on the wire against a reference table, and costs against published counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.payload import Payload, forward_cost, payload
from tried import slow_after


def network(shape: tuple[int, ...], classes: int, **options: object) -> Network:
    with torch.device("meta"):
        return registry.build(registry.parse(options), shape, classes, seed=0)


COLOUR = (3, 224, 224)


@pytest.mark.parametrize(
    ("options", "shape", "classes", "last_layer", "expected"),
    [
        ({"name": "resnet18"}, COLOUR, 7, False, (11_176_512, 44_744_608)),
        ({"name": "resnet18", "bottleneck": 256}, COLOUR, 7, True, (11_310_151, 45_281_220)),
        ({"name": "resnet50"}, COLOUR, 7, False, (23_508_032, 94_245_032)),
        ({"name": "resnet101"}, COLOUR, 7, False, (42_500_160, 170_422_848)),
        ({"name": "resnet101"}, COLOUR, 345, True, (43_207_065, 173_250_468)),
        ({"name": "digit_cnn"}, (3, 32, 32), 10, True, (31_805_898, 127_266_640)),
    ],
    ids=["ResNet-18", "CSAC ResNet-18", "ResNet-50", "ResNet-101", "KD3A DomainNet", "KD3A Digit-5"],
)
def test_reference_table(
    options: dict[str, object], shape: tuple[int, ...], classes: int, last_layer: bool, expected: tuple[int, int]
) -> None:
    model = network(shape, classes, **options)
    counted = model if last_layer else model.features
    assert payload(counted) == Payload(*expected)


def test_fedsr_heads_of_the_reference_table() -> None:
    """ResNet-18 with mean and scale heads of 512 and a 7-way classifier."""
    model = network(COLOUR, 7, name="resnet18")
    with torch.device("meta"):
        whole = nn.ModuleList([model.features, nn.Linear(512, 1024), nn.Linear(512, 7)])
    assert payload(whole) == Payload(11_705_415, 46_860_220)


def test_other_types_count_with_their_own_size() -> None:
    model = nn.BatchNorm1d(3).half()  # float16, and a counter of int64
    assert payload(model) == Payload(6, 2 * 12 + 8)
    assert payload(nn.Identity()) == Payload(0, 0)


@pytest.mark.parametrize("name", slow_after(1, ["resnet18", "resnet50", "resnet101", "alexnet", "mobilenet_v2"]))
def test_costs_agree_with_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    published = models.get_model_weights(name).DEFAULT.meta["_ops"]
    # torchvision prints billions with three digits and, as here, counts multiply-accumulates.
    assert forward_cost(network(COLOUR, 1000, name=name), COLOUR) / 1e9 == pytest.approx(published, abs=0.006)


def test_counting_leaves_the_network_as_it_was() -> None:
    model = registry.build(registry.parse({"name": "digit_cnn"}), (3, 8, 8), 10, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    # 8²·64·3·25 + 4²·64·64·25 + 2²·128·64·25 + 512·3072 + 3072·2048 + 2048·10
    assert forward_cost(model, (3, 8, 8)) == 307_200 + 1_638_400 + 819_200 + 1_572_864 + 6_291_456 + 20_480
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
