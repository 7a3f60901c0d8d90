"""Starts the further processes of ``engine.parallel_runs`` and waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedshift import trust
from fedshift.data.builders.in_memory import InMemory
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.runs.stopping import Stopped, grace

DIVERGED = 3
"""Exit code of a process in which a run diverged."""
STOP = b"stop"
"""What a process reads when it should finish its round and stop."""
_LOOK = 0.1
"""Seconds between two looks whether a process has ended."""
_PATIENCE = 10.0
"""Seconds for a process to stop once its pipe is closed."""


@contextmanager
def parallel_workers(
    experiment: Experiment,
    runs: Path,
    number: int,
    diverged: list[TrainingDiverged],
    stop: Callable[[], None] = lambda: None,
    variables: Sequence[Mapping[str, str]] = (),
) -> Iterator[None]:
    """Start further processes that take runs of the same experiment.

    At the end of the block this process waits for them. If the block raises an error, they are stopped.

    Args:
        runs: the folder that holds a folder for each experiment.
        diverged: receives the errors of runs that diverged in one of them.
        stop: is called while this process waits for them, and raises an error to stop. After `Stopped` they finish
            their rounds.
        variables: of the environment of each process, by which it sees its cards alone; none where the device is no
            choice of cards.

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
        options = experiment.dump()
        if any(variables):
            options["device"] = "all"  # of those that it sees
        file.write_text(json.dumps(options))
        command = [sys.executable, "-m", "fedshift.experiment.runs.parallel_worker", str(file), str(runs)]
        processes: list[_Further] = []
        try:
            for count in range(number):
                processes.append(
                    _start(command, Path(folder) / f"errors-{count}.txt", variables[count] if variables else {})
                )
            yield
            for further in processes:
                _wait_for(further, stop)
                _raise_failure(further, diverged)
        except Stopped:
            for further in processes:
                _ask_to_stop(further.process)
            _give_time(processes, grace())
            raise
        finally:
            for further in processes:
                assert further.process.stdin is not None
                with suppress(BrokenPipeError):  # the scheduler told it, too, and it has ended
                    further.process.stdin.close()  # it stops when this pipe closes, also if this process is killed
            _give_time(processes, _PATIENCE)
            for further in processes:
                further.process.kill()
                further.process.wait()


class _Further(NamedTuple):
    """A further process, and the file of what it writes."""

    process: subprocess.Popen[bytes]
    output: Path


def _start(command: Sequence[str], output: Path, variables: Mapping[str, str]) -> _Further:
    with open(output, "wb") as errors:
        # In its own session, so that Ctrl-C reaches only this process, which then stops the others.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            env={**os.environ, **trust.for_children(), **variables},
            start_new_session=True,
        )
    return _Further(process, output)


def _wait_for(further: _Further, stop: Callable[[], None]) -> None:
    while further.process.poll() is None:
        stop()
        time.sleep(_LOOK)
    stop()  # the signal that ended it may have come to this process, too


def _raise_failure(further: _Further, diverged: list[TrainingDiverged]) -> None:
    code = further.process.returncode
    if code == 0:
        return
    lines = further.output.read_text(errors="replace").strip().splitlines()
    text = lines[-1] if lines else f"a parallel run ended with code {code}"
    if code != DIVERGED:
        raise (UserError if code == UserError.exit_code else FedshiftError)(text)
    diverged.append(TrainingDiverged(text))


def _give_time(processes: Sequence[_Further], seconds: float) -> None:
    end = time.monotonic() + seconds
    for further in processes:
        with suppress(subprocess.TimeoutExpired):
            further.process.wait(timeout=max(0.0, end - time.monotonic()))


def _ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended
        process.stdin.write(STOP)
        process.stdin.flush()
