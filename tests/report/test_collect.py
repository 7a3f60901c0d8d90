"""Finding and reading run folders, whole, unfinished, torn or foreign."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.evaluation.stored import read_rounds
from fedshift.json_objects import write_object
from fedshift.report.collect import at_common_tests, at_sites, collect, natural

Write = Callable[..., Path]


def test_everything_in_the_order_of_the_experiment(experiment: Path) -> None:
    found = collect(experiment)
    assert found.name == "exp"
    assert [(r.method, r.target, r.seed) for r in found.results] == [
        ("fedavg", "M15", 0), ("fedavg", "M15", 1), ("fedavg", "M5", 0), ("fedavg", "M5", 1),
        ("csac", "M15", 0), ("csac", "M15", 1), ("csac", "M5", 0),
    ]  # fmt: skip
    # The plan has 3 × 2 × 2 parts, 4 of them not even begun.
    assert found.progress == "5 of 12 runs unfinished"
    (experiment / "order.json").unlink()
    found = collect(experiment)
    assert found.order.methods == ["csac", "fedavg"]
    assert found.order.targets == ["M5", "M15"]
    assert found.progress == "1 of 8 runs unfinished"


@pytest.mark.parametrize(
    ("below", "count", "progress"),
    [
        ("..", 7, "5 of 12 runs unfinished"),
        ("csac", 3, "1 of 4 runs unfinished"),
        ("csac/M5", 1, "1 of 2 runs unfinished"),
        ("csac/M5/seed-0", 1, None),
    ],
)
def test_any_folder_of_the_tree_will_do(experiment: Path, below: str, count: int, progress: str | None) -> None:
    found = collect(experiment / below)
    assert (found.name, len(found.results), found.progress) == ("exp", count, progress)


def test_nothing_there_or_several_experiments(experiment: Path, tmp_path: Path, write_part: Write) -> None:
    with pytest.raises(UserError, match="did you mean 'exp'"):
        collect(experiment.parent / "expp")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        collect(tmp_path / "empty")
    with pytest.raises(UserError, match="is a file"):
        collect(experiment / "order.json")
    with pytest.raises(UserError, match=r"no finished run.*1 begun"):
        collect(experiment / "csac" / "M5" / "seed-1")
    write_part("fedavg", "a", 0, 50.0, experiment="other")
    with pytest.raises(UserError, match=r"2 experiments \(exp, other\)"):
        collect(experiment.parent)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"method": "fedavg"}', "\x00\xff"])
def test_corrupt_result_is_named(experiment: Path, content: str) -> None:
    path = experiment / "csac" / "M5" / "seed-1" / "result.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="corrupt") as caught:
        collect(experiment)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_result_is_never_taken_for_whole(experiment: Path) -> None:
    path = experiment / "csac" / "M5" / "seed-0" / "result.json"
    path.write_text(path.read_text()[:-1])
    with pytest.raises(UserError, match="corrupt"):
        collect(experiment)


def test_a_copy_of_a_part_is_refused(experiment: Path) -> None:
    source = experiment / "csac" / "M5" / "seed-0" / "result.json"
    (experiment / "csac" / "M5" / "seed-1" / "result.json").write_text(source.read_text())
    with pytest.raises(UserError, match="same run"):
        collect(experiment)


@pytest.mark.case("files of earlier versions", "the order of an experiment without a digest is read")
@pytest.mark.case("files of earlier versions", "a damaged name of a digest does not pass for an older file")
def test_orders_that_are_corrupt_or_without_digests(experiment: Path) -> None:
    write_object(experiment / "order.json", {"methods": 3})
    with pytest.raises(UserError, match=r"order\.json.*methods"):
        collect(experiment)
    path = experiment / "order.json"
    planned = {"methods": ["fedavg", "csac"], "targets": ["M15", "M5"], "seeds": [0, 1]}
    path.write_text(json.dumps(planned))
    assert collect(experiment).order.methods == ["fedavg", "csac"]
    write_object(path, planned)
    path.write_text(path.read_text().replace("_sha256", "_sha257"))
    with pytest.raises(UserError, match=r"order\.json is damaged"):
        collect(experiment)


def test_rounds_with_a_torn_end_or_a_repeated_round(write_part: Write) -> None:
    path = write_part("fedavg", "a", 0, 10.0, 20.0) / "rounds.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second}\n{first[:30]}")
    assert [record.target_mean for record in read_rounds(path)] == [10.0, 20.0]
    path.write_text(f"{first}\n{second}\n{second.replace('20.0', '30.0')}\n")
    with pytest.raises(UserError, match="line 3 has round 2 after round 2"):
        read_rounds(path)
    path.write_text(f"{first[:30]}\n{second}\n")
    with pytest.raises(UserError, match="line 1 is corrupt"):
        read_rounds(path)
    assert read_rounds(path.with_name("absent.jsonl")) == []


@settings(max_examples=100)
@given(st.lists(st.text(alphabet="aB1٣²0 ", max_size=6)))
def test_natural_order_holds_for_any_names(names: list[str]) -> None:
    keys = [natural(name) for name in sorted(names, key=natural)]
    assert all(first <= second for first, second in pairwise(keys))


def test_numbers_in_names_and_sites_of_many() -> None:
    assert sorted(["M100", "art", "M15", "M5"], key=natural) == ["art", "M5", "M15", "M100"]
    last = SelectedRound(
        round=2, accuracy=75.0, sites={"a": 70.0, "b": 80.0}, common={"x": 60.0}, per_class=[50.0, 100.0]
    )
    options = {"protocol": {"kind": "participants"}}
    run = RunResult.model_construct(target="sites", selected={"last": last}, sites=[], options=options, data={})
    (first, _), (common,) = list(at_sites([run])), list(at_common_tests([run]))
    for apart, site, value in ((first, "a", 70.0), (common, "x", 60.0)):
        chosen = apart.selected["last"]
        assert (apart.target, chosen) == (site, SelectedRound(round=2, accuracy=value, sites={site: value}))
