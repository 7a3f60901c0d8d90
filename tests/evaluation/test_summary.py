"""Mean ± standard error, rows and averages."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.evaluation.summary import Row, mean_and_standard_error, rows


def result(method: str, target: str, seed: int, last: float, source: float | None = None) -> RunResult:
    return RunResult(
        method=method, target=target, seed=seed, classes=["a", "b"], rounds=2, seconds=1.0, mini_batches=2, threads=1,
        device="cpu",
        selected={
            "last": SelectedRound(round=2, accuracy=last),
            "source": None if source is None else SelectedRound(round=1, accuracy=source),
            "oracle": SelectedRound(round=1, accuracy=100.0),
        },
    )  # fmt: skip


def test_standard_error_by_hand() -> None:
    # Deviations −3, −1, 4: s² = 26 / 2, so s/√3 = √(13/3).
    mean, error = mean_and_standard_error([90.0, 92.0, 97.0])
    assert mean == 93.0
    assert error == pytest.approx((13 / 3) ** 0.5)
    assert mean_and_standard_error([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="values"):
        mean_and_standard_error([])


@settings(max_examples=40)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=20))
def test_scipy_agrees(values: list[float]) -> None:
    assert mean_and_standard_error(values)[1] == pytest.approx(stats.sem(values), abs=1e-9)


def test_rows_by_hand() -> None:
    found = rows(
        [
            result("fedavg", "b", 1, 80.0),
            result("fedavg", "b", 0, 70.0),
            result("fedavg", "a", 0, 50.0),
            result("fedavg", "a", 1, 60.0),
        ],
        targets=["a", "b"],
    )
    assert found == [
        Row(method="fedavg", target="a", select="last", n=2, mean=55.0, standard_error=5.0, seeds=[50.0, 60.0]),
        Row(method="fedavg", target="b", select="last", n=2, mean=75.0, standard_error=5.0, seeds=[70.0, 80.0]),
        Row(method="fedavg", target="average", select="last", n=2, mean=65.0, standard_error=5.0, seeds=[60.0, 70.0]),
    ]
    results = [result("z", "t2", 0, 1.0), result("a", "t1", 0, 1.0)]
    assert [(row.method, row.target) for row in rows(results)] == [
        ("z", "t2"), ("z", "average"), ("a", "t1"), ("a", "average"),
    ]  # fmt: skip
    told = rows([*results, result("z", "t1", 0, 1.0)], methods=["a", "z"], targets=["t1", "t2"])
    assert [(row.method, row.target) for row in told] == [
        ("a", "t1"), ("a", "average"), ("z", "t1"), ("z", "t2"), ("z", "average"),
    ]  # fmt: skip
    found = rows([result("m", "a", 0, 10.0), result("m", "a", 1, 20.0), result("m", "b", 1, 40.0)])
    average = found[-1]
    assert (average.target, average.n, average.mean, average.standard_error) == ("average", 1, 30.0, None)
    nothing_common = rows([result("m", "a", 0, 10.0), result("m", "b", 1, 40.0)])
    assert [row.target for row in nothing_common] == ["a", "b"]
    found = rows([result("m", "a", 0, 10.0, source=30.0), result("m", "a", 1, 20.0)], "source")
    assert [(row.target, row.n, row.mean) for row in found] == [("a", 1, 30.0), ("average", 1, 30.0)]
    assert rows([result("m", "a", 0, 10.0)], "source") == []
    with pytest.raises(ValueError, match=r"m at a .*0"):
        rows([result("m", "a", 0, 10.0), result("m", "a", 0, 10.0)])


accuracies = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3)), st.floats(0, 100), min_size=1, max_size=12
)


@settings(max_examples=40)
@given(accuracies)
def test_average_is_the_mean_over_targets_per_seed(drawn: dict[tuple[str, int], float]) -> None:
    found = rows([result("m", target, seed, value) for (target, seed), value in drawn.items()])
    targets = {target for target, _ in drawn}
    whole = [seed for seed in range(4) if all((target, seed) in drawn for target in targets)]
    averages = [row for row in found if row.target == "average"]
    if not whole:
        assert averages == []
    else:
        expected = [sum(drawn[target, seed] for target in targets) / len(targets) for seed in whole]
        assert averages[0].seeds == pytest.approx(expected)
        assert averages[0].mean == pytest.approx(fmean(expected))
