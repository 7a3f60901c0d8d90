"""What runs and rounds are compared by where both sides are measured: 2·60·90/(60 + 90) = 72."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift.evaluation.records import RoundRecord, RunResult, SelectedRound


def record(target: dict[str, float], source: dict[str, float]) -> RoundRecord:
    return RoundRecord(round=1, target_accuracy=target, source_accuracy=source, seconds=1, mini_batches=1)


def test_scores_and_distances_of_rounds_and_runs() -> None:
    both = record({"a": 50.0, "b": 70.0}, {"c": 100.0, "d": 80.0})
    assert both.target_mean == 60
    assert both.source_mean == 90
    assert both.score(both=False) == 60
    assert both.score(both=True) == pytest.approx(72)
    assert record({"a": 60.0}, {}).score(both=True) is None
    assert record({"a": 60.0}, {}).score(both=False) == 60
    assert record({}, {"c": 90.0}).score(both=True) is None
    assert record({"a": 0.0}, {"c": 0.0}).score(both=True) == 0
    masks = RoundRecord(
        round=1, target_accuracy={"a": 1, "b": 2}, target_hausdorff={"a": 3.0, "b": 8.0}, seconds=1, mini_batches=1
    )
    assert masks.hausdorff_mean == 5.5
    assert masks.hd95_mean is None
    assert "target_hd95" not in masks.model_dump()
    newer = masks.model_copy(update={"target_hd95": {"a": 2.0, "b": 4.0}})
    assert newer.hd95_mean == 3
    assert newer.model_dump()["target_hd95"] == {"a": 2.0, "b": 4.0}
    assert record({"a": 1.0}, {}).hausdorff_mean is None
    one_side, both_sides = result(), result(labelled=["c"], unlabelled=["t"])
    assert one_side.score() == one_side.accuracy() == 60
    assert both_sides.score() == pytest.approx(72)
    assert both_sides.score("oracle") == pytest.approx(2 * 75 * 25 / 100)
    assert both_sides.accuracy("oracle") == 75
    assert both_sides.source_accuracy("oracle") == 25
    assert both_sides.score("source") is None
    assert both_sides.hausdorff() == 4
    assert both_sides.hausdorff("oracle") is None


def result(**changes: Any) -> RunResult:
    last = SelectedRound(round=2, accuracy=60, source_accuracy=90, hausdorff=4)
    best = SelectedRound(round=1, accuracy=75, source_accuracy=25)
    whole = {
        "method": "m", "target": "t", "seed": 0, "selected": {"last": last, "source": None, "oracle": best},
        "classes": ["x"], "rounds": 2, "seconds": 1, "mini_batches": 1, "threads": 1, "device": "cpu",
    }  # fmt: skip
    return RunResult(**{**whole, **changes})
