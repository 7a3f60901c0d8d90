"""``fedshift run --slurm`` on a real SLURM: every run once, whatever happens to the jobs, with one process's bits."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import experiment, lines, outcome, sites, write
from two_nodes import Slurm, wait_for

import fedshift
from fedshift.claims import Claim

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
PAGE = Path(__file__).parents[2] / "docs" / "running.md"


def study(folder: Path, name: str, seeds: int, rounds: int, methods: tuple[str, ...] = ("fedavg", "deepall")) -> Any:
    """An experiment of 3 targets, some seeds and some methods."""
    return experiment(
        sites(folder),
        name=name,
        protocol={"targets": ["a", "b", "c"], "seeds": [*range(seeds)], "test_fraction": 0.3},
        training={"rounds": rounds, "batch_size": 8, "lr": 0.05},
        methods=[{"name": method} for method in methods],
    )


def submitted(slurm: Slurm, file: Path, *options: object) -> str:
    """Submit an experiment; returns the number of the job."""
    done = slurm.fedshift("run", file, "--slurm", "low", *options)
    assert done.returncode == 0, done.stderr
    match = re.match(r"job (\d+): ", done.stderr)
    assert match is not None, done.stderr
    return match[1]


def running(slurm: Slurm, job: str) -> dict[str, str]:
    """The tasks of a job that run: number_task → node."""
    return {words[0]: words[2] for words in map(str.split, slurm.jobs("--jobs", job)) if words[1] == "RUNNING"}


def both_train(slurm: Slurm, job: str, name: str, runs: int = 0) -> None:
    """Wait until a task of each node has a run. A machine that is done with all ``runs`` before skips."""

    def nodes() -> set[str]:
        files = (slurm.shared / "runs" / name).rglob(".claim-*")
        return {Claim(file.parent).holder().rpartition(" ")[2] for file in files} - {""}

    def both() -> bool:
        skip_if_done(slurm, name, runs)
        return len(running(slurm, job)) == 2 and len(nodes()) == 2

    wait_for(both, what="for both nodes to train")


def skip_if_done(slurm: Slurm, name: str, runs: int) -> None:
    if runs and len(results(slurm, name)) == runs:
        pytest.skip("this machine was done with all runs before what was to come")


def results(slurm: Slurm, name: str) -> list[Path]:
    return list((slurm.shared / "runs" / name).rglob("result.json"))


def printed(slurm: Slurm, name: str) -> str:
    """What all tasks of an experiment printed, those that were put back included."""
    return "\n".join(file.read_text() for file in sorted((slurm.shared / "runs" / name / "slurm").glob("*.err")))


def time_used_up(slurm: Slurm, name: str, runs: int) -> bool:
    """Whether a task was stopped because its time was used up."""
    if "stopped by SIGUSR2 after a round" in printed(slurm, name):
        return True
    skip_if_done(slurm, name, runs)
    return False


def check_every_run_once(slurm: Slurm, options: dict[str, Any], runs: int, folder: Path) -> None:
    """All runs are there, each was finished by one task, no round is there twice, and the bits are one process's."""
    name = options["name"]
    assert len(results(slurm, name)) == runs
    by = Counter(re.findall(r"^(\S+ → \w+, seed \d+): [\d.]+ % \(", printed(slurm, name), flags=re.MULTILINE))
    assert set(by.values()) <= {1}, by
    there = slurm.shared / "runs" / name
    assert not [*there.rglob("checkpoint.safetensors"), *there.rglob(".claim*")]
    fedshift.run(options, folder / "whole")
    assert outcome(slurm.shared / "runs" / name) == outcome(folder / "whole" / name)


def test_preempted_and_timed_out(slurm: Slurm, tmp_path: Path) -> None:
    """Forty-eight runs by three tasks on two nodes: a signal, time used up, a job that goes before, a requeue."""
    options = study(slurm.shared, "array", seeds=8, rounds=160)
    job = submitted(slurm, write(slurm.shared / "array.yaml", options), "--slurm-jobs", 3)
    both_train(slurm, job, "array", 48)
    first, second = running(slurm, job)
    slurm.call("scancel", "--signal=USR1", first)
    wait_for(lambda: "stopped by SIGUSR1 after a round" in printed(slurm, "array"), what="for the signal")
    slurm.call("scontrol", "update", f"jobid={second}", "timelimit=1")
    wait_for(lambda: time_used_up(slurm, "array", 48), what="for the time to be used up")
    wait_for(lambda: second not in running(slurm, job), what="for the task to end")
    slurm.call("scontrol", "update", f"jobid={second}", "timelimit=60")
    both_train(slurm, job, "array", 48)
    slurm.call("srun", "--partition=high", "--nodes=2", "--ntasks=2", "true")
    assert printed(slurm, "array").count("stopped by SIGTERM after a round") == 2
    both_train(slurm, job, "array", 48)
    slurm.call("scontrol", "requeue", next(iter(running(slurm, job))))
    wait_for(lambda: not slurm.jobs("--jobs", job), 900, "for the array's end")
    check_every_run_once(slurm, options, 48, tmp_path)


def test_a_cancelled_job_does_not_come_back(slurm: Slurm) -> None:
    options = study(slurm.shared, "cancelled", seeds=1, rounds=20_000, methods=("fedavg",))
    job = submitted(slurm, write(slurm.shared / "cancelled.yaml", options), "--slurm-jobs", 1)
    folder = slurm.shared / "runs" / "cancelled"
    wait_for(lambda: any(lines(file) > 5 for file in folder.rglob("rounds.jsonl")), what="for a round")
    slurm.call("scancel", job)
    wait_for(lambda: not slurm.jobs("--jobs", job), what="for its end")
    time.sleep(6)
    assert not slurm.jobs("--jobs", job)
    assert "stopped by SIGTERM after a round" in printed(slurm, "cancelled")


def test_the_job_script_of_the_page(slurm: Slurm, tmp_path: Path) -> None:
    """It ends with fedshift's exit code, and goes back into the queue for 75."""
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert script is not None
    options = study(slurm.shared, "page", seeds=2, rounds=100)
    write(slurm.shared / "study.yaml", options)
    (slurm.shared / "job.sh").write_text(script[1].replace("/shared/runs", "runs"))
    sent = slurm.call("sbatch", "--parsable", "--array=0-1", "--chdir", slurm.shared, slurm.shared / "job.sh").strip()
    wait_for(lambda: results(slurm, "page"), what="for the first run")
    first, *_ = running(slurm, sent)
    slurm.call("scancel", "--signal=USR1", first)
    wait_for(lambda: not slurm.jobs("--jobs", sent), 400, "for the array's end")
    said = "\n".join(file.read_text() for file in slurm.shared.glob("slurm-*.out"))
    assert "stopped by SIGUSR1 after a round" in said
    assert len(results(slurm, "page")) == 12
    fedshift.run(options, tmp_path / "whole")
    assert outcome(slurm.shared / "runs" / "page") == outcome(tmp_path / "whole" / "page")


def test_mistakes_are_one_line(slurm: Slurm) -> None:
    file = write(slurm.shared / "mistakes.yaml", study(slurm.shared, "mistakes", seeds=1, rounds=1))

    def refused(*options: str) -> str:
        done = slurm.fedshift("run", file, *options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        return done.stderr

    assert "no such partition; did you mean 'low'? known: high, low" in refused("--slurm", "loww")
    assert "sbatch refused the job" in refused("--slurm", "low", "--slurm-set", "constraint=moon")
    assert "engine.workers" in refused("--slurm", "low", "engine.workers=0")
    assert not slurm.jobs()


def test_jobs_read_a_copy(slurm: Slurm) -> None:
    """What is edited while a job waits is not what it runs; the settings of sbatch arrive."""
    options = study(slurm.shared, "copy", seeds=1, rounds=1, methods=("fedavg",))
    del options["engine"]["threads"]
    file = write(slurm.shared / "copy.yaml", options)
    job = submitted(slurm, file, "--slurm-jobs", 1, "--slurm-set", "begin=now+5", "--slurm-set", "comment=ours")
    file.write_text("name: something else")
    assert "Comment=ours" in slurm.call("scontrol", "show", "job", job)
    wait_for(lambda: not slurm.jobs("--jobs", job), what="for its end")
    assert len(results(slurm, "copy")) == 3
    (copy,) = (slurm.shared / "runs" / "copy" / "slurm").glob("experiment-*.yaml")
    assert yaml.safe_load(copy.read_text())["engine"]["threads"] == 1


def test_a_node_is_gone(slurm: Slurm, tmp_path: Path) -> None:
    """Its run is taken over from its last round, after the silence and not before. The node stays away: a last test."""
    options = study(slurm.shared, "gone", seeds=1, rounds=600, methods=("fedavg",))
    options["protocol"]["targets"] = ["a", "b"]
    job = submitted(slurm, write(slurm.shared / "gone.yaml", options), "--slurm-jobs", 2)
    files = lambda: list((slurm.shared / "runs" / "gone").rglob("rounds.jsonl"))  # noqa: E731
    wait_for(lambda: len([file for file in files() if lines(file) > 20]) == 2, what="for both nodes")
    held = {Claim(file.parent).holder().rpartition(" ")[2]: file for file in files()}
    assert set(held) == {"n1", "n2"}
    slurm.kill_node("n1")
    done = lines(held["n1"])
    wait_for(lambda: not slurm.jobs("--jobs", job), 400, "for the end")
    assert 20 < done < 550
    assert "is being trained by" not in printed(slurm, "gone"), "the node had been gone for long"
    check_every_run_once(slurm, options, 2, tmp_path)
