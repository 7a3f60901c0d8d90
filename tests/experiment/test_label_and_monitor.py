"""``fedshift label`` and ``fedshift monitor``: what they write, what follows from it, and what they refuse."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from calling import Cli

import fedshift
from fedshift.cli.label import label
from fedshift.cli.monitor import monitor as look_at_month
from fedshift.errors import UserError
from fedshift.experiment.labelling import list_to_label, samples_to_label
from fedshift.experiment.monitor import read_log
from fedshift.experiment.predict import load_model

LABEL = {"number": None, "labels": None, "width": 10.0, "seed": 0, "at_random": False, "format": "terminal"}


def patients(seed: int, n: int = 150, older: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, pressure = rng.normal(55 + older, 10, n), rng.normal(120, 15, n)
    ill = (age - 55) / 10 + (pressure - 120) / 15 + 0.6 * rng.normal(size=n) > 0
    names = [f"patient {seed}-{row}" for row in range(n)]
    return pd.DataFrame({"name": names, "age": age, "pressure": pressure, "outcome": np.where(ill, "ill", "well")})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("label")
    sites = {name: patients(seed) for seed, name in enumerate(("north", "south", "east"))}
    data = {"name": "table", "sites": sites, "label": "outcome", "numeric": ["age", "pressure"], "id": "name"}
    study = {
        "name": "study",
        "data": data,
        "protocol": {"seeds": [0]},
        "model": "linear",
        "training": {"rounds": 8, "batch_size": 16, "lr": 0.1},
        "methods": ["fedavg"],
        "engine": {"threads": 1},
        "evaluation": {"resamples": 0},
        "device": "cpu",
    }
    return fedshift.run(study, place / "runs").folder / "fedavg" / "north" / "seed-0"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    patients(50).drop(columns="outcome").to_csv(tmp_path / "new.csv", index=False)
    return tmp_path / "new.csv"


def filled(path: Path, truth: pd.DataFrame, most: int = 10**6) -> int:
    """Fill in the first labels of a list; how many."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    known = dict(zip(truth["name"], truth["outcome"], strict=True))
    for line in lines[:most]:
        line["label"] = known[line["sample"]]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return min(most, len(lines))


def test_labels_of_a_list_give_an_interval(run: Path, new: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "labels.csv"
    assert "60 of 150 samples" in cli("label", run, new, "--number", 60, "--out", out).out
    assert "ill" not in out.read_text()  # it does not say what the model thinks
    assert filled(out, patients(50)) == 60
    told = json.loads(cli("label", run, new, "--labels", out, "--format", "json").out)
    model, truth = fedshift.Model.load(run), patients(50)
    right = 100 * float((model.predict(truth[["name", "age", "pressure"]]) == truth["outcome"]).mean())
    assert told["labels"] == 60
    assert told["accuracy"]["low"] <= right <= told["accuracy"]["high"]
    assert told["auroc"]["low"] <= told["auroc"]["value"] <= told["auroc"]["high"]
    assert 0 < told["needed"] <= 150


def test_a_table_may_be_written_otherwise(run: Path, new: Path, tmp_path: Path, capsys: Any) -> None:
    """Semicolons and decimal commas: the same samples are drawn, and the same is expected of them."""
    other = tmp_path / "other.csv"
    patients(50).drop(columns="outcome").to_csv(other, index=False, sep=";", decimal=",")
    written = ["data.separator=;", "data.decimal=,"]
    as_they_are = {**LABEL, "number": 30, "format": "json"}
    label(run, new, **as_they_are, out=tmp_path / "one.csv")
    plan = json.loads(capsys.readouterr().out)
    label(run, other, **as_they_are, out=tmp_path / "two.csv", overrides=written)
    assert json.loads(capsys.readouterr().out) == {**plan, "list": str(tmp_path / "two.csv")}
    month = {"month": "first", "alarms": 0.01, "baseline": 3, "format": "json"}
    look_at_month(run, other, log=tmp_path / "log.jsonl", **month, overrides=written)
    assert json.loads(capsys.readouterr().out)["samples"] == 150


def test_a_longer_list_keeps_the_labels(run: Path, new: Path, tmp_path: Path, capsys: Any) -> None:
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    label(run, new, **{**LABEL, "number": 20}, out=short)
    filled(short, patients(50), 12)
    label(run, new, **{**LABEL, "number": 40, "labels": short}, out=long)
    capsys.readouterr()
    label(run, new, **{**LABEL, "labels": long}, out=long)
    assert "12 labels of 150 samples" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists, perhaps with labels in it"):
        label(run, new, **{**LABEL, "number": 20}, out=short)
    with pytest.raises(UserError, match="not in a list of 5"):
        label(run, new, **{**LABEL, "number": 5, "labels": short}, out=tmp_path / "other.csv")


def test_a_longer_list_is_drawn_in_the_groups_of_the_shorter(run: Path, tmp_path: Path) -> None:
    """Also of patients so much alike that groups are not worth while, and the default would draw without them."""
    alike = patients(50).assign(age=lambda table: 60 + table["age"] / 100, pressure=120.0)
    new, short, long = (tmp_path / f"{name}.csv" for name in ("new", "short", "long"))
    alike.drop(columns="outcome").to_csv(new, index=False)
    trained = load_model(run)
    before = samples_to_label(trained, new, 60, strata=True)
    assert before.drawn.stratified
    assert not samples_to_label(trained, new, 90).drawn.stratified
    before.write(short)
    filled(short, alike)
    label(run, new, **{**LABEL, "number": 90, "labels": short}, out=long)
    after, labels = list_to_label(trained, new, long)
    assert (after.drawn.stratified, after.drawn.sizes, len(after.rows)) == (True, before.drawn.sizes, 90)
    assert set(labels) == set(before.rows) < set(after.rows)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace("patient 50-", "patient 51-"), "is the list of other data"),
        (lambda text: text.replace("sample,row", "sample,number"), "expected sample, row"),
        (lambda text: text.replace(",1-", ",2-", 1), "fill in the column label only"),
        (lambda text: text.replace(",1-", ",2-"), "drawn with another model"),
        (
            lambda text: text.replace("\n", "healthy\n", 2).replace("labelhealthy", "label"),
            "none of the model's classes",
        ),
        (lambda text: text, "no sample has a label yet"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    spoil: Callable[[str], str], said: str, run: Path, new: Path, tmp_path: Path
) -> None:
    out = tmp_path / "labels.csv"
    label(run, new, **{**LABEL, "number": 20}, out=out)
    out.write_text(spoil(out.read_text()))
    with pytest.raises(UserError, match=said):
        label(run, new, **{**LABEL, "labels": out}, out=out)


def test_lists_say_nothing_of_what_the_model_thinks(run: Path, new: Path, tmp_path: Path) -> None:
    trained = load_model(run)
    drawn = samples_to_label(trained, new, 60, strata=True)
    assert drawn.drawn.stratified
    drawn.write(tmp_path / "list.csv")
    lines = [line.split(",") for line in (tmp_path / "list.csv").read_text().splitlines()]
    assert lines[0] == ["sample", "row", "draw", "label"]
    assert len({line[2] for line in lines[1:]}) == 1
    again, _ = list_to_label(trained, new, tmp_path / "list.csv")
    assert np.array_equal(again.drawn.strata, drawn.drawn.strata)
    assert (again.rows, again.drawn.sizes) == (drawn.rows, drawn.drawn.sizes)
    truth = patients(50)
    found = fedshift.Model.load(run).to_label(truth[["name", "age", "pressure"]], number=30)
    told = found.measure({row: truth["outcome"][row] for row in found.rows[:25]})
    assert told.labels == 25
    with pytest.raises(UserError, match="not among those that were drawn"):
        found.measure({next(row for row in range(150) if row not in found.rows): "ill"})


def test_months_that_are_alike_raise_no_alarm_and_another_one_does(run: Path, tmp_path: Path, cli: Cli) -> None:
    model, log = fedshift.Model.load(run), tmp_path / "log.jsonl"
    quiet = [model.monitor(patients(100 + month), log) for month in range(6)]
    assert [one.reference for one in quiet] == [True] * 3 + [False] * 3
    assert not any(one.alarm for one in quiet)
    patients(200, older=9).to_csv(tmp_path / "old.csv", index=False)
    looked_at = cli("monitor", run, tmp_path / "old.csv", "--log", log, "--format", "json", "--month", "2026-07")
    assert looked_at.code == 1
    told = json.loads(looked_at.out)
    assert told["alarm"]
    assert "column age" in told["drift"]
    assert [one.month for one in read_log(log)] == ["1", "2", "3", "4", "5", "6", "2026-07"]
    first = cli("monitor", run, tmp_path / "old.csv", "--log", tmp_path / "fresh.jsonl")
    assert (first.code, "with which later ones are compared" in first.out) == (
        0,
        True,
    )  # there is nothing to compare with


def test_the_log_has_sums_and_no_sample(run: Path, tmp_path: Path) -> None:
    model, log, month = fedshift.Model.load(run), tmp_path / "log.jsonl", patients(300)
    model.monitor(month, log)
    text = log.read_text()
    assert "patient" not in text
    assert not any(f"{value}" in text for value in month["age"])
    assert log.stat().st_mode & 0o077 == 0
    few = model.monitor(patients(301, n=12), log)
    assert (few.samples, few.answers, few.columns, few.estimate, few.reference) == (12, (), {}, None, False)


def test_another_unit_is_an_alarm_and_no_first_month(run: Path, tmp_path: Path) -> None:
    month = patients(400).assign(age=lambda frame: 12 * frame["age"])
    found = fedshift.Model.load(run).monitor(month, tmp_path / "log.jsonl")
    assert found.unlike == ("age",)
    assert found.alarm
    assert found.estimate is None
    assert not found.reference


def test_a_log_of_another_model_or_of_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    model, other = (fedshift.Model.load(run.parents[1] / site / "seed-0") for site in ("north", "south"))
    log = tmp_path / "log.jsonl"
    model.monitor(patients(1), log, month="May")
    with pytest.raises(UserError, match="the log of another model"):
        other.monitor(patients(1), log)
    with pytest.raises(UserError, match="has month 'May' already"):
        model.monitor(patients(2), log, month="May")
    log.write_text("hello\n")
    with pytest.raises(UserError, match="line 1: this is no line"):
        model.monitor(patients(1), log)
    with pytest.raises(UserError, match="alarms is a share"):
        model.monitor(patients(1), log, alarms=2.0)
