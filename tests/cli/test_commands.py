"""What each command prints, as people and scripts read it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from calling import Cli
from small import experiment, images, outcome, sites, start, write

import fedshift
from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import common_settings
from fedshift.report.conditions import conditions, used_notes

METHODS = [
    {"name": "deepall"},
    {"name": "fedavg", "local_epochs": 2},
    {"name": "fedavg", "label": "uniform", "weighting": "uniform"},
    {"name": "csac", "acquisition_epochs": 2, "calibration_epochs": 1},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished experiment: the folder of runs, and its options."""
    folder = tmp_path_factory.mktemp("finished")
    options = experiment(
        sites(folder, images),
        protocol={"targets": ["a", "b"], "seeds": [0, 3], "test_fraction": 0.25},
        model={"name": "mnist_cnn", "channels": [3, 4], "hidden": 8},
        methods=METHODS,
    )
    fedshift.run(options, folder / "runs")
    return folder / "runs", options


def test_show_and_its_verdict(cli: Cli, finished: tuple[Path, dict[str, Any]]) -> None:
    runs, _ = finished
    rows = json.loads(cli("show", runs, "--format", "json").out)
    averages = {row["method"]: row["mean"] for row in rows if row["target"] == "average"}
    told = json.loads(cli("show", runs, "--verdict", "--format", "json").out)
    assert told["expected"]["mean"] == averages[told["method"]]
    assert averages[told["method"]] == max(averages[name] for name in averages if name != "deepall")
    assert told["method"] in cli("show", runs, "--verdict").out
    assert cli("show", runs, "--verdict", "--format", "yaml").code == 2
    assert cli("show", runs, "--verdict", "--select", "source").code == 2
    both, verdict = cli("show", runs).out, cli("show", runs, "--verdict").out
    assert both == cli("table", runs).out + verdict
    assert verdict == cli("advise", runs).out  # older names print what they did
    assert "| uniform" in cli("show", runs, "--format", "markdown").out
    assert r"\begin{tabular}" in cli("show", runs, "--format", "latex").out
    assert cli("show", runs, "--format", "svg").out.startswith("<?xml")
    assert cli("show", runs, "--format", "png").code == 2
    text = cli("show", runs).out
    assert "Selection: last round." in text
    assert "n = 2 seeds" in text
    assert "upper bound" in cli("show", runs, "--select", "oracle").out


def test_report_writes_the_page_anew(cli: Cli, finished: tuple[Path, dict[str, Any]]) -> None:
    runs, _ = finished
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    page = folder / "report.html"
    page.unlink(missing_ok=True)
    assert cli("page", folder).out.strip() == str(page)
    assert "Verdict" in page.read_text()
    assert f"did you mean '{folder.name}'?" in cli("page", f"{folder}x").error()


def test_a_wrong_call_names_the_help_of_its_command(cli: Cli) -> None:
    assert "see fedshift run --help" in cli("run").error()
    assert "see fedshift --help" in cli("rn").error()


@pytest.mark.parametrize("select", ["last", "source", "oracle"])
def test_table_as_json(cli: Cli, finished: tuple[Path, dict[str, Any]], select: str) -> None:
    runs, _ = finished
    for folder in (runs, runs / "small"):
        rows = json.loads(cli("show", folder, "--format", "json", "--select", select).out)
        assert [(row["method"], row["target"]) for row in rows] == [
            (method, target) for method in ("deepall", "fedavg", "uniform", "csac") for target in ("a", "b", "average")
        ]
        for row in rows:
            measured_so = select == "last" and row["target"] != "average"
            more = ["interval", "majority"] if measured_so else []
            numbers = ["mean", "standard_error", "seeds", *more]
            assert list(row) == ["method", "target", "select", "n", *numbers, "used"]
            assert row["used"] == (["pooled"] if row["method"] == "deepall" else [])
            assert (row["select"], row["n"], len(row["seeds"])) == (select, 2, 2)
            assert row["mean"] == pytest.approx(fmean(row["seeds"]))
            assert row["standard_error"] == pytest.approx(stdev(row["seeds"]) / 2**0.5)
            assert 0 <= row["mean"] <= 100
        by_place = {(row["method"], row["target"]): row["seeds"] for row in rows}
        for method in ("deepall", "fedavg", "uniform", "csac"):
            average = [fmean(pair) for pair in zip(by_place[method, "a"], by_place[method, "b"], strict=True)]
            assert by_place[method, "average"] == pytest.approx(average)
        result = json.loads((runs / "small" / "csac" / "b" / "seed-3" / "result.json").read_text())
        assert by_place["csac", "b"][1] == result["selected"][select]["accuracy"]


def test_from_python(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, options = finished
    rows = json.loads(cli("show", runs, "--format", "json").out)
    resolved = fedshift.load(write(tmp_path / "e.yaml", options))
    assert isinstance(resolved, fedshift.Experiment)
    assert fedshift.results(runs).rows() == fedshift.results(str(runs / "small")).rows() == rows
    assert {"check", "load", "results", "run", "Experiment"} <= set(dir(fedshift))
    for given in (options, resolved, tmp_path / "e.yaml", str(tmp_path / "e.yaml")):
        results = fedshift.run(given, runs)
        assert results.rows() == rows
        assert results.rows("oracle") == json.loads(cli("show", runs, "--format", "json", "--select", "oracle").out)
        assert "| csac" in str(results)
        assert len(results.runs) == 16
    fewer = fedshift.load(
        tmp_path / "e.yaml", "protocol.targets=[b]", "protocol.seeds=[3]", "methods=[{name: deepall}]"
    )
    fedshift.run({**fewer.dump(), "training": {**options["training"], "mini_batches": 12}}, tmp_path / "runs")
    assert set(outcome(tmp_path / "runs")) == {
        f"small/deepall/b/seed-3/{file}" for file in ("rounds.jsonl", "result.json", "model.safetensors")
    }
    again = parse(yaml.safe_load(yaml.safe_dump(resolved.dump())))
    assert again == resolved
    assert again.dump() == resolved.dump()


def test_overrides(cli: Cli, tmp_path: Path) -> None:
    file = write(
        tmp_path / "e.yaml",
        experiment(
            sites(tmp_path),
            methods=["fedavg", {"name": "csac", "label": "ours", "acquisition_epochs": 2, "calibration_epochs": 1}],
        ),
    )
    resolved = fedshift.load(
        file,
        "training.rounds=7",
        "training.momentum=0.25",
        "protocol.seeds=[4,5]",
        "protocol.seeds.1=6",
        "methods.0.local_epochs=3",
        "methods.ours.calibration_epochs=2",
        "model=mlp",
        "model.hidden=[7]",
        "engine.workers=2",
        "name=other",
        "data.classes=[x, y, z]",
    )
    assert (resolved.training.rounds, resolved.training.momentum) == (7, 0.25)
    assert resolved.protocol.seeds == (4, 6)
    assert resolved.methods[0].local_epochs == 3  # type: ignore[attr-defined]
    assert resolved.methods[1].calibration_epochs == 2  # type: ignore[attr-defined]
    assert resolved.model.name == "mlp"
    assert resolved.model.hidden == (7,)  # type: ignore[attr-defined]
    assert (resolved.engine.workers, resolved.name) == (2, "other")
    assert resolved.data.build().classes == ("x", "y", "z")
    by_name = fedshift.load(file, "methods.fedavg.weighting=uniform", "methods=[csac]")
    assert [method.name for method in by_name.methods] == ["csac"]
    assert cli("run", file, "training.rounds=1", "methods=[deepall]", "--runs", tmp_path / "runs").code == 0
    assert len(outcome(tmp_path / "runs")["small/deepall/a/seed-0/rounds.jsonl"]) == 1


def test_names_and_places(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path / "sub"))
    del options["name"]
    options["data"]["sites"] = {name: Path(path).name for name, path in options["data"]["sites"].items()}
    resolved = fedshift.load(write(tmp_path / "sub" / "my-digits.v2.yaml", options))
    assert resolved.name == "my-digits.v2"
    assert len(resolved.data.build().domains) == 3


def test_check(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, options = finished
    answer = cli("check", write(tmp_path / "e.yaml", options))
    assert answer.code == 0
    for word in (
        "3 classes, samples of 1×12×12",
        "mnist_cnn",
        "deepall",
        "uniform",
        "training of all runs",
        "raw_data",
    ):
        assert word in answer.out, word
    assert not (tmp_path / "runs").exists()


def _accuracy(rows: list[dict[str, Any]], labels: np.ndarray) -> float:
    return 100 * fmean(float(row["predicted"] == str(label)) for row, label in zip(rows, labels, strict=True))


def test_predict(cli: Cli, finished: tuple[Path, dict[str, Any]]) -> None:
    runs, options = finished
    labels = np.load(options["data"]["sites"]["b"])["y"]
    for method in ("deepall", "fedavg", "uniform", "csac"):
        part = runs / "small" / method / "b" / "seed-0"
        reported = json.loads((part / "result.json").read_text())["selected"]["last"]["accuracy"]
        data = options["data"]["sites"]["b"]
        rows = json.loads(cli("predict", part, data, "--format", "json").out)
        assert _accuracy(rows, labels) == pytest.approx(reported)
        assert list(rows[0]) == ["name", "label", "predicted", "probabilities"]
        assert [row["label"] for row in rows] == [str(label) for label in labels]
        assert list(rows[0]["probabilities"]) == ["0", "1", "2"]
        assert sum(rows[0]["probabilities"].values()) == pytest.approx(1)
        assert max(rows[0]["probabilities"], key=rows[0]["probabilities"].get) == rows[0]["predicted"]
        table = list(
            csv.DictReader(cli("predict", part / "model.safetensors", data, "--format", "csv").out.splitlines())
        )
        assert [row["predicted"] for row in table] == [row["predicted"] for row in rows]
        assert float(table[5]["1"]) == pytest.approx(rows[5]["probabilities"]["1"], abs=1e-6)
        assert "probability" in cli("predict", part, data).out


def test_predict_gone_wrong(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    runs, options = finished
    data = options["data"]["sites"]["b"]
    part = runs / "small" / "csac" / "b" / "seed-0"
    whole = (part / "model.safetensors").read_bytes()
    assert f"did you mean {runs}" in cli("predict", runs, data).error()
    assert "has the run finished" in cli("predict", tmp_path, data).error()
    assert "there is no file" in cli("predict", tmp_path / "none", data).error()
    assert "'csv'" in cli("predict", part, data, "--format", "cvs").error()
    damaged = tmp_path / "model.safetensors"
    for content in (b"", whole[:100], whole[:-8], b"\x00" * 300):
        damaged.write_bytes(content)
        line = cli("predict", damaged, data).error()
        assert (str(damaged) in line, "damaged" in line) == (True, True)
    for metadata in (
        None,
        {"fedshift": "5"},
        {"fedshift": "[]"},
        {"fedshift": '{"model": 3}'},
        {"fedshift": json.dumps({"preprocessing": {"kind": "image"}, "method": 4, "model": [], "classes": 3})},
    ):
        save_file({"x": torch.zeros(2)}, damaged, metadata)
        assert str(damaged) in cli("predict", damaged, data).error()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    weights = load_file(part / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "conv1" not in name}, damaged, header)
    assert "is damaged" in cli("predict", damaged, data).error()

    unfit = {
        "nothing.npz": None,
        "other.npz": {"x": images(1, size=10)["x"]},
        "features.npz": {"x": np.zeros((3, 5), np.float32)},
        "no-x.npz": {"y": np.zeros(3)},
        "empty.npz": {"x": np.zeros((0, 12, 12), np.uint8)},
    }
    for name, arrays in unfit.items():
        if arrays is not None:
            np.savez(tmp_path / name, **arrays)
        assert name in cli("predict", part, tmp_path / name).error()
    (tmp_path / "words.doc").write_text("no")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "folder").mkdir()
    for name in ("words.doc", "rows.csv", "bad.png", "folder"):
        assert cli("predict", part, tmp_path / name).error(), name


def test_demo_runs_its_own_file(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = Mock()
    monkeypatch.setattr("fedshift.cli.run.run_file", ran)
    assert "48 small runs" in cli("demo", "--runs", tmp_path).err
    ((file, *_), kept) = ran.call_args
    assert (file.name, kept) == ("demo.yaml", {"samples": True})
    assert "72 small runs" in cli("demo", "--explained").err
    import fedshift.cli

    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    demo = fedshift.load(Path(fedshift.cli.__file__).with_name("demo.yaml"))
    assert demo.data.name == "rotated_digits"
    assert [method.name for method in demo.methods] == ["deepall", "fedavg", "recipe", "csac"]
    assert len(demo.data.build().domains) == 6
    demo = fedshift.load(Path(fedshift.cli.__file__).with_name("demo.yaml"), "data.per_class=2", "data.angles=[0,30]")
    assert fedshift.check(demo).methods[0].runs == 2 * len(demo.protocol.seeds)


def test_the_explained_demo_is_the_demo_with_the_rows_that_explain_the_recipe() -> None:
    import fedshift.cli

    plain, whole = (
        fedshift.load(Path(fedshift.cli.__file__).with_name(name)) for name in ("demo.yaml", "demo_explained.yaml")
    )
    kept = whole.model_copy(update={"methods": whole.methods[: len(plain.methods)]})
    assert kept.dump() == plain.dump()
    assert [method.display for method in whole.methods[len(plain.methods) :]] == ["deepall-moved", "fedavg-moved"]
    made = RunResult.model_construct
    rows = [
        made(
            method=method.display,
            metric="accuracy",
            options={**common_settings(whole, method), "target": "D0"},
            data={"input_shape": [1, 28, 28]},
            bytes_up={"raw_data": 1} if method.traits.pooled else {"weights": 1},
            bytes_down={},
            rounds=5,
        )
        for method in whole.methods
    ]
    said = next(
        note.text for note in used_notes(conditions(rows), [row.method for row in rows]) if note.kind == "explained"
    )
    assert "fedavg with the same images and momentum: fedavg-moved" in said
    assert "deepall with the same images and samples: deepall-moved" in said
    assert "not run" not in said


_HELP = """
import contextlib, sys, fedshift
from fedshift.cli import main
fedshift.__version__
for words in (["--help"], ["audit", "leakage", "--help"]):
    sys.argv = ["fedshift", *words]
    with contextlib.suppress(SystemExit):
        main()
    print("MODULES", *sys.modules)
"""


@pytest.mark.slow
def test_imports_are_lazy() -> None:
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True)
    first, second = (set(line.split()) for line in done.stdout.splitlines() if line.startswith("MODULES"))
    assert not {"torch", "torchvision", "pydantic", "numpy", "sklearn", "matplotlib"} & first
    assert not {"torch", "numpy", "matplotlib"} & second
    assert {"fedshift.cli.app", "typer"} <= first < second


@pytest.mark.slow
def test_exit_codes_of_the_process() -> None:
    assert start("--version").communicate()[0].startswith("fedshift ")
    wrong = start("security", "key", __file__)
    out, err = wrong.communicate()
    assert (wrong.returncode, out) == (2, "")
    assert err.startswith(f"error: {__file__} exists")
    assert err.count("\n") == 1


def test_what_check_returns_prints_as_the_command_line_does(tmp_path: Path, cli: Cli) -> None:
    options = {
        "name": "small",
        "data": {"name": "rotated_digits", "per_class": 5, "size": 8},
        "protocol": {"targets": ["D0"], "seeds": [0]},
        "model": "linear",
        "training": {"rounds": 1},
        "methods": ["alone", "fedavg"],
        "engine": {"threads": 1},
    }
    (tmp_path / "small.yaml").write_text(json.dumps(options))
    words = str(fedshift.check(options)).split()
    assert {"rotated_digits", "D75", "linear:", "alone", "fedavg"} <= set(words)
    told = cli("check", tmp_path / "small.yaml", "--runs", tmp_path).out.split()
    assert [word for word in told if not word.isdigit()] == [word for word in words if not word.isdigit()]
