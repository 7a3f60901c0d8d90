"""A run's folder: who wrote it, what is damaged, what a full or read-only disk leaves behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from calling import Cli
from safetensors.torch import save_file
from small import Stop, StopAfter, experiment, features, outcome, save, sites, write

import fedshift
from fedshift.cli.run import ELSEWHERE
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.json_objects import read_object
from tried import slow, slow_after

PART = Path("small") / "fedavg" / "a" / "seed-0"


def begun(options: dict[str, Any], runs: Path, rounds: int = 1) -> None:
    """Leave the first run of an experiment unfinished after ``rounds`` rounds."""
    with pytest.raises(Stop):
        fedshift.run(options, runs, StopAfter(rounds))


def test_what_a_run_leaves(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    done = cli("run", file, "--runs", tmp_path / "runs")
    assert done.code == 0
    assert "Not known: one seed" in " ".join(done.out.split()), "a verdict ends the run"
    part = tmp_path / "runs" / PART
    whole = {path.name for path in part.iterdir() if not path.name.startswith(".")}
    assert whole == {
        "experiment.yaml",
        "rounds.jsonl",
        "result.json",
        "model.safetensors",
        "predictions.parquet",
        "SHA256SUMS",
    }
    assert read_object(tmp_path / "runs" / "small" / "order.json") == {
        "methods": ["fedavg"], "targets": ["a"], "seeds": [0],
    }  # fmt: skip
    assert (tmp_path / "runs" / "small" / "report.html").exists()
    written = yaml.safe_load((part / "experiment.yaml").read_text())
    assert written["training"]["momentum"] == 0.5  # a default, written out
    assert written["training"]["batch_size"] == 8
    assert written["method"] == {"name": "fedavg", "label": None, "setting": "paper", "average_rounds": 1,
                                 "average": None, "server": None, "robust": None, "local": [],
                                 "exchanges_per_epoch": 1, "batch_norm_at_new_site": None,
                                 "classifier_at_new_site": None, "fine_tune": None,
                                 "local_epochs": 1, "steps_per_round": None, "weighting": "samples"}  # fmt: skip
    assert (written["target"], written["seed"]) == ("a", 0)
    rounds = [RoundRecord.model_validate_json(line) for line in (part / "rounds.jsonl").read_text().splitlines()]
    assert [record.round for record in rounds] == [1, 2]
    assert set(rounds[0].target_accuracy) == {"a"}
    assert set(rounds[0].source_accuracy) == {"b", "c"}
    assert set(rounds[0].losses) == set(rounds[0].aggregation_weights) == {"b", "c"}
    result = RunResult.model_validate_json((part / "result.json").read_bytes())
    assert result.selected["last"].accuracy == rounds[-1].target_mean
    for direction, total in (("up", result.bytes_up), ("down", result.bytes_down)):
        kinds = {kind for record in rounds for kind in record.bytes[direction]}
        assert total == {kind: sum(record.bytes[direction].get(kind, 0) for record in rounds) for kind in kinds}
    assert result.versions["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr=0.1", ["training.lr is 0.05 there and 0.1 here"]),
        ("training.rounds=3", ["training.rounds is 2 there and 3 here"]),
        ("methods.0.weighting=uniform", ["method.weighting is 'samples' there and 'uniform' here"]),
        ("model.name=mlp", ["model.name is 'linear' there and 'mlp' here"]),
        ("protocol.test_fraction=0.5", ["protocol.test_fraction is 0.3 there and 0.5 here"]),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_experiment(
    cli: Cli, tmp_path: Path, override: str, words: list[str], finished: bool
) -> None:
    options = experiment(sites(tmp_path))
    runs = tmp_path / "runs"
    if finished:
        fedshift.run(options, runs)
    else:
        begun(options, runs)
    before = outcome(runs)
    line = cli("run", write(tmp_path / "e.yaml", options), override, "--runs", runs).error()
    assert str(runs / PART) in line
    assert "another experiment" in line
    assert all(word in line for word in words), line
    assert outcome(runs) == before


def test_other_data_is_another_experiment(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    fedshift.run(options, tmp_path / "runs")
    save(tmp_path, b=features(77, 24))
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    assert "the data have changed" in line


def test_other_groups_are_other_data(cli: Cli, tmp_path: Path) -> None:
    """The samples are the same, but others of them must stay together, so the split is another one."""
    patients = features(2, 24) | {"groups": np.arange(24) // 2}
    options = experiment({**sites(tmp_path), **save(tmp_path, b=patients)})
    fedshift.run(options, tmp_path / "runs")
    before = outcome(tmp_path / "runs")
    fedshift.run(options, tmp_path / "runs")
    assert outcome(tmp_path / "runs") == before
    save(tmp_path, b=patients | {"groups": np.arange(24) // 3})
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    assert "the data have changed" in line


def test_engine_and_device_are_not_the_experiment(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    fedshift.run(options, tmp_path / "runs")
    file = write(tmp_path / "e.yaml", options)
    assert cli("run", file, "engine.threads=2", "device=auto", "--runs", tmp_path / "runs").code == 0


@pytest.mark.parametrize("content", ["[1, 2", "just words", "- a\n- b\n", "5", "\udcff"])
def test_a_damaged_experiment_file_in_the_folder(cli: Cli, tmp_path: Path, content: str) -> None:
    options = experiment(sites(tmp_path))
    begun(options, tmp_path / "runs")
    (tmp_path / "runs" / PART / "experiment.yaml").write_bytes(content.encode(errors="surrogateescape"))
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    assert "experiment.yaml is damaged" in line
    assert "delete" in line


@pytest.mark.parametrize("content", slow_after(2, ["", "{", "{}", "[]", "null", '{"method": "fedavg"}']))
def test_a_damaged_result(cli: Cli, tmp_path: Path, content: str) -> None:
    options = experiment(sites(tmp_path))
    fedshift.run(options, tmp_path / "runs")
    good = outcome(tmp_path / "runs")
    path = tmp_path / "runs" / PART / "result.json"
    path.write_text(content)
    file = write(tmp_path / "e.yaml", options)
    assert str(path) in cli("run", file, "--runs", tmp_path / "runs").error()
    assert str(path) in cli("table", tmp_path / "runs").error()
    path.unlink()  # as the line advises
    assert cli("run", file, "--runs", tmp_path / "runs").code == 0
    assert outcome(tmp_path / "runs") == good


def _foreign(path: Path) -> None:
    save_file({"weights|x": torch.zeros(3)}, path)


def _of_another_seed(path: Path) -> None:
    options = json.loads((path.parents[4].parent / "options.json").read_text())
    options["protocol"]["seeds"] = [9]
    begun(options, path.parents[4].parent / "others")
    shutil.copy(path.parents[4].parent / "others" / "small" / "csac" / "a" / "seed-9" / path.name, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), ["damaged"]),
        slow(lambda path: path.write_bytes(path.read_bytes()[:30]), ["damaged"]),
        slow(lambda path: path.write_bytes(b""), ["damaged"]),
        slow(lambda path: path.write_bytes(os.urandom(5000)), ["damaged"]),
        slow(_foreign, ["not written by"]),
        slow(_of_another_seed, ["another experiment"]),
    ],
    ids=["cut", "cut early", "empty", "noise", "foreign", "of another seed"],
)
def test_an_unfit_checkpoint(cli: Cli, tmp_path: Path, spoil: Any, words: list[str]) -> None:
    runs = tmp_path / "runs"
    options = experiment(sites(tmp_path), methods=[{"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}])
    write(tmp_path / "options.json", options)
    begun(options, runs)
    path = runs / "small" / "csac" / "a" / "seed-0" / "checkpoint.safetensors"
    spoil(path)
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", runs).error()
    assert str(path) in line
    assert "delete" in line
    assert all(word in line for word in words), line
    shutil.rmtree(path.parent)  # as the line advises
    assert cli("run", tmp_path / "e.yaml", "--runs", runs).code == 0


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign", "of another entry"])
def test_damaged_site_memory(cli: Cli, tmp_path: Path, damage: str) -> None:
    runs = tmp_path / "runs"
    options = experiment(sites(tmp_path), methods=[{"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}])
    begun(options, runs, rounds=2)
    folder = runs / "small" / "csac" / "a" / "seed-0"
    path = next((folder / "memory" / "b").glob("local_model-*"))
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:50])
    elif damage == "foreign":
        _foreign(path)
    else:
        shutil.copy(next((folder / "memory" / "b").glob("projections-*")), path)
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", runs).error()
    assert str(path) in line
    assert f"delete {folder}" in line


def test_rounds_that_are_missing(cli: Cli, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = experiment(sites(tmp_path), training={"rounds": 4, "batch_size": 8})
    begun(options, runs, rounds=3)
    path = runs / PART / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for text in ("".join(lines[1:]), "".join([lines[0], "noise\n", *lines[2:]]), ""):
        path.write_text(text)
        line = cli("run", write(tmp_path / "e.yaml", options), "--runs", runs).error()
        assert "rounds.jsonl is damaged" in line
    path.write_text("".join(lines) + lines[-1][: len(lines[-1]) // 2])  # a line that was being written is no damage
    assert cli("run", tmp_path / "e.yaml", "--runs", runs).code == 0
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


def test_files_without_an_experiment(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    fedshift.run(options, tmp_path / "runs")
    (tmp_path / "runs" / PART / "experiment.yaml").unlink()
    line = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    assert "was not written by this version" in line


@pytest.mark.parametrize("depth", range(6))
def test_a_file_in_the_place_of_a_folder(cli: Cli, tmp_path: Path, depth: int) -> None:
    """What root cannot write either: one of the folders is a file."""
    whole = tmp_path / "runs" / PART
    place = [tmp_path / "runs", *reversed([path for path in whole.parents if path.is_relative_to(tmp_path / "runs")])]
    path = [*place[1:], whole, whole / ".lock"][depth]
    if depth == 5:
        path.mkdir(parents=True)  # and the other way about
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("in the way")
    line = cli("run", write(tmp_path / "e.yaml", experiment(sites(tmp_path))), "--runs", tmp_path / "runs").error()
    assert "cannot write" in line
    assert "--runs" in line or "another folder" in line


def test_read_only(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    file = tmp_path / "e.yaml"
    write(file, experiment(save_here(tmp_path)))
    assert "Read-only file system" in cli("run", file, "--runs", tmp_path / "runs").error()


def save_here(folder: Path) -> dict[str, str]:
    """As `small.sites`, where no folder can be made."""
    for number, name in enumerate("abc"):
        np.savez(folder / f"{name}.npz", **features(number))
    return {name: str(folder / f"{name}.npz") for name in "abc"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        slow({"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}),
        slow({"name": "deepall"}),
    ],
)
def test_a_disk_that_fills_at_any_moment(
    cli: Cli, tmp_path: Path, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line at each write that fails; what is written stays whole, and the run goes on to the same end."""
    options = experiment(sites(tmp_path), methods=[method], model={"name": "mlp", "hidden": [6]})
    fedshift.run(options, tmp_path / "whole")
    wanted = outcome(tmp_path / "whole")
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    fsync = os.fsync
    for moment in range(100):
        calls = 0

        def full(handle: int, moment: int = moment) -> None:
            nonlocal calls
            calls += 1
            if calls == moment + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(handle)

        shutil.rmtree(runs, ignore_errors=True)
        monkeypatch.setattr(os, "fsync", full)
        answer = cli("run", file, "--runs", runs)
        monkeypatch.setattr(os, "fsync", fsync)
        if answer.code == 0:
            break
        *progress, last = answer.err.splitlines()
        assert answer.code == 2
        assert last.startswith("error: cannot write"), answer.err
        assert "No space left on device" in last
        assert len(progress) <= 1, answer.err  # the line of a run that was finished before the page failed
        assert not list(runs.rglob("*.part"))
        if moment % 4 == 0:
            fedshift.run(options, runs)
            assert outcome(runs) == wanted
    assert moment > 8
    assert outcome(runs) == wanted


def test_half_a_file(cli: Cli, tmp_path: Path) -> None:
    """A limit on the size of files: the first bytes of a checkpoint are really written, then the disk says no."""
    options = experiment(sites(tmp_path), model={"name": "mlp", "hidden": [100, 100]})
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        line = cli("run", file, "--runs", runs).error()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checkpoint.safetensors: File too large" in line
    assert {path.name for path in (runs / PART).iterdir()} <= {
        ".lock",
        "experiment.yaml",
        "rounds.jsonl",
        "failure.json",
    }
    assert cli("run", file, "--runs", runs).code == 0


@pytest.mark.case("two processes on one experiment", "both runs held, then one, then none")
def test_a_folder_belongs_to_one_process(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol={"targets": ["a", "b"], "seeds": [0]})
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    held = [RunFolder(runs / "small" / "fedavg" / name / "seed-0", {}) for name in "ab"]
    assert all(folder.acquire() for folder in held)
    answer = cli("run", file, "--runs", runs)
    assert answer.code == ELSEWHERE
    assert f"2 runs are being trained by process {os.getpid()} on {socket.gethostname()}" in answer.err
    assert not list(runs.rglob("result.json"))
    held[0].release()
    answer = cli("run", file, "--runs", runs)
    assert answer.code == ELSEWHERE
    assert "Take" not in answer.out
    assert "not known" not in answer.out
    assert "1 of 2 runs unfinished" in answer.out
    assert f"1 run is being trained by process {os.getpid()}" in answer.err
    held[1].release()
    assert "unfinished" not in cli("run", file, "--runs", runs).out
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


class WritesLate(Reporter):
    """Another process, which has lost the folder without knowing it, writes a round once more."""

    def __init__(self, rounds: Path, how: str) -> None:
        self._rounds, self._how = rounds, how

    def round(self, run: Run, record: RoundRecord) -> None:
        if record.round == 2:
            lines = self._rounds.read_bytes().splitlines(keepends=True)
            late = {"again": [*lines, lines[-1]], "cut": lines[:1], "gone": []}[self._how]
            self._rounds.write_bytes(b"".join(late))


@pytest.mark.parametrize("how", ["again", "cut", "gone"])
@pytest.mark.parametrize("rounds", [2, 4])
def test_what_a_process_without_the_folder_writes_late_is_mended(tmp_path: Path, how: str, rounds: int) -> None:
    options = experiment(sites(tmp_path), training={"rounds": rounds, "batch_size": 8})
    fedshift.run(options, tmp_path / "runs", WritesLate(tmp_path / "runs" / PART / "rounds.jsonl", how))
    fedshift.run(options, tmp_path / "whole")
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")


def test_a_lost_folder_is_noticed_before_a_file_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim is lost while a checkpoint is written beside: the other process's stays."""
    runs = tmp_path / "runs"
    begun(experiment(sites(tmp_path)), runs)
    checkpoint = (runs / PART / "checkpoint.safetensors").read_bytes()
    fsync, calls = os.fsync, []

    def lost(handle: int) -> None:
        fsync(handle)
        if "checkpoint" in os.readlink(f"/proc/self/fd/{handle}"):
            calls.append(handle)
            (claim,) = (runs / PART).glob(".claim-*")
            claim.with_name(".claim-000009").write_text("{}")
            claim.unlink()

    class Leaves(Reporter):
        def on_skipped(self, run: Run) -> None:
            raise Stop

    monkeypatch.setattr(os, "fsync", lost)
    with pytest.raises(Stop):
        fedshift.run(experiment(sites(tmp_path)), runs, Leaves())
    assert len(calls) == 1
    assert (runs / PART / "checkpoint.safetensors").read_bytes() == checkpoint
    assert not list((runs / PART).glob(".*.part"))


def test_who_asks_whether_a_folder_is_held_does_not_hold_it(tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path / "run", {}) for _ in range(2))
    assert not first.is_held()
    assert second.acquire()
    assert first.is_held()
    second.release()
    assert not first.is_held()
