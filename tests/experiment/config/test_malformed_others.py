"""Malformed networks, weights of classes, measures, images, exports: one line each, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from safetensors import safe_open
from safetensors.torch import save_file
from small import experiment, features, save, sites

import fedshift

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes, width=4):
        super().__init__()
        self.first = nn.Linear(input_shape[0], width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.first(x).relu())
"""
OUT = "return self.head(self.first(x).relu())"
CODE: list[tuple[str, str, str]] = [
    ("a syntax error", "class Net(:", "cannot be imported"),
    ("a package that is not there", "import no_such_package_of_mine\n" + NET, "no_such_package_of_mine"),
    ("another class", NET.replace("class Net", "class Nets"), "did you mean 'Nets'"),
    ("no class but a number", "Net = 3", "no network 'Net' of its own"),
    ("a constructor that fails", NET.replace("super().__init__()", "raise OSError('disk')"), "OSError: disk"),
    ("a constructor of one argument", NET.replace("input_shape, classes, width=4", "width"), "positional arguments"),
    ("a function that makes no module", "def Net(input_shape, classes):\n    return [1]", "gives list"),
    ("no parameters", "from torch import nn\ndef Net(i, c):\n    return nn.Identity()", "no parameters"),
    ("scores in a tuple", NET.replace(OUT, OUT.replace("return ", "return 1, ")), "returns tuple"),
    ("too many scores", NET.replace("classes)", "classes + 1)"), "(2, 4)"),
    ("one score a batch", NET.replace(OUT, OUT + ".sum()"), "shape ()"),
    ("whole numbers", NET.replace(OUT, OUT + ".argmax(1, keepdim=True).repeat(1, 3)"), "torch.int64"),
    ("scores that are no numbers", NET.replace(OUT, OUT + ".log() * float('nan')"), "NaN"),
    ("other samples", NET.replace("input_shape[0]", "9"), "cannot read samples"),
    ("no forward", NET.replace("def forward", "def forwards"), "cannot read samples"),
    ("state that is no tensor", NET + "\n    def get_extra_state(self):\n        return 3", "not a tensor"),
]
SECTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("an option that it lacks", {"model": {"name": "net.py:Net", "depth": 3}}, "depth"),
    ("a file that is not there", {"model": {"name": "nets.py:Net"}}, "nets.py"),
    ("no class in the name", {"model": {"name": "net.py:"}}, "net.py"),
    ("an object's name", {"model": {"name": "python:Net"}}, "only that process has it"),
    ("a classifier that is not there", {"model": {"name": "net.py:Net", "parts": {"classifier": "haed"}}}, "'head'"),
    ("a stage that is not there", {"model": {"name": "net.py:Net", "parts": {"stages": ["frist"]}}}, "'first'"),
    ("an aligned stage that is not there", {"model": {"name": "net.py:Net", "parts": {"aligned": ["x"]}}}, "'x'"),
    ("an unknown part", {"model": {"name": "net.py:Net", "parts": {"clasifier": "head"}}}, "'classifier'"),
    ("parts that are a word", {"model": {"name": "net.py:Net", "parts": "head"}}, "model.parts"),
    ("a network of nobody", {"model": {"name": "torchvision:resnet81"}}, "did you mean"),
    ("a frozen network of one's own", {"model": {"name": "frozen", "backbone": {"name": "net.py:Net"}}}, "comes with"),
    ("a rank of zero", {"training": {"adapters": {"rank": 0}}}, "training.adapters.rank"),
    ("a rank in words", {"training": {"adapters": {"rank": "low"}}}, "training.adapters.rank"),
    ("a scale below zero", {"training": {"adapters": {"scale": -1}}}, "training.adapters.scale"),
    ("a scale without end", {"training": {"adapters": {"scale": float("inf")}}}, "training.adapters.scale"),
    ("an unknown field of adapters", {"training": {"adapters": {"alpha": 16}}}, "training.adapters.alpha"),
    ("one target that is no list", {"training": {"adapters": {"targets": "first"}}}, "training.adapters.targets"),
    ("adapters that are a number", {"training": {"adapters": 8}}, "training.adapters"),
    ("a weight of no class", {"training": {"class_weights": {"x": 2}}}, "no class 'x'"),
    ("a weight of zero", {"training": {"class_weights": {"0": 0}}}, "training.class_weights"),
    ("a weight without end", {"training": {"class_weights": {"0": float("inf")}}}, "training.class_weights"),
    ("too few weights", {"training": {"class_weights": [1, 2]}}, "2 weights for 3 classes"),
    ("a misspelt balance", {"training": {"class_weights": "balance"}}, "training.class_weights"),
    ("weights beside privacy", {"training": {"class_weights": "balanced", "privacy": {"epsilon": 8}}}, "privacy"),
    ("a rate of no layer", {"training": {"layer_rates": {"features.frist": 2}}}, "'features.first'"),
    ("a rate of zero", {"training": {"layer_rates": {"features": 0}}}, "training.layer_rates.features: "),
    ("a backbone that never thaws", {"training": {"thaw_after": 2, "rounds": 2}}, "thaw_after: of 2 rounds"),
    ("no backbone", {"model": {"name": "mlp"}, "training": {"thaw_after": 1}}, "the network has no backbone"),
    ("a round below zero", {"training": {"thaw_after": -1}}, "training.thaw_after"),
    ("an unknown headline", {"evaluation": {"headline": "aurok"}}, "evaluation.headline"),
    ("a headline for two classes", {"evaluation": {"headline": "sensitivity"}}, "needs two classes"),
    ("resamples below zero", {"evaluation": {"resamples": -1}}, "evaluation.resamples"),
    ("predictions in words", {"evaluation": {"predictions": "some"}}, "evaluation.predictions"),
    ("an unknown field of measures", {"evaluation": {"headlines": "auroc"}}, "did you mean 'headline'"),
]


def refused(cli: Cli, folder: Path, changes: dict[str, Any], text: str = NET) -> str:
    (folder / "net.py").write_text(text)
    file = folder / "e.yaml"
    file.write_text(json.dumps(experiment(sites(folder / "data"), model={"name": "net.py:Net"}) | changes))
    line = cli("run", file, "--runs", folder / "runs").error()
    assert not (folder / "runs").exists(), "nothing is written"
    return line


@pytest.mark.parametrize(("name", "text", "word"), CODE, ids=[case[0] for case in CODE])
def test_a_malformed_network(cli: Cli, tmp_path: Path, name: str, text: str, word: str) -> None:
    assert word in refused(cli, tmp_path, {}, text)


@pytest.mark.parametrize(("name", "changes", "word"), SECTIONS, ids=[case[0] for case in SECTIONS])
def test_a_malformed_section(cli: Cli, tmp_path: Path, name: str, changes: dict[str, Any], word: str) -> None:
    assert word in refused(cli, tmp_path, changes)


FOLDERS: list[tuple[str, dict[str, Any], str]] = [
    ("an image that does not decode", {}, "bad.png"),
    ("another choice for such an image", {"on_corrupt": "ignore"}, "data.on_corrupt"),
    ("a window of no width", {"window": [40, 0]}, "data.window"),
    ("a window of one number", {"window": 400}, "data.window"),
    ("slices that nobody knows", {"slices": "first"}, "data.slices"),
]


@pytest.mark.parametrize(("name", "fields", "word"), FOLDERS, ids=[case[0] for case in FOLDERS])
def test_malformed_images(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any], word: str
) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    for place in ("a/x", "a/y", "b/x", "b/y"):
        (tmp_path / "images" / place).mkdir(parents=True)
        (tmp_path / "images" / place / "bad.png").write_bytes(b"no image")
    data = {"name": "image_folder", "root": str(tmp_path / "images"), **fields}
    assert word in refused(cli, tmp_path, {"data": data, "model": "mnist_cnn"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a network of one's own."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "net.py").write_text(NET)
    whole = experiment(sites(folder / "data"), model={"name": f"{folder}/net.py:Net"}, training={"rounds": 1})
    return fedshift.run(whole, folder / "runs").collected.runs[0].folder


COMMANDS: list[tuple[str, tuple[str, ...], str]] = [
    ("a measure of nobody", ("show", "{all}", "--metric", "aurok"), "did you mean 'auroc'"),
    ("a measure of masks", ("show", "{all}", "--metric", "dice"), "no 'dice'"),
    ("a format of nobody", ("show", "{all}", "--format", "xls"), "xls"),
    ("a rule of nobody", ("show", "{all}", "--select", "best"), "best"),
    ("a folder without runs", ("show", "{empty}"), "holds no run"),
    ("a format to export to", ("export", "{run}", "--to", "onx", "--network", "{net}"), "onnx"),
    ("a network that is not trusted", ("export", "{run}", "--to", "torchscript"), "--network"),
    ("another network", ("export", "{run}", "--to", "torchscript", "--network", "{net}x"), "Netx"),
    ("no model", ("export", "{empty}", "--to", "onnx"), "no model.safetensors"),
    ("a model that is none", ("export", "{text}", "--to", "onnx"), "is damaged"),
    (
        "an export into a file",
        ("export", "{run}", "--to", "safetensors", "--network", "{net}", "--out", "{text}"),
        "text",
    ),
    ("data that are not there", ("predict", "{run}", "{empty}/none.npz", "--network", "{net}"), "does not exist"),
    ("labels of another length", ("predict", "{run}", "{short}", "--network", "{net}"), "y has shape"),
    ("other features", ("predict", "{run}", "{wide}", "--network", "{net}"), "samples have shape"),
    ("masks of a classifier", ("predict", "{run}", "{short}", "--masks", "m", "--network", "{net}"), "leave out"),
    ("how labels were read", ("predict", "{labelled}", "{short}", "--network", "{net}"), "is damaged"),
    ("data of nobody to fetch", ("datasets", "--fetch"), "needs the name"),
    ("one's own data to fetch", ("datasets", "arrays", "--fetch"), "cannot be fetched"),
]


@pytest.mark.parametrize(("name", "arguments", "word"), COMMANDS, ids=[case[0] for case in COMMANDS])
def test_a_malformed_command(
    cli: Cli, finished: Path, tmp_path: Path, name: str, arguments: tuple[str, ...], word: str
) -> None:
    rows = features(1, 6)
    save(tmp_path, short={"x": rows["x"], "y": np.arange(5)}, wide={"x": np.zeros((2, 9))})
    (tmp_path / "text").write_text("no model")
    (tmp_path / "empty").mkdir()
    with safe_open(finished / "model.safetensors", "pt") as model:
        metadata = {**json.loads(model.metadata()["fedshift"]), "labelled_by": {"column": "y", "positive": "y is 1"}}
        tensors = {key: model.get_tensor(key) for key in model.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "labelled.safetensors", {"fedshift": json.dumps(metadata)})
    places = {
        "all": finished.parents[2],
        "run": finished,
        "net": f"{finished.parents[4]}/net.py:Net",
        "empty": tmp_path / "empty",
        "text": tmp_path / "text",
        "short": tmp_path / "short.npz",
        "wide": tmp_path / "wide.npz",
        "labelled": tmp_path / "labelled.safetensors",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    assert word in cli(*(argument.format(**places) for argument in arguments)).error()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
