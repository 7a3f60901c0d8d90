"""Packed runs are runs: tables, pages and resuming take them as they take folders."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from calling import Cli
from small import experiment, outcome, sites, write

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation import packing
from fedshift.evaluation.packs import rows_of, with_kept_digits
from fedshift.evaluation.stored import SUMS, read_rounds
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.report.report import report_of, whole_report
from fedshift.report.table_formats import as_json

METHODS = [{"name": "fedavg"}, {"name": "csac", "acquisition_epochs": 2, "calibration_epochs": 2}]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A small experiment of two methods at two targets, finished, and the folder above it."""
    here = tmp_path_factory.mktemp("once")
    options = experiment(
        sites(here), methods=METHODS, protocol={"targets": ["a", "b"], "seeds": [0], "test_fraction": 0.3}
    )
    fedshift.run(options, here / "runs")
    return options, here / "runs"


@pytest.fixture
def ran(once: tuple[dict[str, Any], Path], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The experiment, packed, and its folder; `whole` is not packed."""
    options, runs = once
    for name in ("runs", "whole"):
        shutil.copytree(runs, tmp_path / name)
    folder = tmp_path / "runs" / "small"
    for stays in (*folder.rglob("model.safetensors"), *folder.rglob("predictions.parquet")):
        stays.unlink()
    assert packing.pack(folder).moved == 4
    return copy.deepcopy(options), folder


def with_the_digits_that_are_kept(folder: Path) -> Path:
    """The unpacked runs below ``folder``, rewritten as packing keeps them."""
    for path in folder.rglob("result.json"):
        path.write_text(json.dumps(with_kept_digits(json.loads(path.read_text()))))
    for path in folder.rglob(SUMS):
        path.unlink()
    for path in folder.rglob("rounds.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(path.read_bytes()) or ()))
    return folder


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


PACKED = {"runs.parquet", "rounds.parquet", "SHA256SUMS"}


@pytest.mark.slow
def test_packed_and_unpacked_read_alike_there_and_back(ran: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = ran
    assert names(folder) == PACKED
    exact = [(run.accuracy(), run.source_accuracy(), run.seconds) for run in collect(tmp_path / "whole").results]
    assert [(run.accuracy(), run.source_accuracy(), run.seconds) for run in collect(folder).results] == exact
    whole = with_the_digits_that_are_kept(tmp_path / "whole" / "small")
    for beside in whole.rglob("predictions.parquet"):
        beside.unlink()  # they are not packed
    for below in ("", "fedavg", "fedavg/b", "csac/a/seed-0"):
        there, here = collect(whole / below), collect(folder / below)
        for rule in ("last", "source", "oracle"):
            assert as_json(report_of(here, rule).table) == as_json(report_of(there, rule).table)  # type: ignore[arg-type]
        if below in ("", "csac/a/seed-0"):  # pages take longest
            # A page lists data and options in the order of their names in the files, which packing does not keep.
            assert sorted(page(whole_report(here)).splitlines()) == sorted(page(whole_report(there)).splitlines())
    assert collect(tmp_path / "runs").results == collect(whole).results
    _, folder = ran
    assert packing.unpack(folder).moved == 4
    whole = with_the_digits_that_are_kept(tmp_path / "whole" / "small")
    ignored = {path for path in names(whole) if path.endswith((".safetensors", ".parquet", ".lock", "report.html"))}
    sums = {path for path in names(folder) if path.endswith(SUMS)}
    assert len(sums) == 4, "each run has its digests again"
    assert names(folder) - sums == names(whole) - ignored
    for path in folder.rglob("*"):
        if path.is_file() and path.name != SUMS:
            there = (whole / path.relative_to(folder)).read_bytes()
            if path.name == "rounds.jsonl":
                lines, others = path.read_bytes().splitlines(), there.splitlines()
                assert list(map(json.loads, lines)) == list(map(json.loads, others))
            else:  # JSON is YAML
                assert yaml.safe_load(path.read_bytes()) == yaml.safe_load(there)


@pytest.mark.slow
def test_runs_go_on_where_packed_results_end(ran: tuple[dict[str, Any], Path], tmp_path: Path, cli: Cli) -> None:
    options, folder = ran
    before = {name: (folder / name).read_bytes() for name in PACKED}
    assert cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").code == 0
    assert names(folder) == {*PACKED, "report.html"}, "nothing was run again, and no folder made"
    options["protocol"] = {**options["protocol"], "targets": ["a", "b", "c"]}
    results = fedshift.run(options, tmp_path / "runs")
    assert [(run.method, run.target) for run in results.runs] == [(m, t) for m in ("fedavg", "csac") for t in "abc"]
    assert {name: (folder / name).read_bytes() for name in PACKED} == before
    assert {path.parent.name for path in folder.glob("*/*/seed-0")} == {"c"}
    assert collect(folder).progress is None

    stay = {path for path in names(folder) if path.endswith((".safetensors", "predictions.parquet", f"seed-0/{SUMS}"))}
    answer = cli("pack", tmp_path / "runs")
    assert answer.code == 0
    assert "2 runs packed" in answer.out
    assert {path for path in names(folder) if (folder / path).is_file()} == {*PACKED, "report.html", *stay}
    assert len(stay) == 6, "models and predictions stay where they are, with their digests"
    fedshift.run(options, tmp_path / "once")
    with_the_digits_that_are_kept(tmp_path / "once")
    packing.unpack(folder)
    found, once = outcome(tmp_path / "runs"), outcome(tmp_path / "once")
    assert found == {name: content for name, content in once.items() if name in found}
    assert sum(name.endswith("result.json") for name in found) == 6


def test_a_packed_run_of_other_settings_is_refused_as_an_unpacked_one(
    ran: tuple[dict[str, Any], Path], tmp_path: Path, cli: Cli
) -> None:
    options, _ = ran
    options["training"] = {**options["training"], "lr": 0.25}
    file = write(tmp_path / "e.yaml", options)
    told = [cli("run", file, "--runs", tmp_path / runs).error() for runs in ("runs", "whole")]
    ends = [line.partition("was written by another experiment")[2] for line in told]
    assert "training.lr is 0.05 there and 0.25 here" in ends[0]
    assert ends[0] == ends[1]
    assert "runs.parquet of the run fedavg/a/seed-0" in told[0]


def test_unfinished_and_misplaced_runs_are_left(ran: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = ran
    begun = folder / "fedavg" / "c" / "seed-0"
    begun.mkdir(parents=True)
    (begun / "rounds.jsonl").write_text("")
    before = (folder / "runs.parquet").read_bytes()
    assert packing.pack(folder) == packing.Change(folder, 0, 1)
    assert collect(folder).unfinished == 1
    assert (folder / "runs.parquet").read_bytes() == before
    folder = tmp_path / "whole" / "small"
    (folder / "fedavg" / "a").rename(folder / "fedavg" / "z")
    before = names(folder)
    with pytest.raises(UserError, match="z/seed-0 holds the run fedavg/a/seed-0: move it to"):
        packing.pack(folder)
    assert names(folder) == before


def test_the_same_run_twice(ran: tuple[dict[str, Any], Path], tmp_path: Path, cli: Cli) -> None:
    """As a killed packing leaves it, it is no matter; with other results, nobody chooses one of the two in silence."""
    _, folder = ran
    twin = folder / "fedavg" / "a" / "seed-0"
    shutil.copytree(tmp_path / "whole" / "small" / "fedavg" / "a" / "seed-0", twin)
    collect(folder)
    assert packing.pack(folder).moved == 1
    assert names(twin) == {"model.safetensors", "predictions.parquet", SUMS}
    shutil.copytree(tmp_path / "whole" / "small" / "fedavg" / "a" / "seed-0", twin, dirs_exist_ok=True)
    result = json.loads((twin / "result.json").read_text())
    (twin / SUMS).unlink(missing_ok=True)
    (twin / "result.json").write_text(json.dumps({**result, "seconds": 1.25}))
    before = {name: (folder / name).read_bytes() for name in PACKED}
    for command in (("show", folder), ("pack", folder), ("unpack", folder)):
        assert "with other results" in cli(*command).error()
    assert {name: (folder / name).read_bytes() for name in PACKED} == before
    assert (twin / "result.json").exists()


def test_an_error_names_the_packed_file(ran: tuple[dict[str, Any], Path], tmp_path: Path, cli: Cli) -> None:
    options, folder = ran
    table = pq.read_table(folder / "runs.parquet")
    (folder / SUMS).unlink()  # as who changes a file by hand has to
    seconds = pa.array([1.0, 1.0, 1.0, -1.0])
    at = table.column_names.index("seconds")
    pq.write_table(table.set_column(at, "seconds", seconds), folder / "runs.parquet")
    for command in (("show", folder), ("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")):
        assert "runs.parquet of the run fedavg/b/seed-0" in cli(*command).error()
    pq.write_table(table, folder / "runs.parquet")
    (folder / "rounds.parquet").write_bytes(b"no Parquet")
    assert "rounds.parquet is malformed" in cli("page", folder).error()
    with pytest.raises(UserError, match=r"rounds\.parquet is malformed"):
        read_rounds(folder / "csac" / "b" / "seed-0" / "rounds.jsonl")


def test_pack_what_is_no_experiment(tmp_path: Path, cli: Cli, ran: tuple[dict[str, Any], Path]) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no run" in cli("pack", tmp_path / "empty").error()
    assert "no folder" in cli("pack", tmp_path / "nowhere").error()
    packing.unpack(ran[1])
    assert "only a part of the experiment" in cli("pack", ran[1] / "csac").error()
    (ran[1] / "csac" / "a" / "seed-0" / SUMS).unlink()
    (ran[1] / "csac" / "a" / "seed-0" / "rounds.jsonl").write_text('{"round": 1}\n{"round"\n')
    assert "rounds.jsonl line 2 is corrupt" in cli("pack", ran[1]).error()
