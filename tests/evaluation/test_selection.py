"""Selection rules: ties, missing parts, and what a record says after it was written and read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord, RunResult, SelectedRound
from fedshift.evaluation.selection import LastRound, Oracle, SourceValidation, selected_rounds, selection_rule


def record(number: int, target: float | None, *sources: float) -> RoundRecord:
    return RoundRecord(
        round=number,
        target_accuracy={} if target is None else {"t": target},
        source_accuracy={f"s{index}": value for index, value in enumerate(sources)},
        seconds=1.0,
        mini_batches=number,
    )


def test_each_rule_by_hand() -> None:
    # Mean accuracy of the sources: 80, 90, 90; of the target: 70, 60, 70.
    rounds = [record(1, 70, 70, 90), record(2, 60, 95, 85), record(3, 70, 90, 90)]
    assert LastRound().select(rounds) == 2
    assert SourceValidation().select(rounds) == 1
    assert Oracle().select(rounds) == 0
    assert SourceValidation().select([record(1, 50, 100, 0), record(2, 50, 60, 60)]) == 1
    rounds = [record(1, 70), record(2, 60)]
    assert SourceValidation().select(rounds) is None
    assert selected_rounds(rounds)["source"] is None
    rounds = [record(5, 60, 70), record(10, None, 99), record(15, 50, 60)]
    assert SourceValidation().select(rounds) == 0
    assert Oracle().select(rounds) == 0
    with pytest.raises(ValueError, match="last"):
        selected_rounds(rounds[:2])
    assert selection_rule("oracle") == Oracle()
    with pytest.raises(UserError, match="oracle"):
        selection_rule("orcale")


def test_what_a_chosen_round_says_is_of_that_round() -> None:
    distances = {"target_hausdorff": {"t": 9.0}, "target_hd95": {"t": 4.0}}
    rounds = [record(1, 70, 80).model_copy(update=distances), record(2, 60, 70)]
    chosen = selected_rounds(rounds)["source"]
    assert (chosen.hausdorff, chosen.hd95) == (9.0, 4.0)
    measured = record(7, 50, 60, 70).model_copy(
        update={"target_accuracy": {"a": 40.0, "b": 60.0}, "per_class": [None, 5]}
    )
    last = selected_rounds([measured])["last"]
    sites = {**measured.target_accuracy, **measured.source_accuracy}
    assert last == SelectedRound(round=7, accuracy=50.0, source_accuracy=65.0, sites=sites, per_class=[None, 5])
    chosen = selected_rounds([record(1, 80, 60), record(2, 50, 70)])
    oracle, last = chosen["oracle"], chosen["last"]
    assert (oracle.accuracy, oracle.source_accuracy) == (80.0, 60.0)
    assert (last.accuracy, last.source_accuracy) == (50.0, 70.0)


@pytest.mark.parametrize("rule", [LastRound(), SourceValidation(), Oracle()])
def test_no_round(rule: LastRound | SourceValidation | Oracle) -> None:
    assert rule.select([]) is None


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_oracle_is_an_upper_bound_and_the_first_best(values: list[tuple[int, int]]) -> None:
    rounds = [record(index, float(target), float(source)) for index, (target, source) in enumerate(values)]
    chosen = selected_rounds(rounds)
    last, source, oracle = chosen["last"], chosen["source"], chosen["oracle"]
    assert oracle.accuracy >= max(last.accuracy, source.accuracy)
    assert oracle.round == [target for target, _ in values].index(max(target for target, _ in values))
    assert source.round == [part for _, part in values].index(max(part for _, part in values))


def test_records_survive_writing_and_refuse_what_cannot_be() -> None:
    written = RoundRecord(
        round=1,
        target_accuracy={"t": 12.5},
        losses={"a": math.inf, "b": 0.1},
        seconds=0.5,
        mini_batches=3,
        bytes={"up": {"weights": 10}, "down": {}},
    )
    text = written.model_dump_json()
    assert "\n" not in text
    assert RoundRecord.model_validate_json(text) == written
    for bad in (-1.0, 100.1, math.nan):
        with pytest.raises(ValidationError):
            record(1, bad)
    assert record(1, 50.0).model_copy(update={"metric": "rmse"}).model_dump()["metric"] == "rmse"
    assert "metric" not in record(1, 50.0).model_dump()
    with pytest.raises(ValidationError, match="last"):
        RunResult(
            method="m", target="t", seed=0, selected={"last": None}, classes=["a"], rounds=1, seconds=1.0,
            mini_batches=1, threads=1, device="cpu",
        )  # fmt: skip
