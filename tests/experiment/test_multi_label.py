"""Several labels from data to predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier

import fedshift
from fedshift.data.registry import parse
from fedshift.data.tasks.objective import MultiLabel
from fedshift.errors import UserError
from fedshift.evaluation.measuring import label_metrics
from fedshift.evaluation.site_metrics import Scored

NAMES = ("diabetes", "stroke", "asthma")


def patients(number: int, n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(number)
    x = draws.normal(size=(n, 3)).astype(np.float32)
    return x, (x + draws.normal(0, 0.5, (n, 3)) > [0.0, 0.8, -0.5]).astype(np.int64)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Results:
    options = {
        "name": "labels",
        "data": {"sites": {s: patients(n) for n, s in enumerate("abc")}, "task": "multi_label", "classes": NAMES},
        "protocol": {"targets": ["c"], "seeds": [0]},
        "model": "linear",
        "training": {"rounds": 20, "mini_batches": 40, "batch_size": 16, "lr": 0.5},
        "methods": ["fedavg", "alone"],
    }
    return fedshift.run(options, tmp_path_factory.mktemp("labels") / "runs")


def test_measures_are_those_of_scikit_learn_on_the_kept_predictions(results: fedshift.Results) -> None:
    frames = pytest.importorskip("pandas")
    metrics = pytest.importorskip("sklearn.metrics")
    for run in results.runs:
        kept = frames.read_parquet(results.folder / run.method / "c" / "seed-0" / "predictions.parquet")
        kept = kept[kept.part == "target"]
        true, said, scores = (kept[[f"{what}_{name}" for name in NAMES]] for what in ("label", "predicted", "score"))
        (site,) = run.targets
        assert (
            run.accuracy() == site.values["label_accuracy"] == pytest.approx(100 * (true.values == said.values).mean())
        )
        assert site.values["auroc"] == pytest.approx(100 * metrics.roc_auc_score(true, scores, average="macro"))
        assert site.values["auprc"] == pytest.approx(100 * metrics.average_precision_score(true, scores))
        assert site.values["f1"] == pytest.approx(100 * metrics.f1_score(true, said, average="macro"))
        assert site.support == true.sum().tolist()
        assert site.values["label_accuracy"] > site.baseline + 10
        assert all(low <= site.values[metric] <= high for metric, (low, high) in site.intervals.items())
        assert set(site.intervals) == set(site.values)
    assert results.rows(metric="auroc")
    assert "more frequent answer" in results.markdown()


@pytest.mark.slow
def test_predictions_are_of_each_label(results: fedshift.Results, tmp_path: Path) -> None:
    from fedshift.report.page import page
    from fedshift.report.report import whole_report

    x, _ = patients(2)
    model = results.model("fedavg")
    scores = model.predict_proba(x)
    np.testing.assert_array_equal(model.predict(x), (scores > 0.5).astype(int))
    np.savez(tmp_path / "new.npz", x=x[:1])
    (found,) = model.trained.predict(tmp_path / "new.npz")
    assert found.predicted == ", ".join(name for name, score in zip(NAMES, scores[0], strict=True) if score > 0.5)
    assert model.export("torchscript", tmp_path).difference < 1e-4
    html = page(whole_report(results.collected))
    assert "Base rates: c: diabetes" in html
    assert "Per label" in html


def test_losses_measures_and_baselines_by_hand() -> None:
    objective = MultiLabel()
    outputs = torch.tensor([[0.0, 2.0]])
    expected = (np.log(2) + np.log1p(np.exp(2))) / 2
    assert float(objective.loss(outputs, torch.tensor([[1.0, 0.0]]))) == pytest.approx(expected)
    both = objective.together(torch.tensor([[[0.0]], [[2.0]]]))
    assert both.sigmoid().item() == pytest.approx((0.5 + 1 / (1 + np.exp(-2))) / 2)
    labels = np.zeros((20, 2), dtype=np.float32)
    labels[:10, 0] = labels[:3, 1] = 1
    found = label_metrics("a", "target", Scored(labels, labels, labels), smallest_group=5)
    assert found.support == [10, None]
    assert set(found.values) == {"label_accuracy"}
    assert found.baseline is None
    draws = np.random.default_rng(0)
    labels = (draws.random((40, 3)) < (0.9, 0.4, 0.2)).astype(np.float32)
    frequent = DummyClassifier(strategy="most_frequent").fit(np.zeros((40, 1)), labels).predict(np.zeros((40, 1)))
    found = label_metrics("a", "target", Scored(labels, labels, labels))
    assert found.baseline == pytest.approx(100 * float((frequent == labels).mean()))
    assert found.baseline > 60


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,p,q\n1,0,1\n2,1,1\n")
    data: dict[str, Any] = {"name": "table", "task": "multi_label", "sites": {"a": tmp_path / "a.csv"},
                            "numeric": ["x"], "label": ["p", "q"]}  # fmt: skip
    built = parse(data).build()
    assert (built.classes, built.domains["a"].labels.tolist()) == (("p", "q"), [[0, 1], [1, 1]])
    (tmp_path / "a.csv").write_text("x,p,q\n1,0,1\n2,1,2\n")
    with pytest.raises(UserError, match=r"line 3, column 'q'"):
        parse(data).build()
