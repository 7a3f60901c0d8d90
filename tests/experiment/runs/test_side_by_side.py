"""``engine.sites: side_by_side`` in an experiment: results, resume, identity, what is refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small import Stop, StopAfter, experiment, features, outcome, save

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment

MODEL = {"name": "mlp", "hidden": [4]}
FEDAVG = {"name": "fedavg", "server": {"optimizer": "momentum"}, "average_rounds": 2}


def options(folder: Path, *methods: dict[str, Any], side: bool = True, **changes: Any) -> dict[str, Any]:
    """Four sources, of which three are drawn for each round."""
    where = save(folder, **{name: features(seed, 20 + seed) for seed, name in enumerate("abcde")})
    protocol = {"targets": ["a"], "seeds": [0], "test_fraction": 0.3, "sites_per_round": 3}
    training = {"rounds": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "reset_optimizer_each_round": False}
    engine = {"name": "local", "threads": 1, **({"sites": "side_by_side"} if side else {})}
    found = {"protocol": protocol, "training": training, "model": MODEL, "engine": engine, **changes}
    return experiment(where, methods=list(methods or [FEDAVG]), **found)


def test_the_same_run_but_for_rounding_and_the_same_bits_again(tmp_path: Path) -> None:
    for side in (False, True):
        fedshift.run(options(tmp_path / "data", side=side), tmp_path / str(side))
    one, together = (outcome(tmp_path / str(side)) for side in (False, True))
    (lines,) = (value for name, value in one.items() if name.endswith("rounds.jsonl"))
    (again,) = (value for name, value in together.items() if name.endswith("rounds.jsonl"))
    for line, other in zip(lines, again, strict=True):
        assert other["losses"] == pytest.approx(line["losses"], rel=1e-4)
        assert {**other, "losses": None} == {**line, "losses": None}
    with pytest.raises(Stop):
        run_experiment(parse(options(tmp_path / "data")), tmp_path / "cut", reporter=StopAfter(1))
    with pytest.raises(UserError, match="sites"):
        fedshift.run(options(tmp_path / "data", side=False), tmp_path / "cut")
    fedshift.run(options(tmp_path / "data"), tmp_path / "cut")
    assert outcome(tmp_path / "cut") == together


def test_auto_does_what_is_faster_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "scaffold"}]
    auto = {"engine": {"name": "local", "threads": 1, "sites": "auto"}}
    fedshift.run(options(tmp_path / "data", *methods, side=False), tmp_path / "alone")
    fedshift.run(options(tmp_path / "data", *methods, **auto), tmp_path / "auto")
    fedshift.run(options(tmp_path / "data", methods[0]), tmp_path / "together")
    assert model(tmp_path / "auto", "scaffold") == model(tmp_path / "alone", "scaffold")
    assert model(tmp_path / "auto", "fedavg") == model(tmp_path / "together", "fedavg")
    assert model(tmp_path / "auto", "fedavg") != model(tmp_path / "alone", "fedavg")


def model(runs: Path, method: str) -> dict[str, list[float]]:
    (path,) = (path for path in runs.rglob("model.safetensors") if method in path.parts)
    return {name: value.flatten().tolist() for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [FEDAVG, {"name": "scaffold"}]}, "scaffold trains in its own way"),
        ({"methods": [{"name": "recipe"}]}, "recipe has plug-ins"),
        ({"model": {**MODEL, "dropout": 0.5}}, "without dropout"),
        ({"engine": {"sites": "side_by_side", "workers": 2}}, "leave out workers"),
        ({"engine": {"sites": "auto", "workers": 2}}, "leave out workers"),
        ({"engine": {"name": "flare", "sites": "side_by_side"}}, "sites"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_is_not_covered_is_refused_before_training(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        fedshift.run({**options(tmp_path / "data"), **changes}, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
