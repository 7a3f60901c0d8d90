"""A process that is stopped before any of its file operations, while another one takes its run over and finishes it.

`flock` excludes nobody here, as between two machines. What the stopped process does when it goes on harms nothing.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from small import Stop, StopAfter, experiment, forked, outcome, sites

import fedshift
from fedshift import claims
from fedshift.claims import Machine
from fedshift.errors import FedshiftError
from fedshift.evaluation.stored import SUMS, check_sum
from fedshift.experiment.runs import experiment_loop

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.mkdir")
TRAINING = {"rounds": 3, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "reset_optimizer_each_round": False}
"""Sites keep their optimisers' momenta."""
FIRST, LAST, EVERY = map(int, os.environ.get("FEDSHIFT_STEPS", "3 1000 8").split())
"""The operations, of about 120, before which a process is stopped: every eighth; ``FEDSHIFT_STEPS="1 1000 1"``: all."""


def other_machine(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims, "machine", lambda: Machine(name, "", ""))
    patch.setattr(fcntl, "flock", lambda *_: None)
    patch.setattr(experiment_loop, "_LOOK", 0.02)
    patch.setenv(claims.SILENCE, "0.15")
    patch.setenv("OMP_NUM_THREADS", "1")


def stopped_before(step: int, options: dict[str, Any], runs: str) -> None:
    """Run an experiment, but stop before one operation on the run's files."""
    other_machine("server-1", pytest.MonkeyPatch())
    operations = 0

    def watch(event: str, about: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in OPERATIONS and f"{runs}/" in str(about[0]) and "/seed-0" in str(about[0]):
            operations += 1
            if operations == step:
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(watch)
    with suppress(FedshiftError):
        fedshift.run(options, runs)


def stops(process: BaseProcess) -> bool:
    """Whether a process stops before it ends."""
    while process.is_alive():
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.005)
    return False


def check_whole(runs: Path, expected: dict[str, Any]) -> None:
    """The run is there, its digests are right, and nothing else was left."""
    assert outcome(runs) == expected
    (folder,) = runs.rglob("seed-0")
    for line in (folder / SUMS).read_text().splitlines():
        check_sum(folder / line.split()[1])
    assert not [file.name for file in folder.iterdir() if file.name.startswith(".claim") or file.name.endswith(".part")]


@pytest.mark.parametrize("begun", [False, True])
def test_the_taker_is_not_harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """``begun``: the stopped process resumes a run, and the taker is killed after a round, too."""
    options = experiment(sites(tmp_path), training=TRAINING)
    fedshift.run(options, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    for step in range(FIRST, LAST, EVERY):
        runs = tmp_path / f"before-{step}"
        if begun:
            with pytest.raises(Stop):
                fedshift.run(options, runs, StopAfter(1))
        process = forked(stopped_before, step, options, str(runs))
        if not stops(process):
            assert step > 50
            return
        with monkeypatch.context() as patch:
            other_machine("server-2", patch)
            with suppress(Stop):
                fedshift.run(options, runs, StopAfter(1) if begun else None)
            os.kill(process.pid, signal.SIGCONT)
            process.join()
            fedshift.run(options, runs)
        check_whole(runs, expected)
