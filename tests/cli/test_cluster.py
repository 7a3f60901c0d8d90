"""``fedshift run --slurm`` without a SLURM: what it refuses, what it submits, and what a job does at its end.

A real SLURM is in tests/cluster.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from calling import Cli
from small import experiment, sites, write

from fedshift.cli import cluster
from fedshift.cli.cluster import Task
from fedshift.experiment.config.experiment import load

submitit = pytest.importorskip("submitit")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "e.yaml", experiment(sites(tmp_path), training={"rounds": 2, "lr": 1e-5}))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that look like SLURM's; sbatch keeps the script that it is given."""
    folder, kept = tmp_path / "bin", tmp_path / "script"
    folder.mkdir()
    programs = {"srun": "", "sbatch": f'cp "$1" {kept}; echo "Submitted batch job 7"', "sinfo": "echo low; echo high"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return kept


def test_without_sbatch_or_submitit(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch" in cli("run", file, "--slurm", "low").error()
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install 'fedshift[cluster]'" in cli("run", file, "--slurm", "low").error()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slurm-time", "1"], "give more than the 75 seconds that a job needs to end"),
        (["--slurm-set", "=3"], "--slurm-set =3"),
        (["--slurm-set", "a b"], "--slurm-set a b"),
        (["--slurm-set", "account="], "--slurm-set account="),
        (["--slurm-set", "comment=a\nb"], "--slurm-set comment="),
        (["--shard", "3/2"], "--shard 3/2"),
        (["training.rounds=-1"], "training.rounds"),
        (["--runs", "100%"], "has a %"),
    ],
)
def test_mistakes_are_refused_before_anything_is_submitted(
    cli: Cli, file: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.setenv("FEDSHIFT_GRACE", "45")
    assert words in cli("run", file, "--slurm", "low", *options).error()
    assert not sbatch.exists()


def test_an_unknown_partition_and_another_refusal(cli: Cli, file: Path, sbatch: Path) -> None:
    program = sbatch.parent / "bin" / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: lou' >&2; exit 1\n")
    assert "no such partition; did you mean 'low'? known: high, low" in cli("run", file, "--slurm", "lou").error()
    program.write_text("#!/bin/sh\necho 'sbatch: error: Batch job submission failed: no account' >&2; exit 1\n")
    assert (
        "sbatch refused the job: Batch job submission failed: no account" in cli("run", file, "--slurm", "low").error()
    )


def test_what_is_submitted(cli: Cli, file: Path, sbatch: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["engine.threads=3", "engine.workers=2", "--slurm", "low", "--slurm-jobs", "5", "--slurm-time", "90"]
    result = cli("run", file, *words, "--slurm-set", "gres=gpu:1", "--wait", "--runs", runs)
    assert result.code == 0
    assert "job 7: 5 × 6 cores on low" in result.err
    folder, lines = runs / "small" / "slurm", sbatch.read_text().splitlines()
    wanted = (
        "partition=low",
        "time=90",
        "cpus-per-task=6",
        "signal=USR2@55",
        "requeue",
        "gres=gpu:1",
        "job-name=small",
    )
    assert {f"#SBATCH --{one}" for one in (*wanted, "array=0-4%5")} <= set(lines)
    assert any(line.startswith("srun ") and "--cpus-per-task=6" in line for line in lines)
    (copy,) = folder.glob("experiment-*.yaml")
    assert load(copy) == load(file, ["engine.threads=3", "engine.workers=2"])
    assert yaml.safe_load(copy.read_text())["training"]["lr"] == 1e-5
    task = pickle.loads((folder / "7_3_submitted.pkl").read_bytes()).function
    assert task._words == ["run", str(copy), "--wait", "--runs", str(runs)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a job asks of SLURM; the state of the job that it is told is the value of STATE."""
    calls: list[str] = []

    def told(*command: str) -> str:
        calls.append(" ".join(command))
        return os.environ["STATE"] if command[0] == "squeue" else ""

    monkeypatch.setattr(cluster, "_slurm_output", told)
    monkeypatch.setattr("sys.argv", [])
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    kept = {number: signal.getsignal(number) for number in (*cluster._SIGNALS, signal.SIGCONT)}
    yield calls
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("code", "state", "ends_with", "comes_back"),
    [
        (75, "RUNNING\n", 75, True),
        (75, "COMPLETING\n", 75, False),  # it was cancelled, or SLURM puts it back itself
        (5, "RUNNING\n", None, False),  # another job of the array trains the rest
        (0, "RUNNING\n", None, False),
        (2, "RUNNING\n", 2, False),
        (130, "RUNNING\n", 130, True),  # the signal came while fedshift started
        (130, "COMPLETING\n", 130, False),
    ],
)
def test_the_end_of_a_job(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], code: int, state: str, ends_with: int | None, comes_back: bool
) -> None:
    monkeypatch.setenv("STATE", state)
    monkeypatch.setattr("fedshift.cli.main", lambda: sys.exit(code))
    ended = None
    try:
        Task(["run"])()
    except SystemExit as end:
        ended = end.code
    assert ended == ends_with
    assert ("scontrol requeue 7_2" in asked) is comes_back
