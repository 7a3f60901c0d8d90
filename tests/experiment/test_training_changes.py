"""``training`` of a method: its runs are those of an experiment in which all train so; the others' do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from small import experiment, outcome, sites, write

import fedshift
from fedshift.evaluation.stored import run_folders
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.methods.composition.options import training_of
from fedshift.report.collect import collect
from fedshift.report.details import experiment_file
from fedshift.report.report import report_of
from tried import slow

CHANGES: tuple[dict[str, Any], ...] = (
    {"lr": 0.2},
    {"batch_size": 5, "rounds": 3, "optimizer": "adam", "weight_decay": 0.1},
    {"lr_schedule": "cosine", "lr_step": "mini_batch", "mini_batches": 7},
    {"augmentation": {"scale": 0.0}, "momentum": 0.9, "nesterov": True, "class_weights": "balanced"},
)


def one(where: dict[str, str], training: dict[str, Any], **changes: Any) -> dict[str, Any]:
    whole = experiment(where, methods=[{"name": "fedavg"}], **changes)
    return whole | {"training": {**whole["training"], **training}}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", ["fedprox", slow("deepall")])
def test_a_row_is_that_of_an_experiment_which_trains_so(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Weights, rounds, bytes and identity; and ``fedavg`` beside it is as it is alone with it, bit for bit."""
    where = sites(tmp_path)
    own = one(where, {}) | {"methods": [{"name": "fedavg"}, {"name": name, "training": changes}]}
    all_so = one(where, changes) | {"methods": [{"name": "fedavg"}, {"name": name}]}
    neither = one(where, {}) | {"methods": [{"name": "fedavg"}, {"name": name}]}
    for folder, options in (("own", own), ("so", all_so), ("not", neither)):
        fedshift.run(options, tmp_path / folder)
    outcomes = {folder: outcome(tmp_path / folder) for folder in ("own", "so", "not")}
    of_method = {path for path in outcomes["own"] if f"/{name}/" in path}
    assert of_method
    for path, value in outcomes["own"].items():
        assert value == outcomes["so" if path in of_method else "not"][path], path
    for path in run_folders(tmp_path / "own"):
        there = path.relative_to(tmp_path / "own")
        beside = tmp_path / ("so" if name in there.parts else "not") / there
        assert RunFolder(path, {}).written_by() == RunFolder(beside, {}).written_by()


def test_the_table_says_which_row_was_trained_how_and_the_page_gives_the_file_back(tmp_path: Path) -> None:
    methods = [
        {"name": "fedavg"},
        {"name": "fedavg", "label": "fast", "training": {"lr": 0.5}},
        {"name": "fedprox", "training": {"mini_batches": 5, "batch_size": 16}},
    ]
    whole = one(sites(tmp_path), {}) | {"methods": methods}
    fedshift.run(whole, tmp_path / "runs")
    collected = collect(tmp_path / "runs" / "small")
    notes = [note for note in report_of(collected).table.sentences if "settings of their own" in note]
    assert notes == [
        "Rows were trained with settings of their own: lr 0.05 (fedavg, fedprox), 0.5 (fast); batch_size 8 (fedavg, "
        "fast), 16 (fedprox)."
    ]
    again = parse(experiment_file(collected))
    given = parse(whole)
    made = [training_of(method, again.training) for method in again.methods]
    wanted = [training_of(method, given.training) for method in given.methods]
    budgets = [training.mini_batches for training in made]
    assert [one.model_copy(update={"mini_batches": None}) for one in made] == [
        one.model_copy(update={"mini_batches": None}) for one in wanted
    ]
    assert budgets[0] == budgets[1]
    assert budgets[2] == 5
    assert fedshift.run(experiment_file(collected), tmp_path / "runs")  # its runs are the finished ones


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "fedavg", "lr": 0.5}, "write training: {lr: …}"),
        ({"name": "fedavg", "training": {"lr": -1}}, "training.lr: input should be greater than 0"),
        ({"name": "fedavg", "training": {"optimiser": "adam"}}, "did you mean 'optimizer'?"),
        ({"name": "fedavg", "training": {"privacy": {"epsilon": 1}}}, "privacy is the same for all methods"),
        ({"name": "fedavg", "training": {"lr_warmup": 0.1}}, "write lr_step: mini_batch beside it"),
        ({"name": "fedavg", "training": {"nesterov": True, "momentum": 0}}, "training.momentum above 0"),
        ({"name": "fedavg", "training": 3}, "training: input should be like {name: value}, got 3"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, cli: Cli, method: dict[str, Any], words: str) -> None:
    assert words in cli("check", write(tmp_path / "e.yaml", experiment(sites(tmp_path), methods=[method]))).error()
