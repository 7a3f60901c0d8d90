"""What a site says of a model that it is sent, against its own files; and what a coordinator makes of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import (
    SETTING,
    deploy,
    options_of,
    request,
    result,
)
from test_hostile_coordinator import program_of
from test_hostile_site import HOSTILE, attack, refusals

from fedshift.deploy.coordinator import _recall
from fedshift.deploy.handshake import clock_difference
from fedshift.deploy.remote.policy import sent_kinds, whole_number
from fedshift.deploy.remote.requests import MeasureAnswer, Measures, SeedSplit, check_measures
from fedshift.errors import FedshiftError
from fedshift.federation.messages import Content
from fedshift.federation.plain_values import parse_json
from fedshift.federation.setting_json import SettingRecipe
from fedshift.weights import Weights


def answer_and_rows(tmp_path: Path, **policy: object) -> tuple[dict[str, object], np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """What site ``north`` (40 samples) measures of a model of zeros; labels of its training and held-out rows."""
    program = program_of(tmp_path, **policy)
    header = request(program, do="measure", round=1)
    train, held_out = program._rows(SeedSplit(test_fraction=0.3, split="auto", seed=0))
    labels = np.asarray(program.holding.domain.labels)
    return header, labels[train], labels[held_out]


def test_it_measures_on_its_held_out_rows(tmp_path: Path) -> None:
    """A model of zeros says class 0 of everything: right where a held-out label is 0."""
    header, train, held_out = answer_and_rows(tmp_path, smallest_group=1)
    measures = header["measures"]
    assert len(train) + len(held_out) == 40
    assert measures["samples"] == len(held_out) != len(train)  # type: ignore[index]
    assert measures["accuracy"] == pytest.approx(100 * (held_out == 0).mean())  # type: ignore[index]
    counts = [int((held_out == label).sum()) for label in range(3)]
    assert measures["classes"] == [[counts[0], counts[0]], [0, counts[1]], [0, counts[2]]]  # type: ignore[index]


def test_classes_of_few_samples_are_not_told(tmp_path: Path) -> None:
    """12 held out, 4 of each class: with groups of 5 no class is told, the accuracy of all is."""
    header, _, held_out = answer_and_rows(tmp_path, smallest_group=5)
    assert max(int((held_out == label).sum()) for label in range(3)) < 5
    assert header["measures"]["classes"] == [None, None, None]  # type: ignore[index]
    refused, _, _ = answer_and_rows(tmp_path / "more", smallest_group=len(held_out) + 1)
    assert "smallest_group" in str(refused["message"])


def test_the_recall_of_a_class_over_sites() -> None:
    """3 of 4 and 1 of 12 are 4 of 16, which is not the mean of 75 % and 8.3 %."""
    assert _recall([(3, 4), (1, 12)]) == 25.0
    assert _recall([(3, 4), (0, 0)]) == 75.0
    assert _recall([(0, 0), (0, 0)]) is None
    assert _recall([(3, 4), None]) is None  # a site that does not say hides the class of all


@pytest.mark.parametrize(
    ("site_time", "ahead"),
    [(100.0, 0.0), (104.9, 0.0), (105.0, 0.0), (110.0, 5.0), (99.0, -1.0), (40.0, -60.0), (165.0, 60.0)],
)
def test_clocks(site_time: float, ahead: float) -> None:
    """Asked at 100 s, answered by 105 s: times between say nothing, others how far the clock is off at least."""
    assert clock_difference(site_time, 100.0, 105.0) == ahead


def test_numbers_and_descriptions() -> None:
    assert [whole_number(value) for value in (0, 7, -1, True, 1.0, "3", None, 2**53)] == [0, 7, -1, -1, -1, -1, -1, -1]
    content: dict[str, Content] = {"m": {"a": Weights({"w": torch.zeros(2, 3)})}, "n": 4}
    assert sent_kinds(content) == {
        "m/a": {"kind": "weights", "bytes": 24, "shapes": {"w": [2, 3]}},
        "n": {"kind": "numbers"},
    }


def check_header(header: dict[str, Any], setting: dict[str, Any]) -> Measures:
    """A site's report, parsed and checked as the coordinator does it."""
    report = parse_json(MeasureAnswer, json.dumps({"measures": header}), "it").measures
    check_measures(report, SettingRecipe.model_validate(setting, strict=False))
    return report


GOOD: dict[str, Any] = {"accuracy": 50.0, "samples": 4, "classes": [[1, 2], None, [1, 2]]}


@pytest.mark.threat("impossible_accuracy")
@pytest.mark.parametrize(
    "changes",
    [
        {"classes": []},
        {"classes": [[1, 2]] * 4},
        {"classes": [[1, 10**400]] * 3},
        {"classes": [[3, 2], None, None]},
        {"classes": ["ab", None, None]},
        {"classes": [[1], None, None]},
        {"classes": None},
        {"classes": {}},
        {"samples": 10**400},
        {"samples": True},
        {"samples": 0},
        {"accuracy": 10**400},
        {"accuracy": float("nan")},
        {"accuracy": "50"},
        {"accuracy": None},
    ],
)
def test_measures_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FedshiftError, match="measure"):
        check_header({**GOOD, **changes}, SETTING)
    assert check_header(GOOD, SETTING) == Measures(accuracy=50.0, samples=4, classes=((1, 2), None, (1, 2)))


METRICS: dict[str, Any] = {
    "site": "x",
    "part": "target",
    "samples": 4,
    "support": [2, None, 2],
    "values": {"accuracy": 50.0, "brier": 20.0},
    "intervals": {"accuracy": [30.0, 70.0]},
    "threshold": None,
    "reliability": [[55.0, 50.0, 2]],
}


@pytest.mark.threat("impossible_accuracy")
@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 5},
        {"support": [2, 2]},
        {"support": [4, 1, 1]},
        {"support": [10**400, 0, 0]},
        {"values": {"auroc": 100.1}},
        {"values": {"auroc": float("nan")}},
        {"values": {"secret": 1.0}},
        {"intervals": {"accuracy": [70.0, 30.0]}},
        {"intervals": {"accuracy": [30.0]}},
        {"reliability": [[55.0, 50.0, 5]]},
        {"reliability": [[55.0, 50.0, 0]] * 11},
        {"threshold": 1.5},
        {"more": 1},
    ],
)
def test_metrics_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FedshiftError, match="metrics"):
        check_header({**GOOD, "metrics": {**METRICS, **changes}}, SETTING)
    metrics = check_header({**GOOD, "metrics": METRICS}, SETTING).metrics
    assert metrics is not None
    assert (metrics.values, metrics.support) == ({"accuracy": 50.0, "brier": 20.0}, [2, None, 2])


WHOLE = {"part": "target", "resamples": 50, "threshold": 0.5}


def whole(tmp_path: Path, asked: Any = WHOLE, **policy: object) -> dict[str, Any]:
    """What site ``north`` answers where all metrics are asked for."""
    return request(program_of(tmp_path, **policy), do="measure", round=1, whole=asked)


def test_a_site_reports_all_metrics_when_it_is_asked(tmp_path: Path) -> None:
    """A model of zeros says class 0 with a probability of a third: its Brier score is ½(4/9 + 1/9 + 1/9)."""
    measures = whole(tmp_path, smallest_group=1)["measures"]
    metrics = check_header(measures, SETTING).metrics
    assert metrics is not None
    assert metrics.values["brier"] == pytest.approx(100 / 3, abs=1e-4)
    assert metrics.values["auroc"] == pytest.approx(50.0)
    assert metrics.values["accuracy"] == measures["accuracy"]
    assert sum(metrics.support) == metrics.samples == measures["samples"]
    assert "accuracy" in metrics.intervals


@pytest.mark.threat("few_samples")
def test_metrics_of_few_samples_are_not_told(tmp_path: Path) -> None:
    """12 held out, 4 of each class: with groups of 5 nothing that looks at classes is told."""
    metrics = whole(tmp_path, smallest_group=5)["measures"]["metrics"]
    assert metrics["support"] == [None, None, None]
    assert set(metrics["values"]) == {"accuracy", "brier", "calibration_error"}
    assert set(metrics["intervals"]) == {"accuracy", "brier"}


def test_metrics_keep_to_the_policy(tmp_path: Path) -> None:
    silent = whole(tmp_path, smallest_group=1, send=["weights", "numbers", "accuracy"])
    assert silent["measures"]["metrics"] is None
    assert silent["measures"]["accuracy"] >= 0
    for number, asked in enumerate(({**WHOLE, "threshold": 2.0}, {"part": "all"}, [1])):
        assert "whole" in str(whole(tmp_path / str(number), asked)["message"])


def test_measures_of_no_class_leave_the_run_whole(tmp_path: Path) -> None:
    def empty(header: dict[str, Any], content: dict[str, Any]) -> None:
        header["measures"]["classes"] = []

    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0], "test_fraction": 0.3})
    there, _ = deploy(tmp_path, options, unseen={}, transport=attack(tmp_path, empty, do="measure"))
    assert refusals(tmp_path) == {HOSTILE}
    last = json.loads((there / "fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["target_accuracy"]) == {"south", "east"}
    assert result(there, "fedavg", "sites")


@pytest.mark.threat("impossible_accuracy")
@pytest.mark.parametrize("accuracy", [-0.5, 100.5])
def test_an_accuracy_lies_between_0_and_100(accuracy: float) -> None:
    good = {"accuracy": 100.0, "samples": 4, "classes": [[2, 2], [2, 2]]}
    for possible in (0, 100):
        assert check_header({**good, "accuracy": possible}, {**SETTING, "classes": 2}).accuracy == possible
    with pytest.raises(FedshiftError, match="accuracy"):
        check_header({**good, "accuracy": accuracy}, {**SETTING, "classes": 2})
