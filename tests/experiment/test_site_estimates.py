"""``fedshift estimate``: the cases are the runs beside, and what comes in may be anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from sklearn.metrics import roc_auc_score

import fedshift
from fedshift.cli.estimate import estimate
from fedshift.errors import UserError
from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.experiment.config.experiment import parse
from tried import slow

SITES = ("north", "south", "east", "west")


def hospital(seed: int, n: int = 90) -> list[dict[str, Any]]:
    """Patients whose illness depends on age and pressure; some are exceptions."""
    rng = np.random.default_rng(seed)
    age, pressure = rng.normal(55 + 2 * (seed % 4), 10, n), rng.normal(120 + seed % 4, 15, n)
    ill = (age - 55) / 10 + (pressure - 120) / 15 + 0.8 * rng.normal(size=n) > 0
    return [
        {"age": f"{a:.1f}", "pressure": f"{p:.1f}", "outcome": "ill" if one else "well"}
        for a, p, one in zip(age, pressure, ill, strict=True)
    ]


def written(path: Path, rows: list[dict[str, Any]], names: tuple[str, ...] = ("age", "pressure", "outcome")) -> Path:
    path.write_text("\n".join([",".join(names), *(",".join(row[name] for name in names) for row in rows)]) + "\n")
    return path


STUDY: dict[str, Any] = {
    "name": "estimate",
    "protocol": {"targets": "all", "seeds": [0, 1]},
    "model": "linear",
    "training": {"rounds": 8, "batch_size": 16, "lr": 0.1},
    "methods": ["fedavg"],
    "engine": {"threads": 1},
    "evaluation": {"resamples": 0},
    "device": "cpu",
}


def table_of(folder: Path) -> dict[str, Any]:
    sites = {name: str(folder / f"{name}.csv") for name in SITES}
    return {"name": "table", "sites": sites, "label": "outcome", "numeric": ["age", "pressure"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> fedshift.api.Results:
    place = tmp_path_factory.mktemp("estimate")
    for at, name in enumerate(SITES):
        written(place / f"{name}.csv", hospital(at))
    return fedshift.run({**STUDY, "data": table_of(place)}, place / "runs")


def run_of(results: fedshift.api.Results, site: str) -> Path:
    return results.folder / "fedavg" / site / "seed-0"


def test_a_new_site_is_estimated_from_the_sites_left_out(
    results: fedshift.api.Results, tmp_path: Path, cli: Cli
) -> None:
    new = hospital(9, 200)
    data = written(tmp_path / "new.csv", new, ("age", "pressure"))
    found = results.estimate(data, target="north", seed=0)
    model = results.model(target="north", seed=0)
    truth = 100 * np.mean(model.predict(data) == np.array([row["outcome"] for row in new]))
    assert found.sites == 4
    assert "agreement" in found.parts
    assert found.estimate == pytest.approx(truth, abs=12)
    assert found.low <= truth <= found.high
    said = json.loads(cli("estimate", run_of(results, "north"), data, "--format", "json").out)
    assert {"estimate", "low", "high", "abstain", "reasons"} <= set(said)
    found = model.estimate(data)
    assert said["estimate"] == pytest.approx(found.estimate)
    of_file = cli("estimate", run_of(results, "north") / "model.safetensors", data)
    assert f"{found.estimate:.1f} %" in of_file.out


@pytest.mark.slow
def test_samples_are_looked_at_again_and_labels_not(results: fedshift.api.Results, tmp_path: Path) -> None:
    data = written(tmp_path / "new.csv", hospital(9, 200), ("age", "pressure"))
    model = results.model(target="north", seed=0)
    estimate = model.estimate(data)
    assert not any("scores alone" in reason for reason in estimate.reasons)
    assert results.estimate(data, target="north", seed=0).estimate == estimate.estimate
    rows = hospital(9)
    wrong = [{**row, "outcome": "well"} for row in rows]
    one, other = (results.model(target="north", seed=0).estimate(written(tmp_path / "a.csv", r)) for r in (rows, wrong))
    assert one == other
    for at, name in enumerate(SITES):
        written(tmp_path / f"{name}.csv", hospital(at + 20))
    data = written(tmp_path / "new.csv", hospital(9, 200), ("age", "pressure"))
    model = results.model(target="north", seed=0)
    other = model.estimate(data, source=parse({**STUDY, "data": table_of(tmp_path)}).data)
    assert other.estimate != model.estimate(data).estimate
    assert "scores alone" in other.reasons[-1]


@pytest.mark.slow
def test_they_are_looked_at_as_a_model_reads_them_that_adapted(results: fedshift.api.Results, tmp_path: Path) -> None:
    """Its encoding is made of its target's sums, too."""
    where = Path(results.folder).parent.parent
    study = {**STUDY, "protocol": {"kind": "adapt_to_one", "targets": "all", "seeds": [0]}, "training": {"rounds": 1}}
    adapted = fedshift.run({**study, "data": table_of(where)}, tmp_path)
    data = written(tmp_path / "new.csv", hospital(9, 200), ("age", "pressure"))
    assert adapted.estimate(data, target="north", seed=0).looked_at


@pytest.mark.slow
def test_sites_of_the_run_and_models_alone_are_no_cases(results: fedshift.api.Results, tmp_path: Path) -> None:
    # North's labels are known in the run's folder: they would say the answer.
    data = results.folder.parents[1] / "north.csv"
    found = results.estimate(data, target="north", seed=0)
    assert found.sites == 3
    assert not found.abstain
    found = results.estimate(results.folder.parents[1] / "south.csv", target="north", seed=0)
    assert found.abstain
    assert "south" in found.reasons[0]
    assert (found.estimate, found.low, found.high) == (None, None, None)
    assert {measure.estimate for measure in found.measures.values()} == {None}
    model = results.model(target="north", seed=0)
    model.save(tmp_path / "model.safetensors")
    alone = fedshift.Model.load(tmp_path / "model.safetensors")
    found = alone.estimate(written(tmp_path / "new.csv", hospital(9)))
    assert found.abstain
    assert "too few sites" in found.reasons[0]
    assert model.trained.metadata == alone.trained.metadata


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:7],
        slow(lambda rows: [rows[0]] * 60),
        lambda rows: [{**row, "age": str(12 * float(row["age"]))} for row in rows],
        slow(lambda rows: [{**row, "pressure": ""} for row in rows]),
    ],
    ids=["seven rows", "one patient", "months for years", "an empty column"],
)
def test_data_that_allow_no_estimate_get_none(results: fedshift.api.Results, tmp_path: Path, change: Any) -> None:
    found = results.estimate(written(tmp_path / "x.csv", change(hospital(9))), target="north", seed=0)
    assert found.abstain
    assert found.reasons
    assert found.estimate is None


def test_mistakes_are_one_line(results: fedshift.api.Results, tmp_path: Path) -> None:
    run, data = run_of(results, "north"), written(tmp_path / "new.csv", hospital(9))
    with pytest.raises(UserError, match="jsn") as error:
        estimate(run, data, format="jsn")
    assert "json" in str(error.value)
    with pytest.raises(UserError, match="pressure"):
        estimate(run, written(tmp_path / "less.csv", hospital(9), ("age",)), format="json")
    with pytest.raises(UserError, match="estimate takes"):
        estimate(run, data, ["training.rounds=3"], format="json")
    with pytest.raises(UserError, match="did you mean"):
        estimate(results.folder, data, format="json")
    file = run_of(results, "west") / PREDICTIONS
    kept = file.read_bytes()
    file.write_bytes(kept[:-40])
    try:
        with pytest.raises(UserError, match="predictions"):
            estimate(run, data, format="json")
    finally:
        file.write_bytes(kept)


@pytest.mark.slow
def test_auroc_and_the_rates_at_the_threshold_are_estimated(
    results: fedshift.api.Results, tmp_path: Path, cli: Cli
) -> None:
    new = hospital(9, 200)
    data = written(tmp_path / "new.csv", new, ("age", "pressure"))
    model, labels = results.model(target="north", seed=0), np.array([row["outcome"] == "ill" for row in new])
    positive = list(model.trained.classes).index("ill")
    scores = model.trained.scores(model.trained.read(data).inputs)[:, positive]
    found = model.estimate(data)
    run = next(run for run in results.runs if (run.target, run.seed) == ("north", 0))
    used = next(site.threshold for site in run.sites if site.part == "target")
    assert found.threshold == used
    if positive == 1:
        auroc = found.measures["auroc"]
        assert auroc.estimate == pytest.approx(100 * roc_auc_score(labels, scores), abs=10)
    assert f"Sensitivity at threshold {used:.2f}" in cli("estimate", run_of(results, "north"), data).out


def width(found: Any) -> float:
    """Points from the low to the high end; all where there is no estimate."""
    return 100.0 if found.abstain else found.high - found.low


def right(model: fedshift.Model, data: Path, rows: list[dict[str, Any]]) -> float:
    return 100 * float(np.mean(model.predict(data) == np.array([row["outcome"] for row in rows])))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["ill", "well"])
def test_one_class_gets_no_confident_number(results: fedshift.api.Results, tmp_path: Path, of: str) -> None:
    rows = [row for row in hospital(9, 400) if row["outcome"] == of][:150]
    model, data = results.model(target="north", seed=0), written(tmp_path / "x.csv", rows)
    found, usual = model.estimate(data), model.estimate(written(tmp_path / "both.csv", hospital(9, 150)))
    truth = right(model, data, rows)
    assert width(found) >= width(usual) or found.low <= truth <= found.high
    assert found.abstain or found.low <= truth <= found.high
    for name, one in found.measures.items():
        if name != ("sensitivity" if of == model.trained.classes[1] else "specificity") and one.estimate is not None:
            assert one.high - one.low > 15, "hardly any sample is of the other class"


@pytest.mark.slow
def test_few_mixed_and_repeated_rows(results: fedshift.api.Results, tmp_path: Path) -> None:
    model = results.model(target="north", seed=0)
    few = model.estimate(written(tmp_path / "ten.csv", hospital(9)[:10]))
    many = model.estimate(written(tmp_path / "many.csv", hospital(9, 300)))
    assert width(few) > width(many) + 10
    assert all(measure.estimate is None for measure in few.measures.values()), "fewer than ten of a class are expected"
    assert any("ten" in reason or "10" in reason for one in few.measures.values() for reason in [one.reason or ""])
    rows = [row for seed in (11, 12, 13, 14) for row in hospital(seed, 40)]
    model, data = results.model(target="north", seed=0), written(tmp_path / "x.csv", rows)
    found = model.estimate(data)
    assert found.abstain or found.low <= right(model, data, rows) <= found.high
    model, rows = results.model(target="north", seed=0), hospital(9, 12)
    few = model.estimate(written(tmp_path / "few.csv", rows))
    again = model.estimate(written(tmp_path / "again.csv", rows * 40))
    assert width(again) > 0.9 * width(few)
    assert any("480 count as 12 different ones" in reason for reason in again.reasons)
    rows = hospital(9, 60) + [{**row, "age": f"{12 * float(row['age']):.1f}"} for row in hospital(10, 60)]
    found = results.estimate(written(tmp_path / "x.csv", rows), target="north", seed=0)
    assert found.abstain or found.harmful
    assert any("age" in reason for reason in found.reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda row: {**row, "age": f"{12 * float(row['age']):.1f}"},
        slow(lambda row: {**row, "pressure": ""}),
        slow(lambda row: {**row, "pressure": "99999"}),
    ],
    ids=["months for years", "no value", "a code for no value"],
)
@pytest.mark.parametrize("share", [4, slow(10)])
def test_some_rows_that_are_unlike_widen_the_interval(
    results: fedshift.api.Results, tmp_path: Path, change: Any, share: int
) -> None:
    model, rows = results.model(target="north", seed=0), hospital(9, 120)
    usual = model.estimate(written(tmp_path / "usual.csv", rows))
    mixed = [change(row) if at % share == 0 else row for at, row in enumerate(rows)]
    found = model.estimate(written(tmp_path / "mixed.csv", mixed))
    assert width(found) > width(usual) + 60 / share
    assert any("column" in reason for reason in found.reasons)


@pytest.mark.slow
def test_a_unit_between_what_is_told_and_what_is_refused_gets_no_confident_number(
    results: fedshift.api.Results, tmp_path: Path
) -> None:
    """No value is impossible, but all are much smaller: from a note to a refusal the interval widens."""
    model, rows = results.model(target="north", seed=0), hospital(9, 120)
    widths = []
    for factor in (1.0, 0.6, 0.5):
        smaller = [{**row, "pressure": f"{factor * float(row['pressure']):.1f}"} for row in rows]
        widths.append(width(model.estimate(written(tmp_path / f"{factor}.csv", smaller))))
    assert widths[0] < widths[1] <= widths[2] == 100


def test_values_too_large_for_the_model_are_named(
    results: fedshift.api.Results, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, rows = results.model(target="north", seed=0), hospital(9)
    data = written(tmp_path / "x.csv", [{**rows[0], "age": "1e300"}, *rows[1:]])
    found = model.estimate(data)
    assert found.abstain
    assert "column 'age'" in found.reasons[0]
    assert found.reasons[1] == "the model gives no probabilities for 1 of 90 samples: their values are too large"
    for refused in (model.to_label, lambda path: model.monitor(path, tmp_path / "log.jsonl")):
        with pytest.raises(UserError, match="no number of 1 of 90 samples, the first is 'row 1'"):
            refused(data)
    assert not (tmp_path / "log.jsonl").exists()
    assert not recwarn.list


@pytest.mark.slow
def test_labels_that_mean_the_opposite_are_found_by_labels_alone(results: fedshift.api.Results, tmp_path: Path) -> None:
    """No estimate can know it; 40 labels contradict the estimate's interval."""
    model, rows = results.model(target="north", seed=0), hospital(9, 200)
    other = {"ill": "well", "well": "ill"}
    data = written(tmp_path / "x.csv", [{**row, "outcome": other[row["outcome"]]} for row in rows])
    found = model.estimate(data)
    chosen = model.to_label(data, 40)
    told = {row: other[rows[row]["outcome"]] for row in chosen.rows}
    measured = chosen.measure(told).accuracy
    assert measured.high < found.low
