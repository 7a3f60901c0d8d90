"""``search`` with spaces: draws beside scipy's distributions, DomainBed's rules by hand, a whole one that goes on."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from scipy import stats
from small import command, experiment, features, lines, save, wait_for, write

from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.config.search_section import Space
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.search_rules import Chosen, choices, drawn_methods, rule_rows, with_draws, without_target
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.report.search_page import rules_page

SPACES: dict[str, Any] = {
    "training.lr": {"log_uniform": [0.01, 1]},
    "training.batch_size": {"integer": [4, 9]},
    "fedprox.proximal_weight": {"choices": [0.1, 0.2]},
}


def given(folder: Path, **search: Any) -> dict[str, Any]:
    where = save(folder, a=features(1), b=features(2, 24, 0.3), c=features(3, 33, -0.3))
    whole = experiment(where, methods=[{"name": "fedavg"}, {"name": "fedprox"}])
    whole["protocol"] = {"targets": ["a", "b"], "seeds": [0], "test_fraction": 0.3}
    return whole | {"search": {"draws": 3, "spaces": SPACES, **search}}


def parsed(folder: Path, **search: Any) -> Experiment:
    return parse(given(folder, **search))


@pytest.mark.parametrize(
    ("space", "distribution"),
    [
        ({"uniform": [-1, 3]}, stats.uniform(-1, 4)),
        ({"log_uniform": [1e-4, 10]}, stats.loguniform(1e-4, 10)),
    ],
)
def test_numbers_are_drawn_as_scipy_s_distribution_has_them(space: dict[str, Any], distribution: Any) -> None:
    drawn = [Space(**space).draw(f"{number}") for number in range(800)]
    assert stats.kstest(drawn, distribution.cdf).pvalue > 0.01


def test_whole_numbers_and_choices_are_all_drawn_alike() -> None:
    for space, values in ((Space(integer=(2, 5)), [2, 3, 4, 5]), (Space(choices=("x", None, 3)), ["x", None, 3])):
        drawn = [space.draw(f"{number}") for number in range(900)]
        assert stats.chisquare([drawn.count(value) for value in values]).pvalue > 0.01
    powers = [Space(log_integer=(8, 512)).draw(f"{number}") for number in range(800)]
    assert (min(powers) < 12, max(powers) > 300, {type(value) for value in powers}) == (True, True, {int})
    assert stats.kstest([math.log2(value) for value in powers], stats.uniform(3, 6).cdf).pvalue > 0.01


def test_draws_depend_on_nothing_else_and_never_read_the_target(tmp_path: Path) -> None:
    whole = {(drawn_method.of, drawn_method.number): drawn_method for drawn_method in drawn_methods(parsed(tmp_path))}
    assert [dict(whole["fedprox", 0].values), whole["fedprox", 0].method.training] == [{}, None]
    assert set(whole["fedavg", 1].values) == {"training.lr", "training.batch_size"}
    assert set(whole["fedprox", 1].values) == {*whole["fedavg", 1].values, "proximal_weight"}
    fewer = parsed(tmp_path, draws=2, spaces={"training.lr": SPACES["training.lr"]})
    for one in drawn_methods(fewer):
        if one.number:
            assert one.values["training.lr"] == whole[one.of, one.number].values["training.lr"]
    other = drawn_methods(parsed(tmp_path, seed=1, defaults_first=False))
    assert all(one.values["training.lr"] != whole[one.of, 1].values["training.lr"] for one in other)
    assert all(one.values for one in other)
    whole = parsed(tmp_path)
    part = without_target(whole, drawn_methods(whole), (), "a")
    plan = Plan(part, part.protocol.taking_part(build_data(part)))
    assert plan.targets == ("b", "c")
    assert all("a" not in (*run.split.train, *run.split.held_out, *run.split.measured) for run in plan.runs)


def result(label: str, target: str, last: float, source: tuple[float, float]) -> RunResult:
    """``source``: the sources' mean in the round that it chooses, and the accuracy at the target there."""
    chosen = {
        "last": SelectedRound.model_construct(accuracy=last, source_accuracy=0.0),
        "source": SelectedRound.model_construct(accuracy=source[1], source_accuracy=source[0]),
    }
    return RunResult.model_construct(method=label, target=target, seed=0, selected=chosen, metric="accuracy")


def test_the_rules_by_hand(tmp_path: Path) -> None:
    """Held-out parts like draw 1, left-out sources draw 2, the target draw 0; equal ones go to the first."""
    draws = [drawn_method for drawn_method in drawn_methods(parsed(tmp_path)) if drawn_method.of == "fedavg"]
    names = [draw.method.display for draw in draws]
    numbers = zip(names, (90.0, 60.0, 70.0), ((80.0, 50.0), (95.0, 65.0), (95.0, 11.0)), strict=True)
    runs = {(name, "a", 0): result(name, "a", last, source) for name, last, source in numbers}
    left_out = {
        (name, target, 0): result(name, target, value, (0.0, 0.0))
        for name, values in zip(names, ((10.0, 90.0), (40.0, 50.0), (60.0, 60.0)), strict=True)
        for target, value in zip(("b", "c"), values, strict=True)
    }
    found = [
        choices(rule, draws, runs, {"a": left_out}, ["a"])[0]
        for rule in ("training_domains", "leave_one_domain_out", "oracle")
    ]
    assert [(one.draw.number, one.accuracy) for one in found] == [(1, 65.0), (2, 70.0), (0, 90.0)]
    assert rule_rows(found, ["a"])[0].average == (65.0, None)


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_and_gives_the_same_table(tmp_path: Path, cli: Cli) -> None:
    whole, pages = given(tmp_path, draws=2), []
    whole["protocol"]["targets"] = ["a"]
    for name in ("at once", "stopped"):
        if name == "stopped":  # after a part of its runs
            spaces = {name: space for name, space in SPACES.items() if name.startswith("training")}
            experiment = parse(whole | {"methods": whole["methods"][:1], "search": {"draws": 2, "spaces": spaces}})
            run_experiment(with_draws(experiment, drawn_methods(experiment), ()), tmp_path / name / "small-search")
        folder = tmp_path / name
        cli("search", write(tmp_path / "e.yaml", whole), "--runs", folder)
        pages.append((folder / "small-search" / "search.md").read_text())
    assert pages[0] == pages[1]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(stamps) == 2 * (2 * 2 + 2 * 2 * 2)  # folders, draws of methods, sources that are left out
    cli("search", write(tmp_path / "e.yaml", whole), "--runs", tmp_path / "stopped")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == stamps
    for rule in ("training_domains", "leave_one_domain_out", "oracle"):
        assert f"| {rule} | fedprox | " in pages[0]


@pytest.mark.slow
def test_a_scheduler_s_signal_stops_a_search_after_the_round(tmp_path: Path, cli: Cli) -> None:
    whole, pages = given(tmp_path, draws=2), []
    whole["protocol"]["targets"], whole["training"]["rounds"] = ["a"], 6
    file = write(tmp_path / "e.yaml", whole)
    running = command("search", file, "--runs", tmp_path / "stopped", said=tmp_path / "said", pause=2.0)
    wait_for(lambda: any(lines(path) >= 3 for path in (tmp_path / "stopped").rglob("rounds.jsonl")))
    os.kill(running.pid, signal.SIGUSR2)
    running.join(60)
    assert running.exitcode == 75
    assert "stopped by SIGUSR2 after a round" in (tmp_path / "said").read_text()
    for name in ("stopped", "at once"):
        assert cli("search", file, "--runs", tmp_path / name).code == 0
        pages.append((tmp_path / name / "small-search" / "search.md").read_text())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"spaces": {"training.lrr": {"choices": [1]}}}, "search.spaces.training.lrr: there is no field 'lrr'"),
        ({"spaces": {"fedprx.mu": {"choices": [1]}}}, "did you mean 'fedprox'?"),
        ({"spaces": {"training.lr": {"uniform": [-2, -1]}}}, "training.lr: input should be greater than 0"),
        ({"spaces": {"training.lr": {"uniform": [2, 1]}}}, ".training.lr: uniform: the first number"),
        ({"spaces": {"training.lr": {"choices": []}}}, "search.spaces.training.lr.choices: at least one"),
        ({"spaces": {"training.lr": {"log_uniform": [0, 1]}}}, "both numbers must be above 0"),
        ({"spaces": {"training.lr": {"uniform": [1, 2], "choices": [1]}}}, "write exactly one of"),
        ({"spaces": {}}, "search.spaces"),
        ({"rules": ["best"]}, "search.rules"),
        ({"draw": 3}, "did you mean 'draws'?"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, cli: Cli, search: dict[str, Any], words: str) -> None:
    assert words in cli("search", write(tmp_path / "e.yaml", given(tmp_path, **search)), "--plan").error()


def test_rules_need_what_they_choose_by(tmp_path: Path, cli: Cli) -> None:
    whole = given(tmp_path)
    whole["protocol"]["test_fraction"] = 0
    assert "raise it, or leave the rule out" in cli("search", write(tmp_path / "e.yaml", whole)).error()
    whole = given(tmp_path)
    del whole["data"]["sites"]["c"]
    assert "needs at least 3 domains" in cli("search", write(tmp_path / "f.yaml", whole)).error()


def test_methods_of_python_and_the_page(tmp_path: Path) -> None:
    whole = given(tmp_path) | {"methods": [FedAvg(label="mine")]}
    whole["search"]["spaces"] = {"mine.steps_per_round": {"integer": [2, 5]}}
    assert {drawn_method.method.steps_per_round for drawn_method in drawn_methods(parse(whole))} <= {None, 2, 3, 4, 5}  # type: ignore[attr-defined]
    whole = parsed(tmp_path)
    draws = {drawn_method.number: drawn_method for drawn_method in drawn_methods(whole) if drawn_method.of == "fedavg"}
    chosen = [
        Chosen("training_domains", "fedavg", "a", seed, draws[number], 50.0) for seed, number in enumerate((1, 2, 2))
    ]
    page = rules_page(whole, chosen, ["a"], "accuracy")
    assert f"training.lr {draws[2].values['training.lr']}" in page
    assert f"training.lr {draws[1].values['training.lr']}" not in page
    assert "| 1, 2, 2 |" in page
