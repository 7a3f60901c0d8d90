"""A small real adaptation, bounded on both sides: handwritten digits (scikit-learn), 2 targets, some seconds.

Settings: 8×8 pixels, 60 images per class in six angles, 30 % of the base images held out; what is measured at a target
nobody trained on, and the target gives the other base images without labels. An mlp with 64 hidden units and
BatchNorm, 10 rounds of batches of 32, SGD 0.05 with momentum 0.9; all methods train on the same number of
mini-batches.

Measured, averages of D0 and D75: with seed 0, the test's, KD3A 50.3, with its setting ``released`` but public
classifiers 65.8, FedAvg 45.8, source-only (pooled) 73.3, oracle 92.2; with seeds 0 and 1 KD3A 48.8 (48.9 with Shapley
values), with its setting ``released`` but public classifiers 68.2 (of which teacher_statistics: batch alone gives
67.1), FedAvg 43.1, source-only (pooled) 74.0, oracle 93.5; with seeds 2 to 5, with Shapley values, KD3A 58.3, FedAvg
50.5, source-only 74.5, oracle 93.1. KD3A was ahead of FedAvg at each of these 12 targets and seeds. That needs
BatchNorm: with a small mnist_cnn after as little training KD3A stayed 4 to 16 points below FedAvg at D0, whatever the
gate. With all labels of D15 wrong and D0 as the target, seeds 0 and 1: KD3A 36.1, with shares by samples 33.6, FedAvg
24.2; seed 0 36.1, 33.9 and 26.7.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import fedshift

pytestmark = pytest.mark.slow

RELEASED = {"name": "kd3a", "setting": "released", "label": "released", "private_classifier": False}


def options(methods: list[Any], targets: list[str], **protocol: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "data": {"name": "rotated_digits", "per_class": 60, "size": 8},
        "protocol": {"kind": "adapt_to_one", "targets": targets, "seeds": [0], "test_fraction": 0.3, **protocol},
        "model": {"name": "mlp", "hidden": [64], "batch_norm": True},
        "training": {"rounds": 10, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
        "methods": methods,
        "engine": {"threads": 1},
        "device": "cpu",
    }


def averages(results: fedshift.api.Results) -> dict[str, dict[str, float]]:
    """Method → row of the table → mean accuracy in percent."""
    assert len({run.mini_batches for run in results.runs}) == 1
    out: dict[str, dict[str, float]] = {}
    for row in results.rows("last"):
        out.setdefault(str(row["method"]), {})[str(row["target"])] = float(row["mean"])
    return out


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    methods = ["source_only", "fedavg", "kd3a", RELEASED, "oracle"]
    return averages(fedshift.run(options(methods, ["D0", "D75"]), tmp_path_factory.mktemp("runs")))


def test_every_method_learns_and_none_is_too_good(adapted: dict[str, dict[str, float]]) -> None:
    """Chance is 10; with a label for every image of the target 99 would mean that the measured ones were seen."""
    assert set(adapted) == {"source_only", "fedavg", "kd3a", "released", "oracle"}
    for method, rows in adapted.items():
        assert 30 < rows["average"] < 98, method
        assert rows["average"] == pytest.approx(fmean([rows["D0"], rows["D75"]]))


def test_kd3a_beats_fedavg_at_equal_work_and_not_the_oracle(adapted: dict[str, dict[str, float]]) -> None:
    fedavg, oracle = adapted["fedavg"]["average"], adapted["oracle"]["average"]
    assert fedavg + 2 < adapted["kd3a"]["average"] < oracle - 20
    assert fedavg + 12 < adapted["released"]["average"] < oracle - 10


def test_the_reference_rows(adapted: dict[str, dict[str, float]]) -> None:
    """Pooled sources help, and labels of the target help most."""
    for target in ("D0", "D75"):
        assert adapted["fedavg"][target] + 8 < adapted["source_only"][target] < adapted["oracle"][target] - 8


def test_a_malicious_source_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The nearest angle says nothing true: consensus focus takes its weight away, FedAvg cannot."""
    methods = ["fedavg", "kd3a", {"name": "kd3a", "label": "by_samples", "focus": "samples"}]
    folder: Path = tmp_path_factory.mktemp("wrong")
    found = averages(fedshift.run(options(methods, ["D0"], wrong_labels={"D15": 1.0}), folder))
    assert found["fedavg"]["D0"] + 5 < found["kd3a"]["D0"] < 60
    assert found["by_samples"]["D0"] < found["kd3a"]["D0"] + 3
    lines = (folder / "small" / "kd3a" / "D0" / "seed-0" / "rounds.jsonl").read_text().splitlines()
    shares = [json.loads(line)["aggregation_weights"] for line in lines]
    mean = {name: fmean(share[name] for share in shares) for name in shares[0]}
    assert mean["D15"] < 0.3 * min(mean[name] for name in ("D30", "D45", "D60", "D75"))
