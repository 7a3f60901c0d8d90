"""Networks of timm, torchvision and transformers: names, weights from files, and no download."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.network import Network

NAME = "torchvision:shufflenet_v2_x0_5"


def built(name: str, shape: tuple[int, ...] = (3, 32, 32), classes: int = 3, **more: Any) -> Network:
    options = registry.parse({"name": name, **more}, permit=registry.any_code)
    return registry.build(options, shape, classes, 0)


def test_weights_come_from_a_file_and_the_last_layer_is_new(tmp_path: Path) -> None:
    import torchvision

    file = tmp_path / "weights.safetensors"
    published = torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=7).state_dict()
    save_file({name: tensor.clone() for name, tensor in published.items()}, file)
    fresh, loaded = built(NAME), built(NAME, pretrained=str(file))
    assert torch.equal(loaded.features.conv5[0].weight, published["conv5.0.weight"])
    assert not torch.equal(fresh.features.conv5[0].weight, published["conv5.0.weight"])
    assert torch.equal(loaded.classifier.weight, fresh.classifier.weight)
    assert loaded.classifier.out_features == 3


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("torchvision:resnet8", {}, "no classifier 'resnet8'"),
        (NAME, {"weights": "DEFAULT"}, r"model\.weights: .*pretrained"),
        (NAME, {"depth": 3}, "cannot be made .*depth"),
        (NAME, {"pretrained": True}, "nothing is downloaded by itself"),
        (NAME, {"pretrained": "gone.safetensors"}, "no weights file"),
    ],
)
def test_what_a_library_lacks_is_told_in_one_line(
    name: str, more: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UserError, match=said) as told:
        built(name, **more)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("name", "package"), [("timm:resnet18", "timm"), ("hf:vit", "transformers")])
def test_a_missing_library_is_told_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{package}.*fedshift\[networks\]"):
        built(name)


@pytest.mark.slow
def test_networks_of_timm() -> None:
    pytest.importorskip("timm")
    network = built("timm:mobilenetv3_small_100")
    assert network.embedding_size == 1024
    assert list(network.alignment_stages) == ["blocks.0", "blocks.1", "blocks.3"]
    with pytest.raises(UserError, match="no network 'mobilenetv3_smal_100'; did you mean"):
        built("timm:mobilenetv3_smal_100")
    with pytest.raises(UserError, match=r"model\.checkpoint_path"):  # it would open a pickle
        built("timm:mobilenetv3_small_100", checkpoint_path="somewhere.pth")


@pytest.mark.slow
def test_networks_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    network = built("hf:vit", patch_size=8, **sizes)
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    assert network.embedding_size == 16
    assert len(network.stages) == 4
    with pytest.raises(UserError, match="nothing is downloaded by itself"):
        built(f"hf:{tmp_path}/gone")
