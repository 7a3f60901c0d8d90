"""Results of a deployment never take the place of another experiment's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import experiment, features, save, sites

import fedshift
from fedshift.deploy.cli.deploy import fetch
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.run_folder import check_place


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return experiment(sites(tmp_path), protocol={"targets": ["a"], "seeds": [0], "test_fraction": 0.25})


def deployed(folder: Path, options: dict[str, Any]) -> Deployment:
    """A deployment whose runs are those of ``options``."""
    made = Deployment(folder / "coordinator", "small")
    fedshift.run(options, made.folder / "runs")
    return made


def result(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "small" / "fedavg" / "a" / "seed-0" / "result.json").read_text())
    return found


def test_the_same_settings_are_fetched_again(tmp_path: Path, options: dict[str, Any]) -> None:
    made, runs = deployed(tmp_path, options), tmp_path / "runs"
    for _ in range(2):
        check_place(parse(options), runs / "small")
        assert fetch(made, runs) == runs / "small"
        assert result(runs) == result(made.folder / "runs")


def test_another_experiments_runs_are_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = tmp_path / "runs"
    fedshift.run(options, runs)
    before = result(runs)
    longer = {**options, "training": {**options["training"], "rounds": options["training"]["rounds"] + 1}}
    made = deployed(tmp_path, longer)
    with pytest.raises(UserError, match=r"training\.rounds is .* there and .* here; give this one another name"):
        check_place(parse(longer), runs / "small")
    with pytest.raises(UserError, match=r"training\.rounds"):
        fetch(made, runs)
    assert result(runs) == before


def test_the_same_settings_on_other_data_are_found_when_fetched(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = tmp_path / "runs"
    fedshift.run(options, runs)
    made = Deployment(tmp_path / "coordinator", "small")
    others = save(tmp_path / "others", a=features(7), b=features(8), c=features(9))
    moved = {**options, "data": {**options["data"], "sites": others}}
    fedshift.run(moved, made.folder / "runs")
    check_place(parse(moved), runs / "small")
    with pytest.raises(UserError, match="the data have changed"):
        fetch(made, runs)
