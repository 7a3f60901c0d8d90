"""Packed runs read back as they were, but for some digits; a file that somebody spoiled is named with its line."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.errors import UserError
from fedshift.evaluation.packs.packed import ROUNDS, RUNS, SETTINGS, PackedRun, decode, encode, with_details
from fedshift.evaluation.packs.packed_rounds import decode_rounds
from fedshift.files import names_a_folder

COMPRESS = lzma.compress


@pytest.fixture(scope="module", autouse=True)
def light() -> Iterator[None]:
    """Little compression: the preset in use takes 700 MB of memory, however small the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lzma, "compress", lambda data, preset=None: COMPRESS(data, preset=0))
        yield


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


@settings(max_examples=50)
@given(runs(), st.dictionaries(NAMES, TREES, max_size=2))
def test_what_is_packed_reads_back_as_it_was(given_runs: list[PackedRun], order: dict[str, Any]) -> None:
    files = encode(given_runs, order)
    assert files == encode(reversed(given_runs), order)
    read, planned, *_ = decode(files[SETTINGS], files[RUNS])
    rounds = decode_rounds(files[ROUNDS])
    assert text(planned) == text(order)
    assert sorted(read) == sorted(run.name for run in given_runs)
    for run in given_runs:
        back = rounds[run.name]
        assert text(with_details(read[run.name], back.result).result) == text(run.result)
        assert text(read[run.name].identity) == text(run.identity)
        assert (back.data is None) == (run.rounds is None)
        assert rows(back.data) == rows(run.rounds)


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
    read, back = decode(files[SETTINGS], files[RUNS])[0][run.name], decode_rounds(files[ROUNDS])[run.name]
    result["selected"]["last"]["per_class"] = [66.667, None]
    result["sites"][0]["reliability"] = [[66.667, 66.667, 12345678]]
    assert with_details(read, back.result).result == result
    assert back.data is not None
    assert list(map(json.loads, back.data.splitlines())) == [
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


def test_a_line_for_each_run_that_a_person_can_read() -> None:
    """What all runs share stands once, in `experiment.yaml`; numbers have all their digits; rounds are columns."""
    files = made()
    assert files[RUNS].decode().splitlines() == [
        "method,target,seed,selected.last.accuracy,seconds,warnings,options.seed",
        "fedavg,east,0,0.30000000000000004,3.5,[],0",
        'fedavg,east,1,1.3,3.5,"[""one, two""]",1',
    ]
    assert "lr: 0.1" in files[SETTINGS].decode()
    lines = [json.loads(line) for line in lzma.decompress(files[ROUNDS]).splitlines()]
    assert lines[1::2] == [["round", [1, 2]]] * 2
    assert [(line["method"], line["seed"], line["result"]) for line in lines[::2]] == [
        ("fedavg", seed, {"selected.last.per_class": [50.0, None]}) for seed in (0, 1)
    ]


def test_packing_again_changes_nothing_but_lines_of_new_runs() -> None:
    files = made()
    read, order, columns, _ = decode(files[SETTINGS], files[RUNS])
    rounds = decode_rounds(files[ROUNDS])
    kept = [replace(with_details(read[name], there.result), rounds=there.data) for name, there in rounds.items()]
    assert encode(kept, order, columns) == files
    more = replace(kept[0], result={**kept[0].result, "target": "west", "warnings": []})
    lines = encode([*kept, more], order, columns)[RUNS].decode().splitlines()
    assert lines[:3] == files[RUNS].decode().splitlines()
    assert lines[3].startswith("fedavg,west,0,")


def test_a_line_that_is_deleted_is_a_run_less() -> None:
    files = made()
    lines = files[RUNS].splitlines(keepends=True)
    read, *_ = decode(files[SETTINGS], b"".join([lines[0], lines[2]]))
    assert list(read) == ["fedavg/east/seed-1"]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("name", "spoil", "line"),
    [
        (RUNS, replaced(b"1.3,", b""), 3),
        (RUNS, replaced(b"fedavg,east,1", b"fedavg,east,one"), 3),
        (RUNS, replaced(b"fedavg,east,1", b"fedavg,east,0"), 3),
        (RUNS, replaced(b"fedavg,east,1", b",east,1"), 3),
        (RUNS, replaced(b"options.seed", b"options.lr"), 1),
        (RUNS, replaced(b"east,0", b"e\xffst,0"), 2),
        (RUNS, replaced(b'two""]"', b'two""]'), 3),
        (RUNS, lambda data: b"", 1),
        (SETTINGS, replaced(b"format: 2", b"format: 3"), 1),
        (SETTINGS, replaced(b"all_runs:", b"all: ]"), 10),
        (SETTINGS, replaced(b"all_runs:", b"alle:"), 1),
    ],
)
def test_a_malformed_file_is_named_with_its_line(name: str, spoil: Callable[[bytes], bytes], line: int) -> None:
    files = made()
    files[name] = spoil(files[name])
    with pytest.raises(UserError) as told:
        decode(files[SETTINGS], files[RUNS], "somewhere/")
    message = str(told.value)
    assert "\n" not in message
    assert f"somewhere/{name} line " in message
    assert line == 10 or f"line {line} " in message


@pytest.mark.parametrize(
    "spoil",
    [
        replaced(b'["round",[1,2]]\n', b""),
        replaced(b'"columns":1', b'"columns":-1'),
        replaced(b'"rounds":2', b'"rounds":987654321'),
        replaced(b'"target"', b'"site"'),
        replaced(b'"result":{', b'"result":[{'),
        lambda lines: lines + b"[]\n",
        replaced(b"[1,2]", b"[1]"),
        replaced(b"[1,2]", b"[1,2],[0,2]"),
        replaced(b"[1,2]", b"[1,2],[0,-1]"),
        replaced(b'["round",', b"["),
        replaced(b'["round"', b"[3"),
    ],
)
def test_malformed_rounds_are_named_with_their_line(spoil: Callable[[bytes], bytes]) -> None:
    data = lzma.compress(spoil(lzma.decompress(made()[ROUNDS])))
    with pytest.raises(UserError, match=r"somewhere/rounds\.jsonl\.xz line \d+ "):
        assert [rounds.data for rounds in decode_rounds(data, "somewhere/").values()]


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_damaged_rounds(cut: int) -> None:
    with pytest.raises(UserError, match=r"rounds\.jsonl\.xz"):
        decode_rounds(made()[ROUNDS][:cut])


@pytest.mark.threat("formula")
def test_no_cell_is_a_formula() -> None:
    """A spreadsheet would run it; read back it is the name again."""
    run = PackedRun({"method": "=1+1", "target": "@b", "seed": 0, "seconds": -1.5}, {})
    files = encode([run], {})
    assert files["runs.csv"].decode().splitlines()[1] == "'=1+1,'@b,0,-1.5"
    found, *_ = decode(files["experiment.yaml"], files["runs.csv"])
    assert list(found) == ["=1+1/@b/seed-0"]
