"""From a run to its predictions per sample, and back to the metrics in its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from sklearn.metrics import roc_auc_score
from small import experiment, save

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult


def two_classes(seed: int, samples: int) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    labels = (np.arange(samples) % 3 == 0).astype(np.int64)
    x = draws.normal(size=(samples, 5)).astype(np.float32)
    x[:, 0] += 1.5 * labels
    return {"x": x, "y": labels}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Results:
    folder = tmp_path_factory.mktemp("two")
    where = save(folder, a=two_classes(1, 60), b=two_classes(2, 48), c=two_classes(3, 54))
    options = experiment(where, protocol={"seeds": [0], "test_fraction": 0.5})
    return fedshift.run({**options, "evaluation": {"headline": "auroc", "resamples": 50}}, folder / "runs")


def test_predictions_give_the_metrics_of_the_result(finished: fedshift.Results) -> None:
    for run in finished.collected.runs:
        table = parquet.read_table(run.folder / "predictions.parquet")
        kept = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        assert json.loads(table.schema.metadata[b"fedshift"])["seed"] == 0
        for site in run.result.sites:
            rows = (kept["site"] == site.site) & (kept["part"] == site.part)
            assert np.count_nonzero(rows) == site.samples == sum(count or 0 for count in site.support)
            area = roc_auc_score(kept["label"][rows] == "1", kept["score_1"][rows])
            assert site.values["auroc"] / 100 == pytest.approx(area, abs=1e-12)
            right = kept["label"][rows] == kept["predicted"][rows]
            assert site.values["accuracy"] == pytest.approx(100 * right.mean())
            assert len(np.unique(kept["row"][rows])) == site.samples
        selected = run.result.selected["last"]
        assert selected.accuracy == run.result.targets[0].values["accuracy"]
    result = finished.runs[0]
    chosen = [site.threshold for site in result.sites if site.part == "held_out"]
    assert len(chosen) == 2
    assert result.targets[0].threshold == pytest.approx(np.mean(chosen))  # the median of two
    assert {"sensitivity", "specificity"} <= set(result.targets[0].values)


def test_the_headline_of_the_experiment_is_the_tables(finished: fedshift.Results) -> None:
    rows = {row["target"]: row for row in finished.rows()}
    for result in finished.runs:
        assert rows[result.target]["mean"] == result.targets[0].values["auroc"]
        assert rows[result.target]["interval"] == list(result.targets[0].intervals["auroc"])
        assert rows[result.target]["majority"] == pytest.approx(100 * 2 / 3, abs=1)
    accuracy = {row["target"]: row["mean"] for row in finished.rows(metric="accuracy")}
    assert accuracy["a"] == finished.runs[0].accuracy()
    with pytest.raises(UserError, match="last round only"):
        finished.rows("source", "auroc")
    assert finished.rows("source")[0]["mean"] == finished.runs[0].accuracy("source")
    old = finished.runs[0].model_dump(mode="json")
    del old["sites"]
    result = RunResult.model_validate_json(json.dumps(old))
    assert result.sites == []
    assert result.site_metric("auroc") is None


def test_without_predictions_the_metrics_are_there(tmp_path: Path) -> None:
    where = save(tmp_path, a=two_classes(1, 30), b=two_classes(2, 24))
    options = experiment(where, protocol={"targets": ["a"], "seeds": [0]}, evaluation={"predictions": False})
    run = fedshift.run(options, tmp_path / "runs").collected.runs[0]
    assert not (run.folder / "predictions.parquet").exists()
    assert run.result.targets[0].values["auroc"] > 0
