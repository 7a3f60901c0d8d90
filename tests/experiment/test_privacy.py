"""``training.privacy`` in an experiment file: what it costs, what is refused, what results say."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import Stop, StopAfter, experiment, features, outcome, save, sites, write

import fedshift
from fedshift.errors import UserError
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
        ({"method": "moon"}, "choose fedavg, alone, fedprox"),
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


@pytest.mark.slow
def test_check_says_what_each_site_pays_and_of_large_groups(tmp_path: Path, cli: Cli) -> None:
    options = private(tmp_path) | {"protocol": {"targets": ["a"], "seeds": [0, 1], "test_fraction": 0.3}}
    said = cli("check", write(tmp_path / "e.yaml", options))
    (found,) = [line.split() for line in said.out.splitlines() if line.startswith("b ")][-1:]
    of_one, of_both = map(float, found[1:])
    assert 0 < of_one < of_both < 2 * of_one
    options = private(tmp_path) | {"data": {"name": "arrays", "sites": grouped(tmp_path)}}
    options["protocol"] = {"targets": ["a"], "seeds": [0], "test_fraction": 0.0, "base_images": "shared"}
    said = " ".join(fedshift.check(options).warnings)
    assert "'b' has a group of 12 samples" in said
    assert "'c'" not in said.partition("group of")[2]
    assert "mini-batch of 8" in said


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


@pytest.mark.parametrize("task", ["regression", "multi_label", "time_to_event"])
def test_a_task_trains_privately_if_its_loss_is_a_mean_over_samples(tmp_path: Path, task: str) -> None:
    """Much noise moves the model, and no loss is written. Cox's likelihood has no part of each sample."""
    draws = np.random.default_rng(0)
    held = {}
    for site in "abc":
        x = draws.normal(size=(24, 3)).astype(np.float32)
        y = {"regression": x[:, 0], "multi_label": x > 0, "time_to_event": np.stack([np.exp(x[:, 0]), x[:, 1] > 0], 1)}
        held[site] = (x, y[task].astype(np.float32))
    options = private(tmp_path) | {
        "data": {"sites": held, "task": task},
        "protocol": {"targets": ["a"], "seeds": [0]},
        "methods": ["fedavg", "alone"],
    }
    if task == "time_to_event":
        with pytest.raises(UserError, match=r"training\.privacy: Cox"):
            fedshift.check(options)
        return
    found = []
    for noise in (0.05, 4.0):
        options["training"]["privacy"] = {"noise_multiplier": noise, "delta": 0.01}
        run = fedshift.run(options, tmp_path / str(noise))
        found.append(run.predict(held["a"][0], method="fedavg"))
        assert all(result.privacy for result in run.runs)
    assert not np.array_equal(found[0], found[1])


def grouped(folder: Path) -> dict[str, str]:
    """The three sites; at b and c, patients have four samples each, one of them at b twelve."""
    made = {name: features(seed, number) for name, seed, number in (("a", 1, 30), ("b", 2, 24), ("c", 3, 32))}
    made["b"]["groups"] = np.array([0] * 12 + [1] * 4 + [2] * 4 + [3] * 4)
    made["c"]["groups"] = np.repeat(np.arange(8), 4)
    return save(folder, **made)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_a_pool_of_workers_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Also where a group is larger than a mini-batch, which is said."""
    options = private(tmp_path) | {"data": {"name": "arrays", "sites": grouped(tmp_path)}}
    options["training"]["momentum"], options["training"]["reset_optimizer_each_round"] = 0.9, False
    fedshift.run(options, tmp_path / "one")
    options["engine"] = {"name": "local", "threads": 1, "workers": 2}
    fedshift.run(options, tmp_path / "two")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_a_model_card_says_what_was_paid(tmp_path: Path) -> None:
    """The sentence that there is no differential privacy is for models without it."""
    fedshift.run(private(tmp_path), tmp_path / "runs")
    plain = private(tmp_path) | {"name": "plain"}
    plain["training"].pop("privacy")
    fedshift.run(plain, tmp_path / "runs")
    cards = {}
    for name in ("small", "plain"):
        (place,) = (tmp_path / "runs" / name).rglob("seed-0")
        model = fedshift.Model.load(place)
        cards[name] = model.card()
        assert model.result is not None
        assert (model.result.guarantee or "No differential privacy") in cards[name]
    assert "No differential privacy" not in cards["small"]
    assert "not anonymous" not in cards["small"]
    assert "not anonymous" in cards["plain"]


@pytest.mark.slow
def test_check_says_what_noise_costs_in_accuracy(tmp_path: Path, cli: Cli) -> None:
    """With so much noise a linear model is no better than chance, and without it nearly always right."""
    training = {"rounds": 8, "batch_size": 8, "lr": 0.1, "privacy": {"noise_multiplier": 50.0, "delta": 0.01}}
    file = write(tmp_path / "e.yaml", private(tmp_path) | {"training": training})
    said = cli("check", file, "--noise-cost").out
    (line,) = [line for line in said.splitlines() if line.startswith("fedavg → a")]
    with_noise, without = map(float, re.findall(r"([\d.]+) %", line))
    assert with_noise < 70 < without
    assert "training.privacy" in cli("check", file, "training.privacy=null", "--noise-cost").error()
