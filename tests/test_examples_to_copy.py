"""The templates in examples/templates do what they say, added to fedshift as they tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation import metric_entries
from fedshift.evaluation.weighted_samples import Classified, Outcomes
from fedshift.experiment import compatibility
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from fedshift.experiment.protocols.base import EVERY_SITE
from fedshift.import_paths import import_file

TEMPLATES = Path(__file__).resolve().parents[1] / "examples" / "templates"
SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "rotated_digits", "per_class": 4, "size": 8},
    "protocol": {"seeds": [0]},
    "model": "linear",
    "training": {"rounds": 1, "batch_size": 16, "lr": 0.1},
    "methods": ["fedavg"],
    "engine": {"threads": 1},
    "device": "cpu",
}
pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="examples/ is not beside these tests")


def template(name: str) -> Any:
    return import_file(str(TEMPLATES / f"{name}.py"))


def test_the_protocol_trains_on_the_sites_before_each() -> None:
    lengths = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in TEMPLATES.glob("*.py")}
    assert set(lengths) == {"metric.py", "protocol.py", "feature.py", "data_set.py"}
    assert max(lengths.values()) < 60
    kind = template("protocol").EarlierSites
    data = parse(SMALL).data.build()
    assert list(data.domains)[:4] == ["D0", "D15", "D30", "D45"]
    assert kind().targets_of(data) == tuple(data.domains)[1:]
    assert kind().roles_of(data, "D45") == (("D0", "D15", "D30"), ("D45",))
    assert kind().roles_of(data, EVERY_SITE)[0] == tuple(data.domains)
    split = kind().split_of(data, "D15", 0)
    assert (set(split.train), set(split.measured)) == ({"D0"}, {"D15"})
    with pytest.raises(UserError, match="no site comes before 'D0'"):
        kind(targets="D0").targets_of(data)
    with pytest.raises(UserError, match="is a simulation"):
        kind().for_deployment()


def test_the_metric_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for weighted samples, which resamples of the bootstrap are."""
    entry = template("metric").KAPPA
    assert entry.name not in metric_entries.ENTRIES
    monkeypatch.setattr(metric_entries, "ENTRIES", {**metric_entries.ENTRIES, entry.name: entry})
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 3, 60), rng.integers(0, 3, 60)
    predicted[:30] = labels[:30]
    scores = np.eye(3, dtype=np.float32)[predicted]
    weights = np.stack([np.ones(60), rng.integers(0, 4, 60).astype(float)])
    samples = Classified(Outcomes.of(labels, predicted, scores, None), weights)
    values = metric_entries.values_of("accuracy", samples, ("kappa",))["kappa"]
    wanted = [cohen_kappa_score(labels, predicted, sample_weight=row) for row in weights]
    assert values == pytest.approx(100 * np.array(wanted))


def samples_of(**sizes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {site: (rng.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2) for site, n in sizes.items()}


IN_THE_INDEX = """
import sys
from fedshift.experiment.protocols import index
from fedshift.import_paths import import_file
kind = import_file(sys.argv[1]).EarlierSites
index.Protocol, index.PROTOCOLS["earlier_sites"] = index.Protocol | kind, kind
import json, fedshift
results = fedshift.run({**json.loads(sys.argv[2]), "protocol": {"kind": "earlier_sites", "seeds": [0]}}, sys.argv[3])
print(sorted({run.target for run in results.runs}), results)
"""


@pytest.mark.slow
def test_an_experiment_runs_under_the_protocol_once_the_index_has_it(tmp_path: Path) -> None:
    script = [sys.executable, "-c", IN_THE_INDEX, TEMPLATES / "protocol.py", json.dumps(SMALL), tmp_path]
    told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert told.startswith("['D15', 'D30', 'D45', 'D60', 'D75']")


def test_the_feature_is_asked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "OF_EXPERIMENT", (*compatibility.OF_EXPERIMENT, template("feature").fits))
    options = {**SMALL, "data": {"name": "arrays", "sites": samples_of(north=20, south=12, west=40)}}
    for size, expected in ((12, ()), (16, ("training.batch_size: 16 is more than the 12 samples of 'south'",))):
        experiment = parse({**options, "training": {**SMALL["training"], "batch_size": size}})
        warnings = compatibility.check_fit(Plan(experiment, experiment.data.build()))
        assert tuple(warning for warning in warnings if "batch_size" in warning) == expected
    experiment = parse({**options, "training": {**SMALL["training"], "batch_size": 41}})
    with pytest.raises(UserError, match="41 is more than any site has samples"):
        compatibility.check_fit(Plan(experiment, experiment.data.build()))


def test_the_data_set_is_read_and_trained_on(tmp_path: Path) -> None:
    (tmp_path / "clinic").mkdir()
    for site, (inputs, labels) in samples_of(north=20, south=20, west=20).items():
        np.savez(tmp_path / "clinic" / f"{site}.npz", x=inputs, y=labels)
    data = {"name": f"{TEMPLATES / 'data_set.py'}:Sites", "folder": str(tmp_path / "clinic")}
    results = fedshift.run({**SMALL, "data": data}, tmp_path / "runs")
    assert {run.target for run in results.runs} == {"north", "south", "west"}
