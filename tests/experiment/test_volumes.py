"""Volumes from the experiment file to masks: networks by name, parts, methods, equal bits in a pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedshift
from fedshift.data.builders.scanned_balls import ScannedBalls
from fedshift.data.transforms import random_parts
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.sliding import scores_of
from tried import slow

MONAI = {"name": "monai:UNet", "channels": [4, 8], "strides": [2]}
BASIC = {"name": "monai:BasicUNet", "features": [4, 4, 8, 8, 8, 4]}
TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "scanned_balls", "size": 16, "per_site": 4},
    "protocol": {"targets": "east", "seeds": [0], "test_fraction": 0.3},
    "model": {"name": "unet", "levels": 3, "width": 4, "threshold": 0.5},
    "training": {"rounds": 2, "batch_size": 2, "optimizer": "adam", "lr": 0.01},
    "methods": ["fedavg", "recipe", {"name": "elcfs", "window": 0.1}],
    "engine": {"threads": 1},
    "device": "cpu",
}


@pytest.fixture(scope="module", autouse=True)
def monai_networks() -> Any:
    """Imported where a test runs: it takes seconds, in every process that collects tests."""
    return pytest.importorskip("monai.networks.nets")


def built(shape: tuple[int, ...], classes: int = 2, **section: Any) -> Network:
    return registry.build(registry.parse(section, permit=registry.any_code), shape, classes, 0)


def test_a_network_of_monai_is_monais_own(monai_networks: Any) -> None:
    """The same weights from the same draws, and the same scores."""
    found = built((1, 16, 16, 16), **MONAI)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = monai_networks.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=[4, 8], strides=[2])
    volumes = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.eval()(volumes), plain.eval()(volumes))


@pytest.mark.parametrize(
    ("section", "shape", "classifier"),
    [
        (BASIC, (1, 32, 32, 32), "final_conv"),
        ({"name": "monai:UNet", "channels": [4, 8], "strides": [2]}, (3, 16, 16), None),
        ({"name": "monai:Classifier", "channels": [4, 8], "strides": [2, 2]}, (1, 16, 16, 16), None),
        ({"name": "smp:Unet", "encoder_name": "timm-mobilenetv3_small_minimal_100"}, (3, 64, 64), None),
    ],
)
def test_networks_by_name(section: dict[str, Any], shape: tuple[int, ...], classifier: str | None) -> None:
    if section["name"].startswith("smp"):
        pytest.importorskip("segmentation_models_pytorch")
    found = built(shape, **section).eval()
    samples = torch.rand(2, *shape)
    scores = found(samples)
    assert scores.shape[:2] == (2, 2)
    assert scores.shape[2:] in ((), shape[1:])
    if classifier is not None:
        assert torch.equal(found.classifier(found.features(samples)), scores)


@pytest.mark.parametrize(
    ("section", "shape", "message"),
    [
        ({"name": "monai:UNett"}, (1, 8, 8), "no network 'UNett'; did you mean 'UNet'"),
        ({"name": "smp:Unett"}, (3, 8, 8), "no network 'Unett'; did you mean 'Unet'"),
        ({**MONAI, "in_channels": 2}, (1, 8, 8), r"model\.in_channels: .*the data say it"),
        ({"name": "smp:Unet", "encoder_weights": "imagenet"}, (3, 8, 8), r"model\.encoder_weights: "),
        ({"name": "monai:DenseNet121", "pretrained": True}, (1, 8, 8), r"model\.pretrained: "),
        ({**MONAI, "depth": 3}, (1, 8, 8), "cannot be made .*depth"),
        ({"name": "smp:Unet"}, (1, 16, 16, 16), "reads images, .* choose monai:UNet"),
        ({"name": "unet"}, (1, 20, 32, 32), "multiples of 16"),
    ],
)
def test_mistakes_are_one_line(section: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        built(shape, **section)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "package"), [("monai:UNet", "monai.networks.nets"), ("smp:Unet", "segmentation_models_pytorch")]
)
def test_a_missing_library_is_one_line(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"fedshift\[volumes\]"):
        built((1, 8, 8), name=name)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_parts_of_volumes_and_of_masks() -> None:
    volumes = torch.arange(6 * 6 * 6).view(1, 1, 6, 6, 6).repeat(500, 1, 1, 1, 1)
    parts, masks = random_parts(volumes, volumes.repeat(1, 2, 1, 1, 1), (4, 5, 6), torch.Generator().manual_seed(0))
    assert parts.shape == (500, 1, 4, 5, 6)
    assert torch.equal(parts, masks[:, :1])
    first, number = parts[:, 0, 0, 0, 0].unique(return_counts=True)
    assert first.tolist() == [36 * z + 6 * y for z in range(3) for y in range(2)]
    assert number.min() > 500 / 6 - 40  # six places, each as likely
    assert torch.equal(parts[0, 0] - parts[0, 0, 0, 0, 0], volumes[0, 0, :4, :5])
    # Of a network that looks at one voxel at a time; parts do not divide the sides.
    network = nn.Sequential(nn.Conv3d(1, 3, 1), nn.ReLU(), nn.Conv3d(3, 2, 1))
    volumes = torch.rand(2, 1, 11, 13, 9)
    with torch.no_grad():
        torch.testing.assert_close(scores_of(network, volumes, (4, 5, 6)), network(volumes))
        assert torch.equal(scores_of(network, volumes, None), network(volumes))


def test_training_reads_parts_and_measuring_whole_volumes(tmp_path: Path) -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []

    def watched(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Watched(nn.Conv3d):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                seen.append((self.training, tuple(inputs.shape[2:])))
                return super().forward(inputs)

        return Watched(1, classes, 3, padding=1)

    experiment = {**TINY, "model": watched, "methods": ["fedavg"], "data": {**TINY["data"], "patch": [8, 8, 8]}}
    results = fedshift.run(experiment, tmp_path)
    assert {shape for _, shape in seen} == {(8, 8, 8)}
    model = fedshift.Model.load(results.folder / "fedavg" / "east" / "seed-0", network=watched)
    data = ScannedBalls(size=16, per_site=4).build().domains["east"]
    masks = model.predict(np.asarray(data.inputs))
    assert masks.shape == (4, 2, 16, 16, 16)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [slow(TINY["model"]), MONAI], ids=["unet", "monai:UNet"])
def test_methods_train_a_network_of_volumes(model: dict[str, Any], tmp_path: Path) -> None:
    methods = TINY["methods"] if model is not MONAI else ["fedavg", "recipe", "deepall"]
    results = fedshift.run({**TINY, "model": model, "methods": methods}, tmp_path)
    weights = {}
    for run in results.runs:
        last = run.selected["last"]
        assert last.hd95 is not None
        assert 0 <= last.accuracy <= 100
        folder = results.folder / run.method / "east" / "seed-0"
        weights[run.method] = load_file(folder / "model.safetensors")
        assert load_model(folder, own_network=model["name"] if ":" in model["name"] else None).segments
    first, *others = weights.values()
    assert all(any(not torch.equal(first[key], other[key]) for key in first) for other in others)


@pytest.mark.slow
def test_a_federation_learns_the_organ_at_an_unseen_scanner(tmp_path: Path) -> None:
    """From chance to half of the overlap, with ELCFS's meta step, too."""
    training = {**TINY["training"], "rounds": 9}
    data = {**TINY["data"], "per_site": 6}
    methods = ["fedavg", {"name": "elcfs", "window": 0.1, "setting": "light"}]
    results = fedshift.run({**TINY, "data": data, "training": training, "methods": methods}, tmp_path)
    for run in results.runs:
        last = run.selected["last"]
        organ = last.per_class[1]
        assert organ > 50, run.method


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_workers_give_the_same_weights(tmp_path: Path) -> None:
    training, parts = {**TINY["training"], "rounds": 1}, {**TINY["data"], "patch": [8, 8, 8]}
    for name, changes in (("unet", {}), ("parts", {"model": MONAI, "data": parts})):
        methods = ["recipe", "elcfs"] if name == "unet" else ["fedavg"]
        one, two = (
            fedshift.run({**TINY, **changes, "training": training, "methods": methods,
                          "engine": {"threads": 1, "workers": workers}}, tmp_path / f"{name}-{workers}")
            for workers in (1, 2)
        )  # fmt: skip
        for run in one.runs:
            weights, others = (
                load_file(found.folder / run.method / "east" / "seed-0" / "model.safetensors") for found in (one, two)
            )
            assert all(torch.equal(weights[key], others[key]) for key in weights)


def test_what_does_not_go_with_masks_of_volumes_is_one_line(tmp_path: Path) -> None:
    parts = {**TINY["data"], "patch": [8, 8, 8]}
    for changes, message in (
        ({"methods": ["csac"]}, r"csac .*classification.* segmentation: choose fedavg, "),
        ({"methods": ["elcfs"], "data": parts}, r"leave out data\.patch"),
        ({"model": "mnist_cnn"}, r"choose unet, monai:UNet or smp:Unet"),
        ({"model": {"name": "monai:Classifier", "channels": [4], "strides": [2]}, "methods": ["fedavg"]}, "shape"),
    ):
        with pytest.raises(UserError, match=message) as error:
            fedshift.run({**TINY, **changes}, tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_csac_and_the_recipe_classify_volumes(tmp_path: Path) -> None:
    """Volumes of bytes with a class each, by a classifier of MONAI."""
    draws = np.random.default_rng(0)
    for number, site in enumerate(("north", "east", "south")):
        x = draws.integers(0, 90, (12, 1, 8, 8, 8), dtype=np.uint8) + np.uint8(10 * number)
        y = np.arange(12) % 2
        x[y == 1, :, 2:6, 2:6, 2:6] += 100
        np.savez(tmp_path / f"{site}.npz", x=x, y=y)
    data = {"name": "arrays", "sites": {site: f"{site}.npz" for site in ("north", "east", "south")}}
    model = {"name": "monai:Classifier", "channels": [4, 8], "strides": [2, 2]}
    experiment = {**TINY, "data": data, "model": model, "methods": ["fedavg", "recipe", "csac"]}
    experiment["training"] = {"rounds": 1, "batch_size": 4, "lr": 0.05}
    results = fedshift.run(parse(experiment, folder=tmp_path), tmp_path / "runs")
    assert [run.method for run in results.runs] == ["fedavg", "recipe", "csac"]
    assert all(run.metric == "accuracy" for run in results.runs)
