"""Experiments on several graphics cards, which are pretended: who gets which, and what a mistake says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import Cli
from safetensors.torch import load_file
from small import experiment, sites, write

import fedshift
from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs import parallel, round_loop
from fedshift.federation.local.cards import PRETENDED, VISIBLE

TARGETS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setenv(PRETENDED, "24,24,24,24")


def models(runs: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.parent.name: load_file(path) for path in runs.rglob("model.safetensors")}


@pytest.mark.slow
def test_every_process_sees_its_card_and_runs_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    begin = subprocess.Popen

    def noting(*arguments: Any, **options: Any) -> Any:
        seen.append(options["env"].get(VISIBLE))
        return begin(*arguments, **options)

    monkeypatch.setattr(parallel.subprocess, "Popen", noting)
    options = experiment(sites(tmp_path), protocol={"targets": TARGETS, "seeds": [0]})
    engine = {"name": "local", "threads": 1, "parallel_runs": 3}
    fedshift.run({**options, "engine": engine, "device": "all"}, tmp_path / "cards")
    assert seen == ["1", "2"]
    assert VISIBLE not in os.environ
    fedshift.run(options, tmp_path / "plain")
    ours, plain = models(tmp_path / "cards"), models(tmp_path / "plain")
    assert sorted(ours) == sorted(plain) == TARGETS
    assert all(torch.equal(ours[run][name], plain[run][name]) for run in plain for name in plain[run])


def test_a_card_is_no_part_of_a_run(cli: Cli, tmp_path: Path) -> None:
    """Runs begun on one card go on, and are finished, on any other; what is written names no number."""
    file, runs = write(tmp_path / "e.yaml", experiment(sites(tmp_path))), tmp_path / "runs"
    assert cli("run", file, "device=[cuda:3]", "--runs", runs).code == 0
    (result,) = runs.rglob("result.json")
    before, changed = result.read_bytes(), result.stat().st_mtime_ns
    for device in ("[cuda:0, cuda:1]", "all", "cpu"):
        assert cli("run", file, f"device={device}", "--runs", runs).code == 0
    assert (result.read_bytes(), result.stat().st_mtime_ns) == (before, changed), "nothing was trained twice"
    assert RunResult.model_validate_json(before).device == "cpu"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("[cuda:0, cuda:4]", ["cuda:4", "cuda:3"]),
        ("[cuda:0, cuda:0]", ["twice"]),
        ("[]", ["cuda:0"]),
        ("[cpu]", ["cpu", "cuda:0"]),
        ("3", ["device"]),
        ("al", ["al", "auto"]),
    ],
)
def test_devices_that_are_not_here(cli: Cli, tmp_path: Path, device: str, words: list[str]) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    said = cli("run", file, f"device={device}", "--runs", tmp_path / "runs").error()
    assert "device" in said
    assert all(word in said for word in words)
    assert not (tmp_path / "runs").exists()


def test_cards_that_are_idle_written_or_not_there(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path), device="all"))
    assert "1 of 4 cards" in cli("check", file).out
    assert "of 4 cards" not in cli("check", file, "engine.workers=2", "engine.parallel_runs=2").out
    options = experiment(sites(tmp_path), device=["cuda:1", "cuda:0"])
    assert json.loads(json.dumps(parse(options).dump()))["device"] == ["cuda:1", "cuda:0"]
    monkeypatch.delenv(PRETENDED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path), device="all"))
    assert "auto or cpu" in cli("check", file).error()


def test_a_full_card_ends_in_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished runs stay, and the same command goes on where the memory ended."""
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path), protocol={"targets": TARGETS, "seeds": [0]}))
    whole, runs = round_loop._RunLoop.to_the_end, tmp_path / "runs"

    def full(loop: Any, *given: Any) -> Any:
        if loop.run.target == "b":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(loop, *given)

    with monkeypatch.context() as patch:
        patch.setattr(round_loop._RunLoop, "to_the_end", full)
        answer = cli("run", file, "device=all", "--runs", runs)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("error: out of memory")
    (done,) = runs.rglob("result.json")
    before = done.stat().st_mtime_ns
    assert cli("run", file, "device=all", "--runs", runs).code == 0
    assert done.stat().st_mtime_ns == before
    assert len(list(runs.rglob("result.json"))) == 3
