"""``fedshift run --slurm``: an array of jobs, each of which takes runs that no other one has.

The package submitit writes the batch script. A job that SLURM ends early, to make room or for its time, finishes the
round in progress (`stopping`) and is put back into the queue; there is no list of who does what, as claims keep jobs
apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedshift.cli.run import ELSEWHERE, part_of
from fedshift.errors import UserError, nearest
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.runs.stopping import Stopped, grace
from fedshift.extras import import_extra
from fedshift.files import write_bytes
from fedshift.text import one_line

FOLDER = "slurm"
"""The folder, in an experiment's, of what jobs print."""
_AFTER = 30
"""Seconds between the end of the grace and the job's: to write, and to go back into the queue."""
_TIMEOUTS = 10_000
_MINUTE = 60
_INTERRUPTED = 130
"""The exit code after a signal that came while fedshift started."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PYTHON = 'sh -c \'trap "" TERM HUP USR1 USR2; exec "$0" "$@"\' {}'
"""Starts Python so that no signal ends the job before Python heeds them."""


class Jobs(NamedTuple):
    """What `submit` asks SLURM for."""

    partition: str  # its name
    number: int  # of jobs in the array
    minutes: int  # that each may take before it goes back into the queue
    settings: Sequence[str] = ()  # further options of ``sbatch``, as ``name=value``


def submit(path: Path, overrides: Sequence[str], runs: Path, options: Sequence[str], jobs: Jobs) -> str:
    """Submit an array of jobs that share the runs of an experiment.

    Args:
        path: the experiment file. The jobs read a copy, as it may change while they wait.
        overrides: fields to set, as ``key.path=value``.
        runs: the folder that holds a folder for each experiment; all nodes must have it under this path.
        options: further options of ``fedshift run`` for each job.

    Returns:
        What to tell the user: the job's number, and where to look.

    Raises:
        UserError: the experiment has a mistake, submitit or SLURM is not here, or SLURM refuses.
    """
    submitit = import_extra("submitit", extra="cluster", what="--slurm")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError("--slurm: there is no sbatch and srun on this machine: submit from one that belongs to SLURM")
    experiment = load(path, overrides)
    if experiment.engine.name != "local":
        raise UserError(f"engine.name: {experiment.engine.name} runs over a network: use fedshift deploy")
    folder = runs.absolute() / experiment.name / FOLDER
    if "%" in str(folder):
        raise UserError(f"--slurm: {folder} has a % in its path, which SLURM would replace: choose another --runs")
    cores, delay = experiment.engine.processes * _threads(experiment), math.ceil(grace()) + _AFTER
    if delay >= _MINUTE * jobs.minutes:
        raise UserError(f"--slurm-time {jobs.minutes}: give more than the {delay} seconds that a job needs to end")
    task = Task(["run", str(_copy(experiment, folder)), *options, "--runs", str(runs.absolute())])
    parameters: dict[str, Any] = {
        "job_name": experiment.name,
        "partition": jobs.partition,
        "time": jobs.minutes,
        "cpus_per_task": cores,
        "signal_delay_s": delay,
        "srun_args": [f"--cpus-per-task={cores}"],
        "additional_parameters": {"requeue": True, **_settings(jobs.settings)},
    }
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):  # sbatch's own words are in the error
            python = _PYTHON.format(shlex.quote(sys.executable))
            executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=_TIMEOUTS, python=python)
            executor.update_parameters(**parameters)
            with executor.batch():
                submitted = [executor.submit(task) for _ in range(jobs.number)]
    except submitit.core.utils.FailedJobError as error:
        raise UserError(_refusal(str(error), jobs.partition)) from None
    number = str(submitted[0].job_id).partition("_")[0]
    return (
        f"job {number}: {jobs.number} × {cores} {'core' if cores == 1 else 'cores'} on {jobs.partition}, which share "
        f"the runs of {experiment.name}\n"
        f"what they print: {folder}/{number}_*.err and .out\n"
        f"to look: squeue --jobs {number}, fedshift page {runs} --live; to end: scancel {number}"
    )


def options_of_run(track: Sequence[str], *, samples: bool, shard: str | None, wait: bool, trust: bool) -> list[str]:
    """The options of ``fedshift run`` that each job gets.

    Raises:
        UserError: one of them has a mistake.

    Example:
        >>> options_of_run(["wandb"], samples=False, shard="1/2", wait=True, trust=False)
        ['--track', 'wandb', '--shard', '1/2', '--wait']
    """
    part_of(shard)
    words = [word for name in track for word in ("--track", name)]
    words += ["--shard", shard] if shard is not None else []
    flags = {"--samples": samples, "--wait": wait, "--trust": trust}
    return words + [flag for flag, is_set in flags.items() if is_set]


class Task:
    """What each job does: ``fedshift run``, and back into the queue if a signal ended that."""

    def __init__(self, words: Sequence[str]) -> None:
        """``words``: of the command line."""
        self._words = list(words)

    def __call__(self) -> None:
        """Raises SystemExit with fedshift's exit code, but for runs that other jobs of the array are training."""
        sys.argv = ["fedshift", *self._words]
        for number in _SIGNALS:  # fedshift leaves alone what is ignored
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        code: str | int | None = 0
        try:
            runpy.run_module("fedshift", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:
            code = _INTERRUPTED
        for number in (*_SIGNALS, signal.SIGCONT):  # those with which SLURM ends the job that goes back
            signal.signal(number, signal.SIG_IGN)
        if code in (Stopped.exit_code, _INTERRUPTED):
            _requeue()
        if code not in (0, None, ELSEWHERE):
            sys.exit(code)

    def checkpoint(self) -> Any:
        """For a signal that comes before fedshift heeds it: submitit then puts this back into the queue."""
        submitit = import_extra("submitit", extra="cluster", what="--slurm")
        return submitit.helpers.DelayedSubmission(self)


def _requeue() -> None:
    """Put this job back into the queue, if it still runs: one that was cancelled, or that SLURM puts back, does not."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
    name = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job
    if _slurm_output("squeue", "--noheader", "--jobs", name, "--format", "%T").strip() == "RUNNING":
        print(
            _slurm_output("scontrol", "requeue", name) or f"job {name} goes back into the queue",
            file=sys.stderr,
            flush=True,
        )


def _slurm_output(*command: str) -> str:
    """What a command of SLURM prints, errors included."""
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_MINUTE, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def _threads(experiment: Experiment) -> int:
    """Threads of each process: one, if the file does not say. Every node would count its own cores."""
    return experiment.engine.thread_count(cores=experiment.engine.processes)


def _copy(experiment: Experiment, folder: Path) -> Path:
    """Write the experiment with all its defaults, and with its threads."""
    whole = experiment.dump()
    whole["engine"]["threads"] = _threads(experiment)
    data = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True).encode()
    file = folder / f"experiment-{hashlib.sha256(data).hexdigest()[:12]}.yaml"
    write_bytes(file, data)
    return file


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """The options of ``sbatch`` by name; one without a value is True."""
    settings: dict[str, Any] = {}
    for text in given:
        name, is_set, value = text.removeprefix("--").partition("=")
        if not name or not name.replace("-", "").isalnum() or (is_set and not value) or not text.isprintable():
            raise UserError(f"--slurm-set {one_line(text)}: give an option of sbatch, such as gres=gpu:1")
        settings[name] = value if is_set else True
    return settings


def _refusal(text: str, partition: str) -> str:
    """SLURM's refusal in one line; of an unknown partition with those that there are."""
    last = one_line((text.strip() or "no reason given").splitlines()[-1]).removeprefix("sbatch: error: ")
    known = _slurm_output("sinfo", "--noheader", "--format", "%R").split()
    if "invalid partition" in last.lower() and partition not in known:
        return f"--slurm {one_line(partition)}: there is no such partition; {nearest(partition, known)}"
    return f"--slurm: sbatch refused the job: {last}"
