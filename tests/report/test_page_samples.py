"""The samples that the page shows where it is asked to."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedshift
from fedshift.evaluation.predictions import SitePredictions, as_parquet
from fedshift.evaluation.site_metrics import Scored
from fedshift.experiment.config.experiment import load, parse
from fedshift.report.collect import collect
from fedshift.report.mistakes import ShownSamples, placed_of, predictions_of
from fedshift.report.page import page
from fedshift.report.report import whole_report
from fedshift.report.sections.blocks import Figure
from fedshift.report.sections.predictions import features_section, predictions_section

DIGITS = {
    "name": "digits",
    "data": {"name": "rotated_digits", "per_class": 4, "size": 8},
    "protocol": {"targets": ["D0"], "seeds": [0]},
    "model": {"name": "linear"},
    "training": {"rounds": 1},
    "methods": [{"name": "fedavg"}],
    "engine": {"threads": 1},
    "device": "cpu",
}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "table.yaml"


def test_pictures_and_rows_are_the_samples() -> None:
    experiment = parse(DIGITS)
    stored = experiment.data.build().domains["D0"].inputs[7]
    picture = ShownSamples(experiment).picture("D0", 7)
    assert picture is not None
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture))), stored[0])
    samples = ShownSamples(load(EXAMPLE))
    with (EXAMPLE.parent / "tables" / "east.csv").open() as file:
        row = list(csv.DictReader(file))[18]
    assert samples.words("east", 18) == f"age {row['age']}, pressure {row['pressure']}, sex {row['sex']}"
    assert samples.picture("east", 18) is None


@pytest.mark.slow
def test_features_of_each_site_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = fedshift.run(DIGITS, tmp_path)
    runs = results.collected.runs
    section = features_section(placed_of(runs, ["fedavg"], ShownSamples(parse(DIGITS))))
    drawn = section.blocks[0]
    assert isinstance(drawn, Figure)
    lines = list(csv.DictReader(io.StringIO(drawn.csv, newline="")))
    assert {line["site"] for line in lines} == {"D0", "D15", "D30", "D45", "D60", "D75"}
    assert {line["class"] for line in lines} == set(map(str, range(10)))
    text = page(whole_report(results.collected, ShownSamples(parse(DIGITS))))
    assert 'src="data:image/png;base64,' in text
    assert 'id="figure-features"' in text
    plain = page(whole_report(results.collected))
    assert "data:image" not in plain
    assert "figure-features" not in plain, "nothing of a sample is shown unasked"
    (runs[0].folder / "model.safetensors").unlink()
    assert features_section(placed_of(runs, ["fedavg"], ShownSamples(parse(DIGITS)))) is None


def test_roc_of_several_classes_has_the_mean_area(write_part: Callable[..., Path]) -> None:
    from sklearn.metrics import auc, roc_auc_score

    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 40)
    scores = rng.dirichlet(np.ones(3), 120)
    scores[np.arange(120), labels] += 0.3
    scores /= scores.sum(1, keepdims=True)
    names = ["a", "b", "c"]
    folder = write_part("m", "t", 0, 50.0, classes=names)
    scored = Scored(labels, scores.argmax(1), scores.astype(np.float32))
    kept = SitePredictions("t", "target", np.arange(120), None, scored)
    (folder / "predictions.parquet").write_bytes(as_parquet([kept], names, {}))
    section = predictions_section(predictions_of(collect(folder).runs, "m"))
    (drawn,) = [block for block in section.blocks if isinstance(block, Figure)]
    points = np.array([line[2:4] for line in csv.reader(io.StringIO(drawn.csv, newline=""))][1:], float) / 100
    assert auc(points[:, 0], points[:, 1]) == pytest.approx(roc_auc_score(labels, scores, multi_class="ovr"), abs=0.02)
