"""Robust aggregation in an experiment: what is checked before training, what records say, a site that is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from small import experiment, features, save, write

import fedshift
from fedshift.errors import UserError


def options(folder: Path, robust: Any, method: str = "fedavg", **engine: Any) -> dict[str, Any]:
    """Six sites, of which ``a`` is unseen."""
    where = save(folder, **{name: features(seed) for seed, name in enumerate("abcdef")})
    return experiment(
        where,
        methods=[{"name": method, "robust": robust}],
        engine={"name": "local", "threads": 1, **engine},
    )


def lines(runs: Path) -> list[dict[str, Any]]:
    (path,) = runs.glob("small/fedavg+*/a/seed-0/rounds.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("robust", "engine", "message"),
    [
        ({"rule": "krum", "faulty": 2}, {}, r"fedavg\+krum: robust.faulty: 2 bad sites need .* 7 sites, there are 5"),
        ({"rule": "krum", "keep": 5}, {}, r"robust.keep: 5 of 5 sites"),
        ({"rule": "krum"}, {"quorum": 4}, r"robust.faulty: .*, or raise engine.quorum, which is 4"),
        ({"rule": "trimmed_mean", "trim": 3}, {}, r"robust.trim: 3 .* 5 sites"),
        ({"rule": "trust", "trusted": "a"}, {}, r"robust.trusted: 'a' is not among the sources"),
        ({"rule": "trust", "trusted": "bb"}, {}, r"did you mean 'b'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    tmp_path: Path, robust: Any, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fedshift.check(options(tmp_path, robust, **engine))


@pytest.mark.parametrize(
    ("robust", "method", "words"),
    [
        ("medain", "fedavg", "median"),
        ({"rule": "krum", "trim": 1}, "fedavg", "trim"),
        ({"rule": "krum", "faulty": -1}, "fedavg", "faulty"),
        ({"rule": "trust"}, "fedavg", "trusted"),
        ("median", "shot", "averages no models"),
        ("median", "deepall", "averages no models"),
    ],
)
def test_the_command_line_refuses_in_one_line(tmp_path: Path, cli: Cli, robust: Any, method: str, words: str) -> None:
    told = cli("check", write(tmp_path / "e.yaml", options(tmp_path, robust, method))).error()
    assert words in told
    assert "robust" in told


def test_rounds_say_what_a_rule_did(tmp_path: Path) -> None:
    fedshift.run(options(tmp_path, {"rule": "krum", "keep": 2}), tmp_path / "krum")
    for line in lines(tmp_path / "krum"):
        assert len(line["extra"]["robust"]["fit"]["left_out"]) == 3
        assert len(line["aggregation_weights"]) == 2
    fedshift.run(options(tmp_path, "median"), tmp_path / "median")
    for line in lines(tmp_path / "median"):
        assert "fit" in line["extra"]["robust"]
        assert line["aggregation_weights"] == {}, "no share counted"


def test_a_missing_site_leaves_enough_for_the_rule(tmp_path: Path) -> None:
    asked = options(tmp_path, {"rule": "trimmed_mean", "trim": 1}, quorum=3)
    broken = features(1)
    broken["x"] = broken["x"] * 1e30
    asked["data"]["sites"]["b"] = save(tmp_path / "broken", b=broken)["b"]
    asked["model"] = {"name": "mlp", "hidden": [4]}
    fedshift.run(asked, tmp_path / "runs")
    for line in lines(tmp_path / "runs"):
        assert "b" in line["extra"]["missing"]


def test_the_list_of_methods_and_the_fields_show_it(cli: Cli) -> None:
    listed = " ".join(cli("methods").out.split())
    fada = listed[listed.index(" fada ") :]
    assert fada.index("norm_clipping, krum") < fada.index("settings:")
    shown = cli("fields", "robust").out
    for word in ("trimmed_mean", "faulty", "trusted", "bound"):
        assert word in shown
