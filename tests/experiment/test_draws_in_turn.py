"""Optuna's draws: better than random ones, the same after a stop, and nothing of the target in them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import experiment, features, save, write

from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.experiment.config.search_section import Space
from fedshift.experiment.search_rules import Trials, drawn_in_turn, propose
from fedshift.methods.composition.options import training_of

SPACES: dict[str, Any] = {
    "training.lr": {"log_uniform": [1e-4, 1]},
    "fedprox.proximal_weight": {"choices": [0.1, 0.2]},
}


def given(folder: Path, **search: Any) -> dict[str, Any]:
    where = save(folder, a=features(1), b=features(2, 24, 0.3), c=features(3, 33, -0.3))
    whole = experiment(where, methods=[{"name": "fedavg"}, {"name": "fedprox"}])
    whole["protocol"] = {"targets": ["a", "b"], "seeds": [0], "test_fraction": 0.3}
    return whole | {"search": {"sampler": "optuna", "draws": 3, "spaces": SPACES, **search}}


@pytest.mark.slow
def test_they_come_nearer_to_the_best_than_random_draws() -> None:
    """A rate of 0.01 and the second choice are best. Optuna's first ten draws are random themselves."""
    spaces = {
        "lr": Space(log_uniform=(1e-6, 10)),
        "size": Space(integer=(1, 64)),
        "kind": Space(choices=([1], [2], [3])),
    }

    def worth(values: dict[str, Any]) -> float:
        return -abs(math.log10(values["lr"]) + 2) - abs(values["size"] - 40) / 64 - (values["kind"] != [2])

    best: dict[str, list[float]] = {"random": [], "optuna": []}
    for seed in range(5):
        earlier: list[tuple[dict[str, Any], float | None]] = []
        for number in range(30):
            values = propose(spaces, earlier, f"{seed} {number}", less_is_better=False)
            earlier.append((values, worth(values)))
        best["optuna"].append(max(value for _, value in earlier if value is not None))
        random = [
            worth({name: space.draw(f"{seed} {number} {name}") for name, space in spaces.items()})
            for number in range(30)
        ]
        best["random"].append(max(random))
    assert statistics.median(best["optuna"]) > statistics.median(best["random"])
    assert all(1 <= values["size"] <= 64 and type(values["size"]) is int for values, _ in earlier)


def test_less_may_be_better_and_what_diverged_is_avoided() -> None:
    """After 30 draws of which those above 1 diverged and small ones are best, draws are small."""
    space = {"x": Space(uniform=(0, 2))}
    numbers = np.linspace(0, 2, 30)
    earlier: list[Any] = [({"x": float(x)}, None if x > 1 else float(x)) for x in numbers]
    for less, words in ((True, "small"), (False, "large")):
        drawn = [propose(space, earlier, f"{words} {number}", less_is_better=less)["x"] for number in range(20)]
        assert (statistics.mean(drawn) < 0.5) is less
        assert statistics.mean(drawn) < 1


def trained(labels_of_target: float, seen: list[str]) -> Any:
    """Results whose held-out parts are best at a rate of 0.01, and whose accuracy at the target is as given."""

    def train(part: Experiment) -> Sequence[RunResult]:
        found = []
        for method in part.methods:
            lr = training_of(method, part.training).lr
            source = 90 - 10 * abs(math.log10(lr) + 2)
            selected = {
                "last": SelectedRound.model_construct(accuracy=labels_of_target, source_accuracy=source),
                "source": SelectedRound.model_construct(accuracy=labels_of_target, source_accuracy=source),
            }
            targets = part.protocol.named_targets or ("b", "c")
            seen.append(f"{part.name}: {', '.join(targets)}")
            found += [
                RunResult.model_construct(
                    method=method.display, target=at, seed=0, selected=selected, metric="accuracy"
                )
                for at in targets
            ]
        return found

    return train


def values_of(trials: Trials) -> list[Any]:
    return [(drawn.of, drawn.number, dict(drawn.values)) for drawn in trials.draws]


@pytest.mark.slow
def test_draws_depend_on_no_label_of_the_target_and_no_later_one(tmp_path: Path) -> None:
    whole = parse(given(tmp_path, draws=14, rules=["training_domains", "oracle"]))
    seen: list[str] = []
    drawn = values_of(drawn_in_turn(whole, (), "a", trained(10.0, seen)))
    assert drawn == values_of(drawn_in_turn(whole, (), "a", trained(99.0, seen)))
    assert set(seen) == {"small-draws-a: a"}
    assert [(of, number) for of, number, _ in drawn[:4]] == [
        ("fedavg", 0),
        ("fedprox", 0),
        ("fedavg", 1),
        ("fedprox", 1),
    ]
    assert drawn[0][2] == {}
    assert {tuple(values) for of, number, values in drawn if of == "fedprox" and number} == {
        ("training.lr", "proximal_weight")
    }
    assert drawn != values_of(drawn_in_turn(whole, (), "b", trained(10.0, seen)))
    few, many = (parse(given(tmp_path, draws=draws, rules=["leave_one_domain_out"])) for draws in (3, 5))
    seen: list[str] = []
    more = values_of(drawn_in_turn(many, (), "a", trained(0.0, seen)))
    assert values_of(drawn_in_turn(few, (), "a", trained(0.0, seen))) == more[:6]
    assert "small-without-a: b, c" in seen


@pytest.mark.slow
def test_a_search_that_goes_on_gives_the_same_page_and_a_file_to_run(tmp_path: Path, cli: Cli) -> None:
    pages = []
    for name, numbers in (("at once", (3,)), ("in parts", (2, 3))):
        for draws in numbers:
            whole = given(tmp_path, draws=draws, rules=["training_domains", "oracle"])
            cli("search", write(tmp_path / "e.yaml", whole), "--runs", tmp_path / name)
        pages.append((tmp_path / name / "small-search" / "search.md").read_text())
    assert pages[0] == pages[1]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(stamps) == 2 * 3 * 2 * 2  # folders, draws, methods, targets
    cli("search", tmp_path / "e.yaml", "--runs", tmp_path / "in parts")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == stamps
    chosen = load(tmp_path / "at once" / "small-search" / "chosen-a.yaml")
    assert (chosen.search, chosen.protocol.named_targets) == (None, ("a",))
    assert [method.display for method in chosen.methods] == ["fedavg", "fedprox"]
    line = next(line for line in pages[0].splitlines() if line.startswith("| training_domains | fedavg | a | "))
    if "training.lr" in line:
        assert f"training.lr {training_of(chosen.methods[0], chosen.training).lr}" in line
    else:
        assert chosen.methods[0].training is None


def test_random_draws_end_in_a_file_to_run_too(tmp_path: Path, cli: Cli) -> None:
    whole = given(tmp_path, sampler="random", draws=2, rules=["training_domains"])
    whole["protocol"]["targets"] = ["a"]
    cli("search", write(tmp_path / "e.yaml", whole), "--runs", tmp_path)
    chosen = tmp_path / "small-search" / "chosen.yaml"
    assert load(chosen).name == "small-chosen"
    assert cli("check", chosen).code == 0


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"rules": ["oracle"]}, "optuna learns from training_domains or leave_one_domain_out"),
        ({"sampler": "optun"}, "search.sampler"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, cli: Cli, search: dict[str, Any], words: str) -> None:
    assert words in cli("search", write(tmp_path / "e.yaml", given(tmp_path, **search)), "--plan").error()


def test_without_optuna_the_extra_is_named(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = cli("search", write(tmp_path / "e.yaml", given(tmp_path)), "--runs", tmp_path / "runs").error()
    assert "search.sampler: optuna needs the package optuna: pip install 'fedshift[search]'" in said
    assert not (tmp_path / "runs").exists()
