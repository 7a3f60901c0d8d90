"""A flipped bit in any stored file of a run is noticed, or changes nothing."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import pytest
import torch
from small import Stop, StopAfter, experiment, outcome, sites

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation.stored import SUMS, check_sum, read_stored
from fedshift.experiment.predict import load_model
from tried import case, slow_after

FLIPS = 20
CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}


def options_in(folder: Path) -> dict[str, object]:
    made = experiment(sites(folder), methods=[CSAC], model={"name": "mlp", "hidden": [4]})
    made["training"] |= {"rounds": 3, "momentum": 0.9, "reset_optimizer_each_round": False}
    return made


def flip(path: Path, draws: random.Random) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder of a run that was interrupted after its second round, and its options."""
    folder = tmp_path_factory.mktemp("interrupted")
    options = options_in(folder)
    with pytest.raises(Stop):
        fedshift.run(options, folder / "runs", reporter=StopAfter(2))
    return folder / "runs", options


def kinds(runs: Path) -> dict[str, Path]:
    """One file of each kind that an interrupted run has."""
    run = runs / "small" / "csac" / "a" / "seed-0"
    memory = {path.name.partition("-")[0]: path for path in sorted(run.glob("memory/*/*"))}
    return {**memory, "checkpoint": run / "checkpoint.safetensors", "rounds": run / "rounds.jsonl"}


@pytest.mark.threat("flipped_bit")
@pytest.mark.parametrize(
    "kind",
    slow_after(
        1,
        [
            case("bit flips", "checkpoint of a run, 20 flips", "checkpoint"),
            case("bit flips", "a site's model in its memory, 20 flips", "local_model"),
            case("bit flips", "momentum in a site's memory, 20 flips", "optimizer"),
            case("bit flips", "projections in a site's memory, 20 flips", "projections"),
            case("bit flips", "rounds of an interrupted run, 20 flips", "rounds"),
        ],
    ),
)
def test_a_run_does_not_go_on_from_a_damaged_file(
    tmp_path: Path, interrupted: tuple[Path, dict[str, object]], kind: str
) -> None:
    runs, options = interrupted
    draws = random.Random(kind)
    for _ in range(FLIPS):
        shutil.copytree(runs, tmp_path / "runs")
        path = kinds(tmp_path / "runs")[kind]
        flip(path, draws)
        with pytest.raises(UserError, match=path.name.partition("-")[0]):
            fedshift.run(options, tmp_path / "runs")
        shutil.rmtree(tmp_path / "runs")


@pytest.mark.parametrize(
    "name",
    [
        case("bit flips", "result of a finished run, 20 flips", "result.json"),
        case("bit flips", "rounds of a finished run, 20 flips", "rounds.jsonl"),
        case("bit flips", "settings of a finished run, 20 flips", "experiment.yaml"),
    ],
)
def test_a_damaged_file_of_a_finished_run_is_not_read(
    tmp_path: Path, interrupted: tuple[Path, dict[str, object]], name: str
) -> None:
    runs, options = interrupted
    shutil.copytree(runs, tmp_path / "runs")
    fedshift.run(options, tmp_path / "runs")
    path = tmp_path / "runs" / "small" / "csac" / "a" / "seed-0" / name
    whole, draws = path.read_bytes(), random.Random(name)
    for _ in range(FLIPS):
        flip(path, draws)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            read_stored(path)
        path.write_bytes(whole)
    check_sum(path)
    for line in (path.parent / SUMS).read_text(encoding="ascii").splitlines():
        digest, listed = line.split("  ")  # as sha256sum --check reads it
        assert hashlib.sha256((path.parent / listed).read_bytes()).hexdigest() == digest


@pytest.mark.case("bit flips", "model of a finished run, 20 flips")
def test_a_damaged_model_is_not_loaded(tmp_path: Path, interrupted: tuple[Path, dict[str, object]]) -> None:
    """Wherever it lies. Where the name of its digest is damaged, it is loaded as it was."""
    runs, options = interrupted
    shutil.copytree(runs, tmp_path / "runs")
    fedshift.run(options, tmp_path / "runs")
    made = tmp_path / "runs" / "small" / "csac" / "a" / "seed-0" / "model.safetensors"
    path = Path(shutil.copy(made, tmp_path))
    whole, draws, noticed = path.read_bytes(), random.Random("model"), 0
    before = load_model(path).network.state_dict()
    for _ in range(FLIPS):
        flip(path, draws)
        try:
            after = load_model(path).network.state_dict()
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        except UserError as error:
            noticed += "model.safetensors is damaged" in str(error)
        path.write_bytes(whole)
    assert noticed > FLIPS - 5


def test_an_older_file_is_not_taken_for_a_newer_one(
    tmp_path: Path, interrupted: tuple[Path, dict[str, object]]
) -> None:
    """As from a backup: it is whole, but of an earlier round, or of another site."""
    runs, options = interrupted
    shutil.copytree(runs, tmp_path / "runs")
    first, second, *_ = sorted((tmp_path / "runs").rglob("memory/*/optimizer-*"))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match=first.name):
        fedshift.run(options, tmp_path / "runs")
    first.write_bytes(whole)
    fedshift.run(options, tmp_path / "runs")
    fedshift.run(options, tmp_path / "whole")
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")
