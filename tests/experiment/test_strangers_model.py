"""A model file of somebody else: it takes no more memory than its size warrants, and nothing is downloaded for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedshift.errors import UserError
from fedshift.experiment import predict
from fedshift.experiment.predict import load_model
from fedshift.models import pretrained
from fedshift.models.network import Network

HONEST = {"classifier.weight": torch.ones(2, 3), "classifier.bias": torch.zeros(2)}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of the networks that are built."""
    devices: list[str] = []
    real = predict.models.build

    def build(*arguments: Any) -> Network:
        network = real(*arguments)
        devices.extend(parameter.device.type for parameter in network.parameters())
        return network

    monkeypatch.setattr(predict.models, "build", build)
    return devices


def write(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A model file that says of itself what ``changes`` say; by default an honest one of a linear model."""
    metadata = {
        "method": {"name": "fedavg"},
        "sources": ["a"],
        "model": {"name": "linear"},
        "input_shape": [3],
        "classes": ["a", "b"],
        "preprocessing": {"kind": "features", "shape": [3]},
        **changes,
    }
    save_file(dict(tensors or HONEST), folder / "model.safetensors", {"fedshift": json.dumps(metadata)})
    return folder


def test_honest_files_predict(tmp_path: Path, built: list[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3), np.float32))
    assert len(load_model(write(tmp_path)).predict(tmp_path / "x.npz")) == 2
    assert {"meta", "cpu"} == set(built)
    assert load_model(write(tmp_path, sources=[f"site{number}" for number in range(100)])).classes == ("a", "b")


ABSURD: dict[str, dict[str, Any]] = {
    "layers": {"model": {"name": "mlp", "hidden": [3000, 3000]}},
    "many layers": {"model": {"name": "mlp", "hidden": [2] * 50_000}},
    "a generator": {"method": {"name": "fedadg", "generator_hidden": 3_000_000}},
    "sources": {"sources": ["a"] * 1000, "method": {"name": "alone"}},
    "classes": {"classes": [str(number) for number in range(5000)]},
    "a bottleneck": {"method": {"name": "shot", "bottleneck": 100_000_000}},
    "inputs": {"input_shape": [100_000_000]},
    "images": {"preprocessing": {"kind": "image", "channels": 3, "size": 60_000}},
    "shape": {"preprocessing": {"kind": "image", "shape": [3, 60_000, 60_000]}},
}


@pytest.mark.threat("large_model")
@pytest.mark.parametrize("case", ABSURD)
def test_a_file_whose_network_is_much_larger_is_not_made(case: str, tmp_path: Path, built: list[str]) -> None:
    with pytest.raises(UserError, match=r"damaged or was not written by fedshift|model\.hidden") as caught:
        load_model(write(tmp_path, **ABSURD[case]))
    assert len(str(caught.value)) < 600
    assert set(built) <= {"meta"}, "memory was taken"


BACKBONE = {"name": "frozen", "backbone": {"name": "resnet18", "pretrained": True}}


@pytest.mark.threat("large_model")
@pytest.mark.parametrize("weights", [True, "IMAGENET1K_V1"])
def test_nothing_is_downloaded(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_download", lambda *_: pytest.fail("a download was tried"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    images = {"kind": "image", "channels": 3, "size": 8, "shape": [3, 8, 8]}
    backbone = {**BACKBONE, "backbone": {"name": "resnet18", "pretrained": weights}}
    record = {"model": backbone, "images": images, "weights": "x"}
    model = load_model(write(tmp_path, preprocessing={"kind": "features", "shape": [3], "backbone": record}))
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3, 8, 8), np.uint8))
    with pytest.raises(UserError, match="nothing is downloaded"):
        model.predict(tmp_path / "x.npz")
    load_model(write(tmp_path, model={"name": "linear", "pretrained": weights}))


def test_a_backbone_of_absurd_width_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    images = {"kind": "image", "channels": 3, "size": 8, "shape": [3, 8, 8]}
    wide = {**BACKBONE, "backbone": {**BACKBONE["backbone"], "bottleneck": 1_000_000}}  # type: ignore[dict-item]
    record = {"model": wide, "images": images, "weights": "x"}
    model = load_model(write(tmp_path, preprocessing={"kind": "features", "shape": [3], "backbone": record}))
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3, 8, 8), np.uint8))
    with pytest.raises(UserError, match="absurd"):
        model.predict(tmp_path / "x.npz")
