"""Regression from data to predictions: its scale, its measures, what is best, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedshift
from fedshift.cli.predict import predict
from fedshift.data.registry import parse
from fedshift.data.tasks.objective import Regression, objective_of
from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord
from fedshift.evaluation.selection import selected_rounds
from fedshift.methods.composition.averages import SWAD, Kept

SITES = ("north", "south", "east")


def samples(site: str, factor: float = 1.0, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(SITES.index(site))
    x = draws.normal(size=(40, 3)).astype(np.float32)
    y = 10 + x @ np.array([2.0, -1.0, 0.5]) + draws.normal(0, 0.3, 40)
    return x, factor * y + shift


def options(sites: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "quantities",
        "data": {"sites": sites, "task": "regression"},
        "protocol": {"targets": ["east"], "seeds": [0]},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 20, "mini_batches": 80, "batch_size": 8, "lr": 0.05},
        "methods": ["fedavg", "csac", "alone"],
        **changes,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Results:
    folder = tmp_path_factory.mktemp("regression")
    return fedshift.run(options({site: samples(site) for site in SITES}), folder / "runs")


def folder_of(results: fedshift.Results, method: str = "fedavg") -> Path:
    return results.folder / method / "east" / "seed-0"


def test_measures_are_those_of_scikit_learn_on_the_kept_predictions(results: fedshift.Results) -> None:
    frames = pytest.importorskip("pandas")
    metrics = pytest.importorskip("sklearn.metrics")
    kept = frames.read_parquet(folder_of(results) / "predictions.parquet")
    at_target = kept[kept.part == "target"].astype({"label": float, "predicted": float})
    (run,) = (run for run in results.runs if run.method == "fedavg")
    (site,) = run.targets
    assert site.values["rmse"] == pytest.approx(metrics.root_mean_squared_error(at_target.label, at_target.predicted))
    assert site.values["mae"] == pytest.approx(metrics.mean_absolute_error(at_target.label, at_target.predicted))
    assert site.values["r2"] == pytest.approx(100 * metrics.r2_score(at_target.label, at_target.predicted))
    assert run.metric == "rmse"
    assert run.accuracy() == pytest.approx(site.values["rmse"])
    sources = np.concatenate([samples(name)[1] for name in SITES[:2]])
    off = np.sqrt(np.mean((samples("east")[1] - sources.mean()) ** 2))
    assert site.baseline == pytest.approx(off, rel=1e-4)
    assert run.accuracy() < 0.6 * off  # it learned
    low, high = site.intervals["rmse"]
    assert low < site.values["rmse"] < high
    assert set(at_target.columns) == {"site", "part", "row", "id", "label", "predicted"}


def test_predictions_are_in_the_unit_of_the_label(results: fedshift.Results, tmp_path: Path) -> None:
    """A label in another unit trains the same network, and predictions follow the unit."""
    other = fedshift.run(
        options({site: samples(site, 1000.0, 500.0) for site in SITES}, methods=["fedavg"]), tmp_path / "runs"
    )
    x, _ = samples("east")
    here, there = results.predict(x, method="fedavg"), other.predict(x)
    np.testing.assert_allclose(there, 1000 * here + 500, rtol=1e-3)
    with pytest.raises(UserError, match="no probabilities"):
        results.model("fedavg").predict_proba(x)


@pytest.mark.parametrize("kind", ["leave_one_out", "adapt_to_one"])
def test_labels_of_the_target_have_no_say(kind: str, tmp_path: Path) -> None:
    """Another unit at the target changes no weight and no scale."""
    found = []
    for factor in (1.0, 1000.0):
        sites = {**{site: samples(site) for site in SITES[:2]}, "east": samples("east", factor)}
        protocol = {"kind": kind, "targets": ["east"], "seeds": [0]}
        training = {"rounds": 1, "batch_size": 32}
        chosen = options(sites, protocol=protocol, methods=["fedavg"], training=training)
        run = fedshift.run(chosen, tmp_path / str(factor))
        model = run.model()
        found.append((load_file(folder_of(run) / "model.safetensors"), model.metadata["preprocessing"]))
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])
    assert found[0][1] == found[1][1]


def test_the_least_error_is_the_best(results: fedshift.Results) -> None:
    rounds = [
        RoundRecord(round=n, target_accuracy={"a": e}, source_accuracy={"b": 10 - e}, seconds=1.0, mini_batches=n)
        for n, e in ((1, 3.0), (2, 2.0), (3, 4.0))
    ]
    chosen = selected_rounds(rounds, less_is_better=True)
    assert (chosen["oracle"].round, chosen["source"].round) == (2, 3)
    assert SWAD().judge(Kept(), {"a": 2.0, "b": 4.0}, less_is_better=True).losses == (3.0,)
    text = results.markdown()
    least = min(results.runs, key=lambda run: run.accuracy() or 0)
    line = next(line for line in text.splitlines() if line.startswith(f"| {least.method}"))
    assert "**" not in line  # one seed shows no best
    assert "mean of the sources" in text
    assert "%" not in line
    (row,) = (row for row in results.rows(metric="r2") if row["method"] == "fedavg" and row["target"] == "east")
    assert 0 < row["mean"] <= 100
    assert "baseline" not in row
    assert next(iter(results.rows()))["baseline"] > 0
    with pytest.raises(UserError, match="rmse"):
        results.rows(metric="auroc")


@pytest.mark.slow
def test_the_page_the_card_and_an_export(
    results: fedshift.Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedshift.report.page import page
    from fedshift.report.report import whole_report

    html = page(whole_report(results.collected))
    assert "RMSE" in html
    assert "Per class" not in html
    model = fedshift.Model.load(folder_of(results))
    assert "tabular-regression" in model.card()
    assert model.export("torchscript", tmp_path).difference < 1e-4
    x, _ = samples("east")
    np.savez(tmp_path / "new.npz", x=x)
    predictions = model.trained.predict(tmp_path / "new.npz")
    np.testing.assert_allclose([prediction.predicted for prediction in predictions], model.predict(x))
    predict(folder_of(results), tmp_path / "new.npz", format="csv")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "name,predicted"
    assert float(said[1].split(",")[1]) == pytest.approx(float(model.predict(x)[0]))


def test_losses_and_damaged_scales(results: fedshift.Results) -> None:
    # Errors of 2 and 0.5 deviations: squared (4 + 0.25)/2, absolute 1.25, Huber at 1 (1.5 + 0.125)/2.
    outputs, labels = torch.tensor([[2.0], [0.5]]), torch.tensor([10.0, 10.0])
    for loss, value in (("squared", 2.125), ("absolute", 1.25), ("huber", 0.8125)):
        objective = Regression(loss=loss, mean=10.0, std=3.0)
        assert float(objective.loss(outputs, labels)) == pytest.approx(value)
    assert objective.predict(outputs).tolist() == [16.0, 11.5]
    said = json.loads(json.dumps(results.model("fedavg").metadata["preprocessing"]))
    said["objective"]["std"] = 0.0
    with pytest.raises(UserError, match="damaged"):
        objective_of(type(results.model("fedavg").trained.preprocessing).model_validate(said))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ["kd3a"], "protocol": {"kind": "adapt_to_one", "targets": ["east"]}}, "choose .*fedavg"),
        ({"protocol": {"kind": "source_target"}}, "source_target"),
        ({"evaluation": {"headline": "auroc"}}, "rmse or mae or r2"),
        ({"model": "unet"}, "mlp"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        fedshift.check(options({site: samples(site) for site in SITES}, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["table", "arrays"])
def test_a_quantity_under_classification_is_a_question(kind: str, tmp_path: Path) -> None:
    if kind == "arrays":
        data: dict[str, Any] = {"name": "arrays", "sites": {}}
        for site in SITES:
            np.savez(tmp_path / f"{site}.npz", x=samples(site)[0], y=samples(site)[1])
            data["sites"][site] = tmp_path / f"{site}.npz"
    else:
        rows = "\n".join(f"{x},{y}" for (x, *_), y in zip(*samples("north"), strict=True))
        (tmp_path / "north.csv").write_text(f"x,y\n{rows}\n")
        data = {"name": "table", "sites": {"north": tmp_path / "north.csv"}, "label": "y", "numeric": ["x"]}
    with pytest.raises(UserError, match="task: regression"):
        parse(data).build()
    built = parse({**data, "task": "regression"}).build()
    labels = np.concatenate([domain.labels for domain in built.domains.values()]).astype(float)
    objective = objective_of(built.preprocessing)
    assert isinstance(objective, Regression)
    assert (objective.mean, objective.std) == pytest.approx((labels.mean(), labels.std()))


@pytest.mark.parametrize("cell", ["", "much", "1e999"])
def test_a_label_that_is_no_number(cell: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,y\n1,2\n2,{cell}\n")
    data = {"name": "table", "task": "regression", "sites": {"a": tmp_path / "a.csv"}, "label": "y", "numeric": ["x"]}
    with pytest.raises(UserError, match=r"line 3.*label"):
        parse(data).build()
