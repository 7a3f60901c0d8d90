"""adapt_to_one from the command line: check, run, table, predict, and mistakes in the file."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from adapting import NETWORK, adapting
from calling import Cli
from small import features, outcome, save, sites, write

import fedshift
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished experiment: the folder of runs, and its options."""
    folder = tmp_path_factory.mktemp("finished")
    where = save(folder, a=features(1, 60), b=features(2, 48), c=features(3, 66))
    options = adapting(where, {"targets": ["a", "b"], "seeds": [0, 1]})
    fedshift.run(options, folder / "runs")
    return folder / "runs", options


@pytest.mark.slow
def test_check_foretells_the_run(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, options = finished
    file = write(tmp_path / "e.yaml", options)
    answer = cli("check", file)
    assert answer.code == 0, answer.err
    for word in ("source_only", "fedavg", "kd3a", "oracle", "raw_data"):
        assert word in answer.out, word
    foretold = fedshift.check(options)
    results = fedshift.run(options, runs)
    assert [
        (domain.name, domain.samples, domain.train, domain.held_out, domain.measured_as_target)
        for domain in foretold.domains
    ] == [
        ("a", 60, 42, 18, 18),
        ("b", 48, 33, 15, 15),
        ("c", 66, 45, 21, 21),
    ]
    for method in foretold.methods:
        of = [run for run in results.runs if run.method == method.label]
        assert method.runs == len(of) == 4
        assert max(run.rounds for run in of) == method.rounds
        assert max(run.mini_batches for run in of) == method.mini_batches_per_site
        assert sum(sum(run.bytes_up.values()) for run in of) == method.bytes_up, method.label
        assert sum(sum(run.bytes_down.values()) for run in of) == method.bytes_down, method.label
        assert set(method.shares) >= set(of[0].bytes_up)


def test_run_and_table(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, options = finished
    part = ("protocol.targets=[b]", "protocol.seeds=[1]")
    answer = cli("run", write(tmp_path / "e.yaml", options), *part, "--runs", tmp_path / "runs")
    assert answer.code == 0, answer.err
    again = outcome(tmp_path / "runs")
    assert len(again) == 4 * len(("model.safetensors", "result.json", "rounds.jsonl"))
    assert again.items() <= outcome(runs).items()
    for select in ("last", "source", "oracle"):
        rows = json.loads(cli("table", runs, "--format", "json", "--select", select).out)
        assert [(row["method"], row["target"]) for row in rows] == [
            (method, target)
            for method in ("source_only", "fedavg", "kd3a", "oracle")
            for target in ("a", "b", "average")
        ]
        for row in rows:
            assert row["n"] == 2
            assert 0 <= row["mean"] <= 100
    assert "kd3a" in cli("table", runs).out


def test_what_a_run_writes_down_and_predicts(finished: tuple[Path, dict[str, Any]], cli: Cli, tmp_path: Path) -> None:
    runs, _ = finished
    part = runs / "small" / "kd3a" / "b" / "seed-1"
    result = json.loads((part / "result.json").read_text())
    assert result["data"]["measured_samples"] == {"b": 15}
    assert result["data"]["training_samples"] == {"a": 42, "c": 45}
    assert result["data"]["held_out_samples"] == {"a": 18, "c": 21}
    for line in (part / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert set(record["losses"]) == set(record["aggregation_weights"]) == {"a", "b", "c"}
        assert sum(record["aggregation_weights"].values()) == pytest.approx(1)
        assert 0 <= record["extra"]["confident"] <= 1
        assert set(record["target_accuracy"]) == {"b"}
        assert set(record["source_accuracy"]) == {"a", "c"}
    # On what was measured of the target the predictions have the accuracy that the run reports.
    runs, options = finished
    arrays = np.load(options["data"]["sites"]["b"])
    split = parse(options).protocol.split_of(parse(options).data.build(), "b", 0)
    rows = split.measured["b"]
    np.savez(tmp_path / "measured.npz", x=arrays["x"][rows])
    for method in ("source_only", "fedavg", "kd3a", "oracle"):
        part = runs / "small" / method / "b" / "seed-0"
        reported = json.loads((part / "result.json").read_text())["selected"]["last"]["accuracy"]
        said = json.loads(cli("predict", part, tmp_path / "measured.npz", "--format", "json").out)
        right = [one["predicted"] == str(label) for one, label in zip(said, arrays["y"][rows], strict=True)]
        assert 100 * fmean(right) == pytest.approx(reported), method


def test_a_dumped_experiment_is_the_experiment(tmp_path: Path) -> None:
    protocol = {"drop": "c", "wrong_labels": {"b": 0.25}, "wrong_labels_rule": "shift", "targets": "a", "seeds": 3}
    resolved = parse(adapting(sites(tmp_path), protocol))
    assert isinstance(resolved.protocol, AdaptToOne)
    assert (resolved.protocol.drop, resolved.protocol.targets, resolved.protocol.seeds) == (("c",), ("a",), (3,))
    assert parse(json.loads(json.dumps(resolved.dump()))) == resolved


MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("nothing to measure", {"test_fraction": 0}, ["protocol.test_fraction", "greater than 0"]),
    ("nothing to adapt to", {"test_fraction": 1}, ["protocol.test_fraction", "less than 1"]),
    ("too little to measure", {"test_fraction": 0.001}, ["'a'", "0 to be measured on", "protocol.test_fraction"]),
    ("kind", {"kind": "adapt_to_on"}, ["protocol.kind", "'adapt_to_on'", "did you mean 'adapt_to_one'?"]),
    ("another kind", {"kind": "leave_out"}, ["protocol.kind", "did you mean 'leave_one_out'?"]),
    ("a kind that is no name", {"kind": ["adapt_to_one"]}, ["protocol.kind"]),
    ("no kind", {"kind": None}, ["protocol.kind", "adapt_to_one, leave_one_out"]),
    ("field of the other kind", {"base_images": "shared"}, ["protocol.base_images", "there is no such field"]),
    ("field", {"wrong_label": {"b": 0.1}}, ["protocol.wrong_label", "did you mean 'wrong_labels'?"]),
    ("target", {"targets": ["aa"]}, ["protocol.targets", "'aa'", "did you mean 'a'?"]),
    ("dropped", {"drop": ["bb"]}, ["protocol.drop", "'bb'", "did you mean 'b'?"]),
    ("a dropped target", {"drop": ["a"]}, ["protocol.targets", "'a'"]),
    ("all dropped", {"drop": ["b", "c"]}, ["adapt_to_one needs at least 2 domains"]),
    ("malicious", {"wrong_labels": {"bb": 0.5}}, ["protocol.wrong_labels", "'bb'", "did you mean 'b'?"]),
    ("share of wrong labels", {"wrong_labels": {"b": 1.5}}, ["protocol.wrong_labels", "1.5"]),
    ("wrong labels of the wrong kind", {"wrong_labels": ["b"]}, ["protocol.wrong_labels"]),
    ("rule", {"wrong_labels_rule": "shfit"}, ["protocol.wrong_labels_rule", "shift", "shfit"]),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_one_line(cli: Cli, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = write(tmp_path / "e.yaml", adapting(sites(tmp_path / "data"), changes))
    for command in (("run", file, "--runs", tmp_path / "runs"), ("check", file)):
        line = cli(*command).error()
        for word in words:
            assert word in line, (command[0], line)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("method", "network", "words"),
    [
        ({"name": "kd3a", "focus": "h_divergence"}, "linear", ["kd3a.focus", "h_divergence", "BatchNorm"]),
        ({"name": "kd3a", "batch_norm": "loss"}, "linear", ["kd3a.batch_norm", "loss", "BatchNorm"]),
        ({"name": "kd3a", "gate_start": 1}, NETWORK, ["methods[0] (kd3a).gate_start", "less than 1"]),
        ({"name": "kd3a", "gate_strat": 1}, NETWORK, ["methods[0] (kd3a).gate_strat", "'gate_start'"]),
    ],
)
def test_a_method_that_does_not_fit(
    cli: Cli, tmp_path: Path, method: dict[str, Any], network: Any, words: list[str]
) -> None:
    file = write(tmp_path / "e.yaml", adapting(sites(tmp_path / "data"), methods=[method], model=network))
    for command in (("run", file, "--runs", tmp_path / "runs"), ("check", file)):
        line = cli(*command).error()
        assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["kd3a", "oracle"])
def test_methods_that_need_a_target(cli: Cli, tmp_path: Path, method: str) -> None:
    options = adapting(sites(tmp_path / "data"), methods=["fedavg", method])
    del options["protocol"]
    file = write(tmp_path / "e.yaml", options)
    line = cli("check", file).error()
    assert line.startswith(f"error: methods: {method} adapts to a target")
    assert "kind: adapt_to_one" in line
    assert cli("check", file, "protocol.kind=adapt_to_one").code == 0
