"""Whole ``fedshift run`` processes on two mounts of one folder, which are killed, stopped and continued.

`flock` does not exclude across the mounts, and each process believes to be on a machine of its own. More tries than
two: ``FEDSHIFT_TRIES=20``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from small import experiment, forked, outcome, run_command, sites, write

import fedshift
from fedshift.claims import Claim

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
ROUNDS = 50
SILENCE = 1.5
"""Seconds; a pause is longer."""


def on_its_own_machine(words: tuple[str, ...], said: str, pause: float) -> None:
    """``fedshift …`` as on another machine, whose clock is hours before or behind; pauses after each round."""
    from fedshift import claims
    from fedshift.experiment.runs.lines import Lines

    here = claims.Machine(f"machine-{os.getpid()}", "", "")
    claims.machine = lambda: here
    clock, hours = time.time, 3600.0 * random.Random(os.getpid()).uniform(-9, 9)
    time.time = lambda: clock() + hours
    Lines.round = lambda self, run, record: time.sleep(pause)
    run_command(words, said, 0.0, {"FEDSHIFT_SILENCE": str(SILENCE), "OMP_NUM_THREADS": "1"})


class Machines:
    """Three processes on two mounts, and what befalls them."""

    def __init__(self, file: Path, mounts: tuple[Path, Path], logs: Path) -> None:
        self._file, self._mounts, self._logs = file, mounts, logs
        self._count = self.kills = self.pauses = 0
        self.living: list[BaseProcess] = [self._start() for _ in range(3)]

    def _start(self) -> BaseProcess:
        mount = self._mounts[self._count % 2]
        self._count += 1
        words = ("run", str(self._file), "--runs", str(mount / "runs"), "--wait")
        return forked(on_its_own_machine, words, str(self._logs / f"{self._count}.txt"), 0.1)

    def at_work(self, runs: Path) -> list[int]:
        """The indices of the processes that have a run."""
        holders = {Claim(file.parent).holder() for file in runs.rglob(".claim-*")}
        return [i for i, one in enumerate(self.living) if f"process {one.pid} on machine-{one.pid}" in holders]

    def kill(self, index: int) -> None:
        self.living[index].kill()
        self.living[index].join()
        self.living[index] = self._start()
        self.kills += 1

    def pause(self, index: int) -> None:
        process_id = self.living[index].pid
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(2.5 * SILENCE)
        os.kill(process_id, signal.SIGCONT)
        self.pauses += 1

    def said(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self._logs.iterdir()))


def small_runs(folder: Path) -> dict[str, Any]:
    """Two runs of fifty rounds."""
    return experiment(
        sites(folder),
        protocol={"targets": ["a", "b"], "seeds": [0], "test_fraction": 0.3},
        training={"rounds": ROUNDS, "batch_size": 8, "lr": 0.05},
    )


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process ends with that nobody disturbs."""
    folder = tmp_path_factory.mktemp("in-peace")
    fedshift.run(small_runs(folder), folder / "runs")
    return outcome(folder / "runs" / "small")


@pytest.mark.parametrize("attempt", range(int(os.environ.get("FEDSHIFT_TRIES", "2"))))
def test_kills_and_pauses(
    two_mounts: tuple[Path, Path], tmp_path: Path, in_peace: dict[str, Any], attempt: int
) -> None:
    """Never a round twice, never a run lost, and the bits of a process that was left in peace."""
    file, logs, runs = (
        write(tmp_path / "e.yaml", small_runs(two_mounts[0])),
        tmp_path / "logs",
        two_mounts[0] / "runs" / "small",
    )
    logs.mkdir()
    machines, draw, end = Machines(file, two_mounts, logs), random.Random(attempt), time.monotonic() + 300
    while len(list(runs.rglob("result.json"))) < 2:
        assert time.monotonic() < end, machines.said()
        time.sleep(draw.uniform(0.2, 1.0))
        if at_work := machines.at_work(runs):
            (machines.kill if draw.random() < 0.4 else machines.pause)(draw.choice(at_work))
    for process in machines.living:
        process.join(120)
        assert process.exitcode == 0, machines.said()
    print(f"{machines.kills} kills, {machines.pauses} pauses, {machines.said().count('was taken over')} folders lost")
    for rounds in runs.rglob("rounds.jsonl"):
        numbers = [json.loads(line)["round"] for line in rounds.read_text().splitlines()]
        assert numbers in ([*range(ROUNDS + 1)], [*range(1, ROUNDS + 1)])
    assert outcome(runs) == in_peace, machines.said()
