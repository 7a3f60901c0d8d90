"""``server`` in an experiment file: one line where it is wrong, its fields, the list of methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from safetensors.numpy import load_file
from small import experiment, sites, write

import fedshift
from tried import slow_after


def options(folder: Path, method: str, server: Any) -> dict[str, Any]:
    return experiment(sites(folder), methods=[{"name": method, "server": server}])


@pytest.mark.parametrize(
    ("server", "method", "words"),
    [
        ("adma", "fedavg", "adam"),
        ({"optimizer": "momentum", "beta2": 0.9}, "fedavg", "beta"),
        ({"optimizer": "adam", "rate": -1}, "fedavg", "rate"),
        ("momentum", "deepall", "averages no models"),
    ],
)
def test_the_command_line_refuses_in_one_line(tmp_path: Path, cli: Cli, server: Any, method: str, words: str) -> None:
    told = cli("check", write(tmp_path / "e.yaml", options(tmp_path, method, server))).error()
    assert words in told
    assert "server" in told


def test_a_run_takes_its_steps(tmp_path: Path) -> None:
    """At a rate of nearly 0 the model stays at the common start, whatever the rounds; the record says why."""
    slow = {"optimizer": "momentum", "beta": 0, "rate": 1e-12, "nesterov": False}
    models = []
    for name, server in (("plain", None), ("slow", slow), ("slower", {**slow, "rate": 1e-13})):
        fedshift.run(options(tmp_path, "fedavg", server), tmp_path / name)
        (file,) = (tmp_path / name).rglob("model.safetensors")
        models.append(load_file(file))
        record = json.loads(file.with_name("result.json").read_text())
        assert record["options"]["method"]["server"] == server
    assert all((models[1][key] == models[2][key]).all() for key in models[1])
    assert any((models[0][key] != models[1][key]).any() for key in models[0])


TOO_FEW = [(0.8, 13, 1, 0.7), (0.8, 12, 1, 0.7), (0.8, 2, 1, 0.0), (0.9, 29, 1, ...), (0.7, 9, 1, ...)]
ENOUGH = [(0.8, 13, 2, None), (0.9, 30, 1, None), (0.7, 10, 1, None)]


@pytest.mark.parametrize(("beta", "rounds", "exchanges", "suits"), TOO_FEW + ENOUGH)
def test_a_momentum_that_has_too_few_rounds_is_named(
    tmp_path: Path, beta: float, rounds: int, exchanges: int, suits: Any
) -> None:
    """Of equal changes it has 1 − β³ᐟ⁽¹⁻ᵝ⁾ of its size after 3/(1 − β) rounds, which is 95 %."""
    assert 1 - beta ** (3 / (1 - beta)) == pytest.approx(0.96, abs=0.02)
    whole = options(tmp_path, "fedavg", {"optimizer": "momentum", "beta": beta})
    whole["methods"][0]["exchanges_per_epoch"] = exchanges
    whole["training"] |= {"rounds": rounds}
    lines = [line for line in fedshift.check(whole).warnings if "momentum" in line]
    assert len(lines) == (suits is not None)
    assert all(f"momentum {beta:g}" in line and f"there are {rounds};" in line for line in lines)
    if suits not in (None, ...):
        assert f"one of {suits:g} suits them" in lines[0]
        assert suits == 0 or 3 / (1 - suits) <= rounds + 1e-9


@pytest.mark.parametrize(
    ("beside", "setting", "few"),
    slow_after(1, [(1, "paper", True), (3, "paper", False), (1, "four_exchanges", False)]),
)
def test_a_presets_own_momentum_is_named_in_rounds_of_equal_work(beside: int, setting: str, few: bool) -> None:
    """Beside a method of three epochs a round, one of one epoch has three times the rounds: 39 are enough for 0.9."""
    given = {
        "name": "few",
        "data": {"name": "rotated_digits", "per_class": 10},
        "protocol": {"kind": "leave_one_out", "targets": ["D0"]},
        "model": {"name": "mnist_cnn", "channels": [2, 2], "hidden": 4},
        "training": {"rounds": 13, "batch_size": 8},
        "methods": [{"name": "recipe", "setting": setting}, {"name": "fedavg", "local_epochs": beside}],
    }
    warnings = [line for line in fedshift.check(given).warnings if "momentum" in line and "recipe" in line]
    assert len(warnings) == few


def test_the_list_of_methods_and_the_fields_show_it(cli: Cli) -> None:
    listed = " ".join(cli("methods").out.split())
    entry = {name: listed[listed.index(f" {name} ") :].split("settings:")[0] for name in ("csac", "shot")}
    assert ", server" in entry["csac"]
    assert ", server" not in entry["shot"]
    shown = cli("fields", "server").out
    for word in ("momentum", "yogi", "beta2", "tau"):
        assert word in shown
    assert "optimiser of every site" in cli("fields", "training").out
