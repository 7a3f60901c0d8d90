"""Commands for other tools: export, CSV tables, trackers, completion; and --runs of check and audit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from calling import Cli
from small import experiment, sites, write

import fedshift
from fedshift.cli.app import command
from fedshift.cli.listings import names_of
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.methods import registry as methods


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An experiment file, and the folder of the runs in which one of its two seeds is finished."""
    folder = tmp_path_factory.mktemp("trained")
    options = experiment(sites(folder), protocol={"targets": ["a"], "seeds": [0]})
    fedshift.run(options, folder / "runs")
    options["protocol"]["seeds"] = [0, 1]
    return write(folder / "small.yaml", options), folder / "runs"


def test_export_writes_the_model_and_its_card(cli: Cli, trained: tuple[Path, Path], tmp_path: Path) -> None:
    run = trained[1] / "small" / "fedavg" / "a" / "seed-0"
    assert str(tmp_path / "model.pt") in cli("export", run, "--to", "torchscript", "--out", tmp_path).out
    assert torch.jit.load(tmp_path / "model.pt")(torch.zeros(2, 5)).shape == (2, 3)
    assert (tmp_path / "README.md").read_text() == fedshift.Model.load(run).card()
    assert cli("export", run, "--to", "safetensors").code == 0
    assert sorted(file.name for file in (run / "export").iterdir()) == ["README.md", "model.safetensors"]
    assert "torchscript" in cli("export", run, "--to", "torch").error()
    assert "onnx" in cli("serve", trained[1]).error()


def test_export_pushes_what_it_wrote(
    cli: Cli, trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, out = pytest.importorskip("huggingface_hub"), tmp_path / "out"
    api = Mock()
    api.upload_folder.return_value.commit_url = "https://hub.example/commit/1"
    monkeypatch.setattr(hub, "HfApi", lambda: api)
    words = ("export", trained[1] / "small" / "fedavg" / "a" / "seed-0", "--to", "safetensors", "--out", out, "--push")
    assert "OWNER/NAME" in cli(*words, tmp_path / "folder").error()
    assert not out.exists()
    assert "pushed: https://hub.example/commit/1" in cli(*words, "north/hearts").out
    assert api.upload_folder.call_args.kwargs["allow_patterns"] == ["model.safetensors", "README.md"]


def test_a_table_as_csv_has_the_rows_of_json(cli: Cli, trained: tuple[Path, Path]) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("show", trained[1], "--format", "csv").out)))
    wanted = json.loads(cli("show", trained[1], "--format", "json").out)
    assert {name for row in wanted for name in row} <= set(rows[0])
    assert rows == [{name: _cell(row.get(name)) for name in rows[0]} for row in wanted]


def test_the_help_of_table_names_every_measure() -> None:
    (option,) = [option for option in command().commands["show"].params if option.name == "metric"]
    assert [name for name in ENTRIES if name not in option.help] == []
    pages = [Path(__file__).parents[2] / "docs" / f"{page}.md" for page in ("measures", "tasks")]
    words = " ".join(page.read_text(encoding="utf-8").lower() for page in pages)
    unnamed = [name for name, entry in ENTRIES.items() if f"`{name}`" not in words and entry.title.lower() not in words]
    assert not unnamed, "give it a row in docs/measures.md"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def test_check_says_what_is_finished_in_the_folder_of_runs(cli: Cli, trained: tuple[Path, Path]) -> None:
    file, runs = trained
    assert "1 of 2 runs are finished" in cli("check", file, "--runs", runs).out
    other = cli("check", file, "training.lr=0.5", "--runs", runs)
    assert other.code == 0
    assert "training.lr is 0.05 there" in other.out
    assert "finished" not in cli("check", file, "--runs", runs / "elsewhere").out


@pytest.mark.case("counts of finished runs", "the data changed in place; runs of seeds that are no longer asked for")
def test_check_counts_its_own_runs_only(cli: Cli, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for name in "abc":
        np.savez(tmp_path / f"{name}.npz", x=draws.normal(size=(20, 2)), y=np.tile([0, 1], 10))
    file = tmp_path / "e.yaml"
    sites = "{" + ", ".join(f"{name}: {name}.npz" for name in "abc") + "}"
    file.write_text(
        f"data: {{name: arrays, sites: {sites}}}\nprotocol: {{seeds: [0, 1]}}\nmodel: linear\n"
        "training: {rounds: 1}\nmethods: [fedavg]\ndevice: cpu\n"
    )
    runs = tmp_path / "runs"
    assert cli("run", file, "--runs", runs).code == 0
    assert "6 of 6 runs are finished" in cli("check", file, "--runs", runs).out
    one = cli("check", file, "protocol.seeds=[1]", "--runs", runs).out
    assert "3 of 3 runs are finished; 3 more in this folder" in one
    assert "6 of 9 runs are finished" in cli("check", file, "protocol.seeds=[0,1,2]", "--runs", runs).out
    np.savez(tmp_path / "a.npz", x=draws.normal(size=(20, 2)), y=np.tile([0, 1], 10))
    changed = cli("check", file, "--runs", runs)
    assert "0 of 6 runs are finished" in changed.out
    assert "refuse to start: the data have changed" in changed.out
    assert cli("run", file, "--runs", runs).code == 2


@pytest.mark.case("units of new data", "on the command line: refused with a line, then predicted when accepted")
def test_predict_guards_its_input(cli: Cli, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for name in "abc":
        rows = [f"{age:.0f},{'mf'[row % 2]},{row % 2}" for row, age in enumerate(draws.normal(60, 9, 40))]
        (tmp_path / f"{name}.csv").write_text("age,sex,y\n" + "\n".join(rows) + "\n")
    file = tmp_path / "e.yaml"
    sites = "{" + ", ".join(f"{name}: {name}.csv" for name in "abc") + "}"
    file.write_text(
        f"data: {{name: table, sites: {sites}, label: y, numeric: [age], categorical: [sex]}}\n"
        "protocol: {targets: [c], seeds: [0]}\nmodel: linear\ntraining: {rounds: 1}\nmethods: [fedavg]\ndevice: cpu\n"
    )
    assert cli("run", file, "--runs", tmp_path / "runs").code == 0
    run = tmp_path / "runs" / "e" / "fedavg" / "c" / "seed-0"
    healthy = cli("predict", run, tmp_path / "c.csv", "--format", "csv")
    assert (healthy.code, healthy.err) == (0, "")
    other = tmp_path / "months.csv"
    other.write_text("age,sex\n" + "".join(f"{12 * age},m\n" for age in range(40, 60)))
    refused = cli("predict", run, other, "--format", "csv")
    assert (refused.code, refused.out) == (2, "")
    assert "column 'age': 100 % of the rows" in refused.err
    assert "--accept-shift" in refused.err
    accepted = cli("predict", run, other, "--format", "csv", "--accept-shift")
    assert accepted.code == 0
    assert len(accepted.out.splitlines()) == 21
    assert accepted.err.startswith("warning: ")
    # How new rows are written is said as for training rows.
    german = tmp_path / "german.csv"
    german.write_text("Alter;sex;y\n" + "".join(f"{1000 * age:,};m;1\n".replace(",", ".") for age in range(40, 60)))
    options = ["data.rename={Alter: age}", "data.decimal=,", "data.thousands=.", "data.units={age: 0.001}"]
    result = cli("predict", run, german, *options, "--format", "csv")
    assert (result.code, len(result.out.splitlines())) == (0, 21)
    assert "column 'age'" not in result.err
    assert "no column 'age'" in cli("predict", run, german, *options[1:3]).err
    wrong = cli("predict", run, german, "data.decimals=,")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean 'decimal'" in wrong.err
    assert "how a table is written" in cli("predict", run, german, "training.rounds=3").err
    few = tmp_path / "few.csv"
    few.write_text("age,sex\n" + "50,m\n" * 18 + "50,M\n50,F\n")
    result = cli("predict", run, few, "--format", "csv")
    assert (result.code, len(result.out.splitlines())) == (0, 21)
    assert "10 % of the rows have an unknown category" in result.err


def test_run_tells_the_tracker(
    cli: Cli, trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tensorboard" in cli("run", trained[0], "--runs", tmp_path, "--track", "tensorbord").error()
    heard: list[Any] = []

    class Noting(fedshift.Callback):
        def after_run(self, *arguments: Any) -> None:
            heard.append(arguments)

    monkeypatch.setattr("fedshift.cli.run.tracker", {"noting": Noting()}.__getitem__)
    assert cli("run", trained[0], "protocol.seeds=[0]", "--runs", tmp_path, "--track", "noting").code == 0
    assert len(heard) == 1


def test_completion_and_the_list_of_networks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert all(name in cli("models").out for name in ("mlp", "resnet50", "frozen"))
    mlp = cli("models", "mlp").out
    assert all(words in mlp for words in ("BatchNorm before every ReLU", "true, false"))
    assert "did you mean 'mlp'" in cli("models", "mpl").error()
    assert names_of("methods")() == list(methods.names())
    for name in ("data", "models"):
        assert names_of(name)()
    monkeypatch.setenv("_FEDSHIFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "fedshift methods feda")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli("methods", "feda").out.split() == [name for name in methods.names() if name.startswith("feda")]


def test_a_model_of_an_own_network_is_exported_with_its_code_named(cli: Cli, tmp_path: Path) -> None:
    code = "from torch import nn\ndef Net(shape, classes):\n    return nn.Linear(shape[0], classes)\n"
    (tmp_path / "net.py").write_text(code)
    options = experiment(sites(tmp_path), model={"name": f"{tmp_path}/net.py:Net"})
    run = fedshift.run(options, tmp_path / "runs").folder / "fedavg" / "a" / "seed-0"
    assert "--network" in cli("export", run, "--to", "safetensors").error()
    done = cli("export", run, "--to", "safetensors", "--network", f"{tmp_path}/net.py:Net")
    assert (done.code, (run / "export" / "README.md").exists()) == (0, True)
