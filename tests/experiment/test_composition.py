"""``average`` and ``local`` in an experiment file: refused in one line, part of a run, its name, and of its resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from safetensors.numpy import load_file
from small import Stop, StopAfter, experiment, outcome, sites, write

import fedshift

MLP = {"name": "mlp", "hidden": [4]}


def averaging(folder: Path, rounds: int = 3, **method: Any) -> dict[str, Any]:
    training = {"rounds": rounds, "batch_size": 8, "lr": 0.05}
    return experiment(sites(folder), methods=[{"name": "fedavg", **method}], model=MLP, training=training)


def model_of(options: dict[str, Any], runs: Path) -> dict[str, Any]:
    fedshift.run(options, runs)
    (file,) = runs.rglob("model.safetensors")
    return dict(load_file(file))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"average": "swda"}, "swad"),
        ({"average": {"kind": "ema", "decay": 2}}, "ema.decay"),
        ({"average": {"kind": "swa", "decay": 0.5}}, "start"),
        ({"average": "swa", "average_rounds": 2}, "choose one"),
        ({"name": "styles", "average": "swa", "method": {"name": "fedavg", "average_rounds": 2}}, "choose one"),
        ({"local": ["mixstyle"]}, "local.mixstyle needs images"),
        ({"local": ["jigsaw"]}, "local.jigsaw needs images"),
        ({"local": ["mixtsyle"]}, "mixstyle"),
        ({"name": "masf", "local": ["triplets"]}, "a batch of every domain"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, cli: Cli, method: Any, words: str) -> None:
    assert words in cli("check", write(tmp_path / "e.yaml", averaging(tmp_path, **method))).error()


def test_swad_needs_held_out_parts_and_every_round(tmp_path: Path, cli: Cli) -> None:
    options = averaging(tmp_path, average="swad")
    options["protocol"]["test_fraction"] = 0
    assert "test_fraction" in cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    options = averaging(tmp_path, average="swad")
    options["training"]["measure_every"] = 2
    assert "measure_every" in cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs").error()
    assert not list(tmp_path.glob("runs/**/rounds.jsonl"))


def test_what_a_run_hands_out_is_the_average_of_its_rounds(tmp_path: Path) -> None:
    """Rounds 2 and 3 by two shorter runs, averaged here; training and traffic are those of the plain run."""
    second, third = (model_of(averaging(tmp_path, rounds), tmp_path / str(rounds)) for rounds in (2, 3))
    averaged = model_of(averaging(tmp_path, 3, average={"kind": "swa", "start": 0.4}), tmp_path / "swa")
    for name, tensor in averaged.items():
        np.testing.assert_allclose(tensor, (second[name].astype(np.float64) + third[name]) / 2, rtol=1e-6, atol=1e-8)
    assert any((averaged[name] != third[name]).any() for name in averaged)
    assert (tmp_path / "swa" / "small" / "fedavg+swa").is_dir()
    plain, other = ([json.loads(line) for line in next((tmp_path / runs).rglob("rounds.jsonl")).open()]
                    for runs in ("3", "swa"))  # fmt: skip
    assert [line["bytes"] for line in plain] == [line["bytes"] for line in other]
    assert [line["losses"] for line in plain] == [line["losses"] for line in other]
    (result,) = (tmp_path / "swa").rglob("result.json")
    assert "average" in json.loads(result.read_text())["setting"]


@pytest.mark.parametrize(
    "method",
    [
        {"average": "swa"},
        {"average": {"kind": "swad", "settled": 1, "patience": 2}},
        {"average": "ema", "local": ["triplets"]},
    ],
    ids=lambda method: "-".join(method),
)
def test_it_survives_a_kill_after_any_round(tmp_path: Path, method: Any) -> None:
    """The average, and the heads at the sites with their momentum."""
    options = averaging(tmp_path, 4, **method)
    options["training"] |= {"reset_optimizer_each_round": False, "momentum": 0.9}
    fedshift.run(options, tmp_path / "whole")
    for done in (1, 2, 3):
        with pytest.raises(Stop):
            fedshift.run(options, tmp_path / "runs", StopAfter(1))
        assert list((tmp_path / "runs").rglob("checkpoint.safetensors")), done
    fedshift.run(options, tmp_path / "runs")
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")
    plain = options | {"methods": [{"name": "fedavg"}]}
    fedshift.run(plain, tmp_path / "plain")
    (own,) = (tmp_path / "whole").rglob("model.safetensors")
    (other,) = (tmp_path / "plain").rglob("model.safetensors")
    assert own.read_bytes() != other.read_bytes()
