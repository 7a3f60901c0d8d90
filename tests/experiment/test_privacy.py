"""``training.privacy`` in an experiment file: what it costs, what is refused, what results say."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from small import Stop, StopAfter, experiment, outcome, sites, write

import fedshift
from fedshift.evaluation.records import RunResult

# Importing it takes longer than these tests, and would be done by every worker.
pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
NOISE = {"noise_multiplier": 4.0, "delta": 0.01}


def private(folder: Path, method: Any = "fedavg", model: Any = "linear", **privacy: Any) -> dict[str, Any]:
    training = {"rounds": 2, "batch_size": 8, "lr": 0.05, "privacy": privacy or NOISE}
    return experiment(sites(folder), methods=[method], model=model, training=training)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "moon"}, "choose fedavg, fedprox, alone"),
        ({"method": {"name": "fedavg", "local": ["triplets"]}}, "plug-ins"),
        ({"model": {"name": "mlp", "batch_norm": True}}, "BatchNorm"),
        ({"epsilon": 1e-9}, "cannot be reached"),
        ({"epsilon": 1, "noise_multiplier": 1}, "epsilon or noise_multiplier"),
    ],
)
def test_what_cannot_be_private_is_refused_in_one_line(
    tmp_path: Path, cli: Cli, changes: dict[str, Any], words: str
) -> None:
    error = cli("check", write(tmp_path / "e.yaml", private(tmp_path, **changes))).error()
    assert "training.privacy" in error
    assert words in error


def test_check_says_what_each_site_pays(tmp_path: Path, cli: Cli) -> None:
    options = private(tmp_path) | {"protocol": {"targets": ["a"], "seeds": [0, 1], "test_fraction": 0.3}}
    said = cli("check", write(tmp_path / "e.yaml", options))
    (found,) = [line.split() for line in said.out.splitlines() if line.startswith("b ")][-1:]
    of_one, of_both = map(float, found[1:])
    assert 0 < of_one < of_both < 2 * of_one


def test_a_result_has_its_privacy_and_a_table_shows_it(tmp_path: Path, cli: Cli) -> None:
    """A run that was cut repeats its noise, and another method of the same seed has other noise."""
    options = private(tmp_path)
    fedshift.run(options, tmp_path / "whole")
    with pytest.raises(Stop):
        fedshift.run(options, tmp_path / "runs", StopAfter(1))
    fedshift.run(options, tmp_path / "runs")
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")
    (file,) = (tmp_path / "runs").rglob("result.json")
    result = RunResult.model_validate_json(file.read_text())
    assert set(result.privacy) == {"b", "c"}
    assert all(one.noise_multiplier == 4.0 and one.epsilon > 0 for one in result.privacy.values())
    (lines,) = (tmp_path / "runs").rglob("rounds.jsonl")
    assert not any(json.loads(line)["losses"] for line in lines.read_text().splitlines())
    assert result.guarantee is not None
    assert result.guarantee in " ".join(cli("table", tmp_path / "runs").out.split())
    shutil.rmtree(tmp_path / "runs")
    fedshift.run(private(tmp_path, {"name": "fedprox", "proximal_weight": 0}), tmp_path / "runs")
    (other,) = (tmp_path / "runs").rglob("model.safetensors")
    (own,) = (tmp_path / "whole").rglob("model.safetensors")
    assert own.read_bytes() != other.read_bytes()
