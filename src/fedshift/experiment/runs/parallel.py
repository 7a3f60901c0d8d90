"""Starts the further processes of ``engine.parallel_runs`` and waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshift import trust
from fedshift.data.builders.in_memory import InMemory
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.config.experiment import Experiment

DIVERGED = 3
"""Exit code of a process in which a run diverged."""


@contextmanager
def parallel_workers(
    experiment: Experiment, runs: Path, number: int, diverged: list[TrainingDiverged]
) -> Iterator[None]:
    """Start further processes that take runs of the same experiment.

    At the end of the block this process waits for them. If the block raises an error, they are stopped.

    Args:
        experiment: the experiment.
        runs: the folder that holds a folder for each experiment.
        number: how many processes.
        diverged: receives the errors of runs that diverged in one of them.

    Raises:
        UserError: the data are objects of this process, which another one cannot read.
        UserError, FedshiftError: a process failed. The message is the last line that it wrote.
    """
    if number == 0:
        yield
        return
    if any(isinstance(held, InMemory) for held in (getattr(experiment.data, "sites", None) or {}).values()):
        raise UserError("engine.parallel_runs: data in memory are known to this process alone: use engine.workers")
    with tempfile.TemporaryDirectory(prefix="fedshift-runs-") as folder:
        file = Path(folder) / "experiment.json"
        file.write_text(json.dumps(experiment.dump()))
        command = [sys.executable, "-m", "fedshift.experiment.runs.parallel_worker", str(file), str(runs)]
        processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        try:
            for count in range(number):
                output = Path(folder) / f"errors-{count}.txt"
                with open(output, "wb") as errors:
                    # In its own session, so that Ctrl-C reaches only this process, which then stops the others.
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=errors,
                        stderr=errors,
                        env={**os.environ, **trust.for_children()},
                        start_new_session=True,
                    )
                processes.append((process, output))
            yield
            for process, output in processes:
                if process.wait():
                    lines = output.read_text(errors="replace").strip().splitlines()
                    said = lines[-1] if lines else f"a parallel run ended with code {process.returncode}"
                    if process.returncode == DIVERGED:
                        diverged.append(TrainingDiverged(said))
                    else:
                        raise (UserError if process.returncode == UserError.exit_code else FedshiftError)(said)
        finally:
            for process, _ in processes:
                assert process.stdin is not None
                process.stdin.close()  # it stops when this pipe closes, also if this process is killed
            for process, _ in processes:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
