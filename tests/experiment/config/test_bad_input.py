"""Every mistake is one line that says what, where and what to do; exit code 2; never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import experiment, features, images, save, sites, write

CHANGES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("data set", {"data": {"name": "rotated_mnsit"}}, ["unknown data set 'rotated_mnsit'", "'rotated_mnist'"]),
    ("data set's field", {"data": {"name": "rotated_digits", "angels": [0]}}, ["data.angels", "'angles'"]),
    ("data without a name", {"data": {"sites": {}}}, ["data.name", "arrays"]),
    ("data of the wrong kind", {"data": 5}, ["data", "5"]),
    ("no site", {"data": {"name": "arrays", "sites": {}}}, ["data.sites"]),
    ("model", {"model": {"name": "mnist_cn"}}, ["unknown model 'mnist_cn'", "'mnist_cnn'"]),
    ("model's field", {"model": {"name": "mlp", "hiden": [3]}}, ["model.hiden", "'hidden'"]),
    ("model's bound", {"model": {"name": "mlp", "dropout": 1.5}}, ["model.dropout", "less than 1", "1.5"]),
    ("model for images", {"model": {"name": "mnist_cnn"}}, ["mnist_cnn", "images", "5"]),
    ("method", {"methods": [{"name": "fedagv"}]}, ["unknown method 'fedagv'", "'fedavg'"]),
    ("method's field", {"methods": [{"name": "fedavg", "local_epoch": 1}]}, ["methods[0]", "'local_epochs'"]),
    (
        "method's bound",
        {"methods": ["fedavg", {"name": "csac", "distance": "l3"}]},
        ["methods[1] (csac).distance", "l3"],
    ),
    ("nested bound", {"methods": [{"name": "fedavg", "local_epochs": 0}]}, ["local_epochs", "greater than 0", "got 0"]),
    ("no methods", {"methods": []}, ["methods", "at least one"]),
    ("methods of the wrong kind", {"methods": "fedavg"}, ["methods", "list"]),
    ("method without a name", {"methods": [{"local_epochs": 2}]}, ["method", "give the name of a method", "fedavg"]),
    ("labels twice", {"methods": ["fedavg", {"name": "fedavg"}]}, ["methods", "'fedavg'", "twice", "label"]),
    ("a label that leads away", {"methods": [{"name": "fedavg", "label": "../x"}]}, ["'../x'", "folder"]),
    ("a method that is nowhere", {"methods": [{"name": "nowhere.py:Mine"}]}, ["nowhere.py"]),
    ("a method of no module", {"methods": [{"name": ":Mine"}]}, [":Mine"]),
    ("a stage", {"methods": [{"name": "csac", "stages": ["conv9"]}]}, ["csac.stages", "conv9", "input"]),
    ("field", {"trainig": {"rounds": 2}}, ["trainig", "'training'"]),
    ("training's field", {"training": {"round": 2}}, ["training.round", "'rounds'"]),
    ("training's bound", {"training": {"lr": -0.1}}, ["training.lr", "greater than 0", "-0.1"]),
    ("yes for a number", {"training": {"rounds": True}}, ["training.rounds", "true or false"]),
    ("yes for a seed", {"protocol": {"seeds": [0, True]}}, ["protocol.seeds", "true or false"]),
    ("yes for a method's number", {"methods": [{"name": "fedavg", "local_epochs": True}]}, ["local_epochs", "true or"]),
    ("an infinite rate", {"training": {"lr": float("inf")}}, ["training.lr", "finite"]),
    ("a batch beyond memory", {"training": {"batch_size": 10**20}}, ["training.batch_size", "less than or equal"]),
    ("threads beyond reason", {"engine": {"threads": 100_000}}, ["engine.threads", "less than or equal"]),
    ("a layer beyond memory", {"model": {"name": "mlp", "hidden": [10**10]}}, ["'mlp'", "memory"]),
    ("training's kind", {"training": {"rounds": "many"}}, ["training.rounds", "whole number", "many"]),
    ("training's choice", {"training": {"optimizer": "sdg"}}, ["training.optimizer", "did you mean 'sgd'", "sdg"]),
    ("augmentation", {"training": {"augmentation": "foto"}}, ["augmentation", "foto"]),
    ("not a section", {"training": 5}, ["training", "mapping", "rounds"]),
    ("nesterov", {"training": {"nesterov": True, "momentum": 0}}, ["training.nesterov", "momentum"]),
    ("target", {"protocol": {"targets": ["aa"]}}, ["protocol.targets", "'aa'", "known: a, b, c"]),
    ("target twice", {"protocol": {"targets": ["a", "a"]}}, ["protocol.targets", "twice"]),
    ("no target", {"protocol": {"targets": []}}, ["protocol.targets", "at least one"]),
    ("targets of the wrong kind", {"protocol": {"targets": 5}}, ["protocol.targets", "all"]),
    ("fraction", {"protocol": {"test_fraction": 1.0}}, ["protocol.test_fraction", "less than 1"]),
    ("seed", {"protocol": {"seeds": [0, -1]}}, ["protocol.seeds[1]", "-1"]),
    ("a seed beyond all generators", {"protocol": {"seeds": [2**70]}}, ["protocol.seeds[0]"]),
    ("seeds twice", {"protocol": {"seeds": [3, 3]}}, ["protocol.seeds", "twice"]),
    ("no seeds", {"protocol": {"seeds": []}}, ["protocol.seeds"]),
    (
        "one domain",
        {"data": {"name": "rotated_digits", "angles": [0], "per_class": 5}, "protocol": {"targets": "all"}},
        ["at least 2 domains"],
    ),
    ("protocol", {"protocol": {"kind": "leave_one"}}, ["protocol.kind", "leave_one_out"]),
    ("no official split", {"protocol": {"split": "official"}}, ["'a'", "official", "protocol.split"]),
    ("workers", {"engine": {"workers": 0}}, ["engine.workers", "greater than 0"]),
    ("engine", {"engine": {"name": "locl"}}, ["engine.name", "local"]),
    ("kind to refuse", {"engine": {"refuse": ["weight"]}}, ["engine.refuse", "'weight'", "'weights'"]),
    ("refused", {"engine": {"refuse": ["weights"]}}, ["engine.refuse", "weights", "fedavg"]),
    ("refused pooling", {"methods": ["deepall"], "engine": {"refuse": ["raw_data"]}}, ["raw_data", "deepall"]),
    ("device", {"device": "gpu"}, ["device", "'gpu'", "auto"]),
    ("device that is not here", {"device": "cuda:77"}, ["device", "'cuda:77'"]),
    ("device without numbers", {"device": "meta"}, ["device", "'meta'"]),
    ("name", {"name": "../up"}, ["name", "'../up'", "folder"]),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_a_wrong_field(cli: Cli, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path / "data"), **changes))
    for command in (("run", file, "--runs", tmp_path / "runs"), ("check", file)):
        line = cli(*command).error()
        for word in words:
            assert word in line, (command[0], line)
    assert not list(tmp_path.glob("runs/**/*.safetensors"))


def test_files_that_are_no_experiment_or_have_no_name(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path / "data"))
    del options["name"]
    line = cli("check", write(tmp_path / "copy of e (1).yaml", options)).error()
    assert all(word in line for word in ("the file's name", "'copy of e (1)'", "write name:"))
    (tmp_path / "e.yaml").write_text("[" * 5000)
    assert "too deeply" in cli("check", tmp_path / "e.yaml").error()
    assert "directory" in cli("run", tmp_path).error()


@pytest.mark.parametrize("missing", ["data", "model", "methods"])
def test_a_missing_section(cli: Cli, tmp_path: Path, missing: str) -> None:
    options = experiment(sites(tmp_path / "data"))
    del options[missing]
    line = cli("check", write(tmp_path / "e.yaml", options)).error()
    assert (f"{missing}:" in line, "missing" in line) == (True, True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainin.rounds=2", ["'trainin.rounds'", "'training'"]),
        ("training.runds=2", ["training.runds", "'rounds'"]),
        ("training.rounds", ["key.path=value"]),
        ("=3", ["key.path=value"]),
        ("training.rounds=[1", ["training.rounds=[1", "YAML"]),
        ("training.rounds.more=1", ["training.rounds", "not a mapping"]),
        ("training.rounds=ten", ["training.rounds", "whole number", "'ten'"]),
        ("protocol.seeds=[]", ["protocol.seeds", "at least one entry", "[]"]),
        ("training.rounds=0", ["training.rounds", "greater than 0"]),
        ("methods.5.local_epochs=1", ["methods.5", "1 entries"]),
        ("methods.fedagv.local_epochs=1", ["'fedagv'", "'fedavg'"]),
        ("methods.fedavg.epochs=1", ["methods[0]", "'local_epochs'"]),
        ("protocol.seeds=[1,1]", ["protocol.seeds", "twice"]),
        ("protocol.targets=[d]", ["protocol.targets", "'d'"]),
        ("data.name=array", ["'array'", "'arrays'"]),
    ],
)
def test_a_wrong_override(cli: Cli, tmp_path: Path, override: str, words: list[str]) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path / "data")))
    line = cli("run", file, override, "--runs", tmp_path / "runs").error()
    for word in words:
        assert word in line, line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["e.yaml", "No such file"]),
        ("a: [1, 2", ["e.yaml", "line", "not YAML"]),
        ("a: b: c", ["e.yaml", "line 1", "not YAML"]),
        ("\x00", ["e.yaml", "not YAML"]),
        ("- fedavg", ["e.yaml", "mapping"]),
        ("methods: [fedavg]\nmethods: [fedprox]", ["e.yaml", "line 2", "'methods' is set twice"]),
        ("", ["e.yaml", "mapping"]),
        (b"\xff\xfe\x00\xd8", ["e.yaml", "text"]),
    ],
)
def test_not_an_experiment_file(cli: Cli, tmp_path: Path, text: str | bytes | None, words: list[str]) -> None:
    file = tmp_path / "e.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for command in ("run", "check"):
        line = cli(command, file).error()
        assert all(word in line for word in words), line


def _with(**changes: Any) -> dict[str, Any]:
    return {**features(1), **changes}


@pytest.mark.parametrize("method", ["fedavg", "elcfs", "ccst"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (images(2, size=16), ["'a' has (1, 12, 12)", "'b' has (1, 16, 16)", "one size"]),
        (
            {"x": np.zeros((30, 3, 12, 12), np.uint8), "y": features(1)["y"]},
            ["'a' has (1, 12, 12)", "'b' has (3, 12, 12)", "colour"],
        ),
    ],
)
def test_images_of_different_sizes_and_grey_beside_colour(
    cli: Cli, tmp_path: Path, method: str, other: dict[str, Any], words: list[str]
) -> None:
    where = save(tmp_path, a=images(1), b=other, c=images(3))
    whole = experiment(where, model={"name": "mnist_cnn"}, methods=[method])
    line = cli("run", write(tmp_path / "e.yaml", whole), "--runs", tmp_path / "runs").error()
    for word in words:
        assert word in line, line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "average", ""])
def test_a_site_that_cannot_name_a_folder(cli: Cli, tmp_path: Path, name: str) -> None:
    where = sites(tmp_path)
    where[name] = where.pop("b")
    assert f"'{name}'" in cli("check", write(tmp_path / "e.yaml", experiment(where))).error()


def test_base_samples(cli: Cli, tmp_path: Path) -> None:
    """A careful split needs base samples to test on."""
    groups = np.arange(30)
    where = save(tmp_path, a=_with(groups=groups[:30]), b=_with(groups=groups))
    file = write(tmp_path / "e.yaml", experiment(where))
    assert "protocol.test_fraction" in cli("check", file, "protocol.test_fraction=0").error()
    assert "'a'" in cli("check", file, "protocol.test_fraction=0.001").error()
    assert cli("check", file, "protocol.test_fraction=0", "protocol.base_images=shared").code == 0


def test_mistakes_at_other_commands(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    runs = tmp_path / "runs"
    assert "no folder" in cli("show", runs).error()
    runs.mkdir()
    assert "holds no run" in cli("show", runs).error()
    assert cli("run", file, "--runs", runs).code == 0
    assert "'json'" in cli("show", runs, "--format", "jsn").error()
    assert "'oracle'" in cli("show", runs, "--select", "orakle").error()
    assert "'fedavg'" in cli("methods", "fedagv").error()
    assert "'arrays'" in cli("datasets", "arays").error()
    assert "'run'" in cli("rnu").error()
    assert "--format" in cli("show", runs, "--formt", "json").error()
    assert "EXPERIMENT" in cli("run").error()


def test_select_source_without_held_out_parts(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    assert cli("run", file, "protocol.test_fraction=0", "--runs", tmp_path / "runs").code == 0
    assert "protocol.test_fraction" in cli("show", tmp_path / "runs", "--select", "source").error()


def test_the_same_from_python(tmp_path: Path) -> None:
    import fedshift
    from fedshift.errors import UserError

    with pytest.raises(UserError, match=r"training\.rounds"):
        fedshift.run(experiment(sites(tmp_path), training={"rounds": -1}), tmp_path / "runs")
    with pytest.raises(UserError, match="mapping"):
        fedshift.run([], tmp_path / "runs")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot read"):
        fedshift.load(tmp_path / "none.yaml")
