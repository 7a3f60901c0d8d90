"""A site whose training goes wrong is named, and with engine.quorum the others go on without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from safetensors.numpy import load_file
from small import experiment, features, save, write

import fedshift
from fedshift.errors import TrainingDiverged

ADAPT = {"kind": "adapt_to_one", "targets": ["a"], "seeds": [0], "test_fraction": 0.3}


def four(folder: Path) -> dict[str, str]:
    """Four sites; the numbers of site ``b`` are so large that its loss is no number."""
    broken = features(2, 24)
    broken["x"] = (broken["x"] * np.float32(1e30)).astype(np.float32)
    return save(folder, a=features(1), b=broken, c=features(3, 33), d=features(4, 27))


def options(where: dict[str, str], method: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return experiment(
        where,
        protocol=ADAPT,
        model={"name": "mlp", "hidden": [4]},
        methods=[method],
        engine={"name": "local", "threads": 1, **engine},
    )


def lines(runs: Path, method: str) -> list[dict[str, Any]]:
    path = runs / "small" / method / "a" / "seed-0" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("method", ["kd3a", "fedavg"])
def test_without_a_quorum_the_run_ends_and_names_the_site(tmp_path: Path, method: str) -> None:
    with pytest.raises(TrainingDiverged, match="site 'b' in round 1"):
        fedshift.run(options(four(tmp_path), {"name": method}), tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
@pytest.mark.parametrize("method", ["kd3a", "fedavg"])
def test_the_others_go_on(tmp_path: Path, method: str) -> None:
    """As often as planned, with a model of numbers, and in the same bits whatever the number of workers."""
    where = four(tmp_path)
    for workers in (1, 2):
        fedshift.run(options(where, {"name": method}, quorum=2, workers=workers), tmp_path / f"{workers}")
    one, two = (lines(tmp_path / str(workers), method) for workers in (1, 2))
    whole = save(tmp_path / "whole", **{name: features(seed) for seed, name in enumerate("abcd")})
    fedshift.run(options(whole, {"name": method}), tmp_path / "all")
    assert len(one) == len(two) == len(lines(tmp_path / "all", method))
    for line in one:
        assert "site 'b'" in line["extra"]["missing"]["b"]
        assert "b" not in line["aggregation_weights"]
        assert line["aggregation_weights"].keys() >= {"c", "d"}
    part = Path("small") / method / "a" / "seed-0" / "model.safetensors"
    models = [load_file(tmp_path / str(workers) / part) for workers in (1, 2)]
    for name, tensor in models[0].items():
        assert np.isfinite(tensor).all()
        assert (tensor == models[1][name]).all()


def test_too_few_are_left_or_never_had_a_model(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"2 of 3 sites are left, engine\.quorum asks for 3"):
        fedshift.run(options(four(tmp_path), {"name": "fedavg"}, quorum=3), tmp_path / "runs")
    method = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
    with pytest.raises(fedshift.errors.FedshiftError, match=r"local_model.*(failed|went wrong) at this site"):
        fedshift.run(options(four(tmp_path), method, quorum=2), tmp_path / "runs")


def test_the_command_line_says_it(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "small.json", options(four(tmp_path), {"name": "fedavg"}, quorum=2))
    done = cli("run", str(file), "--runs", str(tmp_path / "runs"))
    assert done.code == 0
    assert "fedavg continues without a site" in done.out + done.err
    assert "site 'b'" in done.out + done.err


def test_a_quorum_of_more_sites_than_train_is_refused(tmp_path: Path, cli: Cli) -> None:
    """Four sites and one of them unseen: three train."""
    where = save(tmp_path, a=features(1), b=features(2), c=features(3), d=features(4))
    unseen = {"kind": "leave_one_out", "targets": ["a"], "seeds": [0], "test_fraction": 0.3}
    asked = {**options(where, {"name": "fedavg"}, quorum=4), "protocol": unseen}
    told = cli("check", write(tmp_path / "e.yaml", asked)).error()
    assert "engine.quorum: 4 sites must answer, but at most 3 train in a run" in told
    fedshift.check({**asked, "engine": {**asked["engine"], "quorum": 3}})
    fedshift.check({**asked, "protocol": ADAPT})
