"""A deployed run over messages, without a network: the same bits as in the local engine, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import SITES, deploy, options_of, simulate
from safetensors.torch import load_file

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_epochs": 1},
    "fedprox": {"local_epochs": 1},
    "csac": {"acquisition_epochs": 1, "calibration_epochs": 1},
}
ADAPT = {"kind": "adapt_to_one", "targets": ["east"], "seeds": [0], "test_fraction": 0.3}


def model(folder: Path, method: str, target: str) -> dict[str, torch.Tensor]:
    return load_file(folder / method / target / "seed-0" / "model.safetensors")


def result(folder: Path, method: str, target: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / method / target / "seed-0" / "result.json").read_text())
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", METHODS)
def test_same_bits_as_the_local_engine_with_the_unseen_set_at_the_coordinator(name: str, tmp_path: Path) -> None:
    options = options_of({"name": name, **METHODS[name]})
    there, _ = deploy(tmp_path, options)
    here = simulate(tmp_path, options)
    assert same(model(here, name, "west"), model(there, name, "west"))
    ours, theirs = result(here, name, "west"), result(there, name, "west")
    assert ours["selected"] == theirs["selected"]
    for direction in ("bytes_up", "bytes_down"):
        assert theirs[direction].pop("accuracy") > 0
        assert theirs[direction] == ours[direction]


@pytest.mark.parametrize(("name", "options"), [("kd3a", {}), ("shot", {}), ("fada", {"steps_per_round": 2})])
def test_models_go_by_way_of_the_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    whole = options_of({"name": name, **options}, protocol=ADAPT)
    there, _ = deploy(tmp_path, whole, unseen={}, send=["weights", "numbers", "accuracy", "features", "statistics"])
    here = simulate(tmp_path, whole, unseen={})
    assert same(model(here, name, "east"), model(there, name, "east"))
    assert result(here, name, "east")["selected"] == result(there, name, "east")["selected"]


def test_a_site_can_be_the_unseen_one(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["east"], "seeds": [0]})
    there, transport = deploy(tmp_path, options, unseen={})
    here = simulate(tmp_path, options, unseen={})
    assert same(model(here, "fedavg", "east"), model(there, "fedavg", "east"))
    assert result(here, "fedavg", "east")["selected"] == result(there, "fedavg", "east")["selected"]
    assert ("east", "fit") not in transport.asked


def test_nobody_need_be_left_out(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0]})
    there, _ = deploy(tmp_path, options, unseen={})
    last = json.loads((there / "fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["target_accuracy"]) == set(SITES) == set(last["source_accuracy"])
