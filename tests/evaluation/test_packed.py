"""Packed runs read back as they were, but for some digits; a file that somebody spoiled is named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.errors import UserError
from fedshift.evaluation.packs import MOST_NAMES, ROUNDS, RUNS, PackedRun, decode, decode_rounds, encode
from fedshift.files import names_a_folder

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\r\n"), min_size=1, max_size=6)
TARGETS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=6).filter(
    names_a_folder
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "null", "1e3", "Infinity", " a", "a,b", '"', "x\ny", "=1+1", "%2E", "é"])
    | st.text(st.characters(codec="utf-8"), max_size=8)
)
TREES = st.recursive(
    LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.just("a.b") | NAMES, below, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(["selected", "options", "data", "classes", "warnings", "more"]), TREES)


@st.composite
def runs(draw: st.DrawFn) -> list[PackedRun]:
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from(["fedavg", "kd3a", "1"]), TARGETS, st.integers(0, 3)),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    common = draw(FIELDS)
    found = []
    for method, target, seed in keys:
        result = {"method": method, "target": target, "seed": seed, **common, **draw(FIELDS)}
        result["options"] = draw(st.dictionaries(NAMES, TREES, max_size=3)) if draw(st.booleans()) else {"a": {"b": 1}}
        identity = draw(st.just(result["options"]) | st.dictionaries(NAMES, TREES, max_size=3))
        lines = draw(st.none() | st.lists(st.dictionaries(NAMES, LEAVES, max_size=2), max_size=3))
        rounds = None if lines is None else "".join(json.dumps(line) + "\n" for line in lines).encode()
        found.append(PackedRun(result, identity, rounds))
    return found


def text(content: Any) -> str:
    """JSON that tells 1 from 1.0 and from true, whatever the order of names."""
    return json.dumps(content, sort_keys=True)


@pytest.mark.slow
@settings(max_examples=50)
@given(runs(), st.dictionaries(NAMES, TREES, max_size=2))
def test_what_is_packed_reads_back_as_it_was(given_runs: list[PackedRun], order: dict[str, Any]) -> None:
    files = encode(given_runs, order)
    assert files == encode(reversed(given_runs), order)
    read, planned = decode(files[RUNS])
    rounds = decode_rounds(files[ROUNDS])
    assert text(planned) == text(order)
    assert sorted(read) == sorted(run.name for run in given_runs)
    for run in given_runs:
        back = rounds.lines(read[run.name])
        assert text(read[run.name].result) == text(run.result)
        assert text(read[run.name].identity) == text(run.identity)
        assert (back is None) == (run.rounds is None)
        assert rows(back) == rows(run.rounds)


def rows(rounds: bytes | None) -> list[str]:
    return [text(json.loads(line)) for line in (rounds or b"").splitlines()]


LONG = 200 / 3


def test_few_fields_lose_digits_and_no_others() -> None:
    site = {"site": "a", "threshold": LONG, "values": {"auroc": LONG}, "intervals": {"auroc": [LONG, LONG]}}
    result = {
        "method": "fedavg",
        "target": "a",
        "seed": 0,
        "selected": {"last": {"accuracy": LONG, "sites": {"a": LONG}, "per_class": [LONG, None]}},
        "sites": [{**site, "reliability": [[LONG, LONG, 12345678]]}],
        "seconds": LONG,
        "privacy": {"a": {"epsilon": LONG}},
        "options": {"losses": LONG, "seconds": LONG},
        "data": {"training_samples": {"a": 12345678}},
    }
    last = {
        "round": 2,
        "target_accuracy": {"a": LONG},
        "source_accuracy": {"b": LONG},
        "bytes": {"up": {"x": 12345678}},
    }
    lines = [
        {"round": 1, "losses": {"b": LONG}},
        {**last, "per_class": [LONG, None], "seconds": LONG, "extra": {"c": LONG}},
    ]
    run = PackedRun(result, result["options"], "".join(json.dumps(line) + "\n" for line in lines).encode())
    files = encode([run], {})
    read = decode(files[RUNS])[0][run.name]
    lines_back = decode_rounds(files[ROUNDS]).lines(read)
    result["selected"]["last"]["per_class"] = [66.667, None]
    result["sites"][0]["reliability"] = [[66.667, 66.667, 12345678]]
    assert read.result == result
    assert list(map(json.loads, lines_back.splitlines())) == [
        {"round": 1, "losses": {"b": 66.667}},
        {**last, "per_class": [66.667, None], "seconds": 66.667, "extra": {"c": 66.667}},
    ]


def made() -> dict[str, bytes]:
    """Two runs of one method at one target."""
    both = []
    for seed in (0, 1):
        result = {
            "method": "fedavg",
            "target": "east",
            "seed": seed,
            "selected": {"last": {"accuracy": 0.1 + 0.2 + seed, "per_class": [50.0, None]}},
            "seconds": 3.5,
            "warnings": ["one, two"] * seed,
            "options": {"lr": 0.1, "method": {"name": "fedavg"}, "seed": seed},
        }
        both.append(PackedRun(result, result["options"], b'{"round":1}\n{"round":2}\n'))
    return encode(both, {"methods": ["fedavg"]})


def table(data: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(data))


def test_columns_are_typed_few_and_packed_alike_again() -> None:
    files = made()
    runs, rounds = table(files[RUNS]), table(files[ROUNDS])
    assert runs.column("selected.last.accuracy").to_pylist() == [0.30000000000000004, 1.3]
    assert (runs.schema.field("seed").type, runs.schema.field("seconds").type) == (pa.int64(), pa.float64())
    assert runs.schema.field("warnings").type == pa.list_(pa.string())
    assert json.loads(runs.column("settings")[1].as_py())["seed"] == 1
    assert rounds.select(["method", "target", "seed", "round.round"]).to_pylist() == [
        {"method": "fedavg", "target": "east", "seed": seed, "round.round": number}
        for seed in (0, 1)
        for number in (1, 2)
    ]
    bytes_by_site = {f"s{number}": {"up": {"weights": number}} for number in range(10 * MOST_NAMES)}
    run = PackedRun({"method": "fedavg", "target": "a", "seed": 0, "bytes_by_site": bytes_by_site}, {})
    files = encode([run], {})
    assert table(files[RUNS]).num_columns == 5
    assert decode(files[RUNS])[0][run.name].result == run.result
    files = made()
    read, order = decode(files[RUNS])
    rounds = decode_rounds(files[ROUNDS])
    kept = [replace(run, rounds=rounds.lines(run)) for run in read.values()]
    assert encode(kept, order) == files


@pytest.mark.parametrize("loss", [1e300, 1e-300, float("inf"), 3.4e38, 0.0, -0.0])
def test_losses_of_a_run_that_diverges_are_kept(loss: float) -> None:
    lines = (json.dumps({"round": 1, "losses": {"a": loss, "b": 0.5}}) + "\n").encode()
    run = PackedRun({"method": "fedavg", "target": "a", "seed": 0}, {}, lines)
    files = encode([run], {})
    back = decode_rounds(files[ROUNDS]).lines(decode(files[RUNS])[0][run.name])
    assert rows(back) == [text({"round": 1, "losses": {"a": float(f"{loss:.5g}"), "b": 0.5}})]


def rewritten(data: bytes, change: Callable[[pa.Table], pa.Table]) -> bytes:
    """The file of another hand, which writes sound Parquet."""
    file = io.BytesIO()
    pq.write_table(change(table(data)), file)
    return file.getvalue()


def with_column(name: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    def change(before: pa.Table) -> pa.Table:
        if name not in before.column_names:
            return before.append_column(name, pa.array(values))
        return before.set_column(before.column_names.index(name), name, pa.array(values))

    return change


def with_note(**about: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda before: before.replace_schema_metadata({"fedshift": json.dumps(about)})


@pytest.mark.parametrize(
    "change",
    [
        with_column("seed", ["0", "one"]),
        with_column("seed", [0, 0]),
        with_column("seed", [0.5, 1.5]),
        with_column("method", [None, "fedavg"]),
        with_column("packed.rounds", ["2", "2"]),
        with_column("settings", ["[]", "{}"]),
        with_column("selected", [1, 2]),
        lambda before: before.drop_columns(["target"]),
        lambda before: before.drop_columns(["settings"]),
        lambda before: before.replace_schema_metadata({}),
        with_note(format=2, order={}),
        with_note(format=3),
        with_note(format=3, order=[1]),
    ],
)
def test_malformed_runs_are_refused_in_a_line(change: Callable[[pa.Table], pa.Table]) -> None:
    with pytest.raises(UserError, match=r"somewhere/runs\.parquet is malformed") as caught:
        decode(rewritten(made()[RUNS], change), "somewhere/")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda before: before.slice(0, 3),
        lambda before: before.take([0, 2, 1, 3]),
        lambda before: before.drop_columns(["seed"]),
        with_column("round", [1, 2, 3, 4]),
        with_note(format=2),
    ],
)
def test_malformed_rounds_are_refused_in_a_line(change: Callable[[pa.Table], pa.Table]) -> None:
    files = made()
    runs = decode(files[RUNS])[0].values()
    with pytest.raises(UserError, match=r"somewhere/rounds\.parquet is malformed") as caught:
        [decode_rounds(rewritten(files[ROUNDS], change), "somewhere/").lines(run) for run in runs]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_damaged_files(cut: int) -> None:
    with pytest.raises(UserError, match=r"runs\.parquet"):
        decode(made()[RUNS][:cut])
    with pytest.raises(UserError, match=r"rounds\.parquet"):
        decode_rounds(made()[ROUNDS][:cut])


@pytest.mark.threat("packed_results")
def test_a_file_that_expands_to_far_more_than_results_do_is_not_read() -> None:
    nothing = pa.nulls(1_000_000, pa.string())
    columns = {f"{number}": nothing for number in range(60)}
    file = io.BytesIO()
    pq.write_table(pa.table(columns, metadata={"fedshift": json.dumps({"format": 3})}), file)
    with pytest.raises(UserError, match="expands"):
        decode_rounds(file.getvalue())
