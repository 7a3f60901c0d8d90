"""What a site says of a model that it is sent, against its own files; and what a coordinator makes of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked import SETTING, request
from loopback import deploy, options_of
from outcomes import result
from pydantic import ValidationError
from site_yaml import site_file, write_data
from test_hostile_coordinator import program_of
from test_hostile_site import HOSTILE, attack, refusals

from fedshift.deploy import site_cards
from fedshift.deploy.coordinator import _recall
from fedshift.deploy.handshake import clock_difference
from fedshift.deploy.remote.policy import sent_kinds, whole_number
from fedshift.deploy.remote.requests import MeasureAnswer, Measures, SeedSplit, check_measures
from fedshift.deploy.site_cards import GivenTable
from fedshift.deploy.site_estimates import KeptScores, SiteEstimates
from fedshift.deploy.site_file import load_site
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.plain_sums import GivenSums, plain_sums
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.federation.messages import Content
from fedshift.federation.plain_values import parse_json
from fedshift.federation.setting_json import SettingRecipe
from fedshift.weights import Weights


def answer_and_rows(tmp_path: Path, **policy: object) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """What site ``north`` (40 samples) measures of a model of zeros; labels of its training and held-out rows."""
    program = program_of(tmp_path, **policy)
    train, held_out = program._rows(SeedSplit(test_fraction=0.3, split="auto", seed=0))
    labels = np.asarray(program.holding.domain.labels)
    return request(program, do="measure", round=1), labels[train], labels[held_out]


@pytest.mark.threat("few_samples")
def test_it_measures_on_its_held_out_rows(tmp_path: Path) -> None:
    """A model of zeros says class 0 of everything: right where a held-out label is 0. 12 are held out, 4 of each class:
    with groups of 5 no class is told, and the accuracy of all is.
    """
    header, train, held_out = answer_and_rows(tmp_path, smallest_group=1)
    measures: Any = header["measures"]
    assert len(train) + len(held_out) == 40
    assert measures["samples"] == len(held_out) != len(train)
    assert measures["accuracy"] == pytest.approx(100 * (held_out == 0).mean())
    counts = [int((held_out == label).sum()) for label in range(3)]
    assert measures["classes"] == [[counts[0], counts[0]], [0, counts[1]], [0, counts[2]]]
    assert max(counts) < 5
    assert answer_and_rows(tmp_path / "five", smallest_group=5)[0]["measures"]["classes"] == [None] * 3
    refused, _, _ = answer_and_rows(tmp_path / "more", smallest_group=len(held_out) + 1)
    assert "smallest_group" in str(refused["message"])


def test_the_recall_of_a_class_over_sites() -> None:
    """3 of 4 and 1 of 12 are 4 of 16, which is not the mean of 75 % and 8.3 %."""
    assert (_recall([(3, 4), (1, 12)]), _recall([(3, 4), (0, 0)])) == (25.0, 75.0)
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
@pytest.mark.parametrize("accuracy", [-0.5, 100.5, 10**400, float("nan"), "50", None])
def test_an_accuracy_lies_between_0_and_100(accuracy: Any) -> None:
    for possible in (0, 100):
        assert check_header({"accuracy": possible, "samples": 4, "classes": [[2, 2]] * 3}, SETTING).accuracy == possible
    with pytest.raises(FedshiftError, match="accuracy"):
        check_header({**GOOD, "accuracy": accuracy}, SETTING)


@pytest.mark.threat("impossible_accuracy")
@pytest.mark.parametrize("samples", [10**400, True, 0])
def test_samples_that_cannot_be_are_refused(samples: Any) -> None:
    with pytest.raises(FedshiftError, match="measure"):
        check_header({**GOOD, "samples": samples}, SETTING)
    assert check_header(GOOD, SETTING) == Measures(accuracy=50.0, samples=4, classes=((1, 2), None, (1, 2)))


@pytest.mark.threat("impossible_accuracy")
@pytest.mark.parametrize(
    "classes",
    [[], [[1, 2]] * 4, [[1, 10**400]] * 3, [[3, 2], None, None], ["ab", None, None], [[1], None, None], None, {}],
)
def test_classes_that_cannot_be_are_refused(classes: Any) -> None:
    with pytest.raises(FedshiftError, match="measure"):
        check_header({**GOOD, "classes": classes}, SETTING)


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


@pytest.mark.threat("few_samples")
def test_a_site_reports_all_metrics_when_it_is_asked(tmp_path: Path) -> None:
    """A model of zeros says class 0 with a probability of a third: its Brier score is ½(4/9 + 1/9 + 1/9). With groups
    of 5 nothing that looks at classes is told.
    """
    measures = whole(tmp_path, smallest_group=1)["measures"]
    metrics: Any = check_header(measures, SETTING).metrics
    assert metrics.values["brier"] == pytest.approx(100 / 3, abs=1e-4)
    assert metrics.values["auroc"] == pytest.approx(50.0)
    assert metrics.values["accuracy"] == measures["accuracy"]
    assert sum(metrics.support) == metrics.samples == measures["samples"]
    assert "accuracy" in metrics.intervals
    few = whole(tmp_path / "few", smallest_group=5)["measures"]["metrics"]
    assert (few["support"], set(few["values"])) == ([None] * 3, {"accuracy", "brier", "calibration_error"})
    assert set(few["intervals"]) == {"accuracy", "brier"}
    silent = whole(tmp_path / "silent", smallest_group=1, send=["weights", "numbers", "accuracy"])
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


def test_the_categories_of_all_columns_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_cards, "MOST_CATEGORIES", 3)
    table: dict[str, Any] = {"kind": "table", "numeric": (), "categorical": ("a", "b"), "any_missing": ()}
    table |= {"count": (), "total": (), "squares": ()}
    assert GivenTable(**table, categories=(("x", "y"), ("z",))).categories == (("x", "y"), ("z",))
    with pytest.raises(ValidationError, match="more than 3 categories"):
        GivenTable(**table, categories=(("x", "y"), ("z", "w")))


def test_counts_of_scores_arrive_and_fit_the_classes() -> None:
    draw = np.random.default_rng(0)
    second, labels = draw.random(50), draw.integers(0, 2, 50)
    sums = sums_of(np.stack([1 - second, second], axis=1), labels, 0.3)
    arrived = GivenSums.model_validate(plain_sums(sums)).sums.by_score
    assert arrived is not None
    assert sums.by_score is not None
    np.testing.assert_array_equal(arrived, sums.by_score)
    other = np.roll(sums.by_score, 1, axis=0)
    with pytest.raises(ValidationError, match="scores are not those of the classes"):
        GivenSums.model_validate({**plain_sums(sums), "by_score": (other + 1).tolist()})
    before = {name: value for name, value in plain_sums(sums).items() if name != "by_score"}
    assert GivenSums.model_validate(before).by_score is None


@pytest.mark.parametrize(("rare", "given"), [(9, False), (10, True), (11, True), (0, True)])
def test_sums_are_of_enough_samples_of_each_class(tmp_path: Path, rare: int, given: bool) -> None:
    files = write_data(tmp_path / "data", {"north": 40})
    send = ["weights", "numbers", "confidences"]
    site = SiteEstimates(load_site(site_file(tmp_path, "north", files["north"], send=send, smallest_group=10)))
    labels = np.repeat([0, 1], [30, rare])
    scores = np.random.default_rng(0).dirichlet([1.0, 1.0], len(labels))
    sums = site.sums("run", KeptScores(scores, labels), 2, {"sent": {}})
    assert (sums is not None) is given
