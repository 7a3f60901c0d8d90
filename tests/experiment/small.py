"""A data set of seconds: three sites of tiny images or short vectors, and the experiment that trains on them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedshift.evaluation.records import RoundRecord
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter

CLASSES = 3


def features(seed: int, samples: int = 30, shift: float = 0.0) -> dict[str, Any]:
    """Vectors of five numbers; the first ones say the class, so that a linear model learns something."""
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % CLASSES
    x = rng.normal(size=(samples, 5)).astype(np.float32) + shift
    x[np.arange(samples), labels] += 2
    return {"x": x, "y": labels}


def images(seed: int, samples: int = 30, size: int = 12) -> dict[str, Any]:
    """Grey images with a bright stripe whose place says the class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % CLASSES
    x = rng.integers(0, 90, (samples, size, size), dtype=np.uint8)
    for row, label in enumerate(labels):
        x[row, 4 * label : 4 * label + 2] += 150
    return {"x": x, "y": labels}


def save(folder: Path, **sites: dict[str, Any]) -> dict[str, str]:
    """Write one npz per site; returns what ``data.sites`` wants."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in sites.items():
        np.savez(folder / f"{name}.npz", **arrays)
    return {name: str(folder / f"{name}.npz") for name in sites}


def sites(folder: Path, kind: Any = features) -> dict[str, str]:
    """Three sites ``a``, ``b``, ``c`` of different size."""
    return save(folder, a=kind(1, 30), b=kind(2, 24), c=kind(3, 33))


def experiment(where: dict[str, str], **changes: Any) -> dict[str, Any]:
    """A small experiment over ``where``; ``changes`` replace its sections."""
    return {
        "name": "small",
        "data": {"name": "arrays", "sites": where},
        "protocol": {"targets": ["a"], "seeds": [0], "test_fraction": 0.3},
        "model": {"name": "linear"},
        "training": {"rounds": 2, "batch_size": 8, "lr": 0.05},
        "methods": [{"name": "fedavg"}],
        "engine": {"name": "local", "threads": 1},
        "device": "cpu",
        **changes,
    }


def write(path: Path, options: Any) -> Path:
    """An experiment file (JSON is YAML)."""
    path.write_text(json.dumps(options))
    return path


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """``fedshift …`` as a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "fedshift", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def outcome(runs: Path) -> dict[str, Any]:
    """Everything of finished runs that must not depend on interruptions, workers or time, by the path of its file."""
    found: dict[str, Any] = {}
    for path in sorted(runs.rglob("seed-*/*")):
        name = str(path.relative_to(runs))
        if path.name == "rounds.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        elif path.name == "result.json":
            whole = json.loads(path.read_text())
            kept = ("selected", "rounds", "mini_batches", "bytes_up", "bytes_down", "bytes_by_site", "data", "classes")
            found[name] = {key: whole[key] for key in kept}
        elif path.name == "model.safetensors":
            found[name] = {key: value.tobytes() for key, value in load_file(path).items()}
    return found


def processes_below(mark: str) -> list[int]:
    """Living processes, other than this one, whose command line or environment holds ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if mark.encode() in text and not dead and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


class Stop(BaseException):
    """Ends a run in the middle, as a kill would: nothing catches it."""


class StopAfter(Reporter):
    """Ends the process, as it were, in the middle of a round: after some rounds and one more site's training."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_trained(self, site: str, mini_batches: int) -> None:
        if self.left == 0:
            raise Stop

    def round(self, run: Run, record: RoundRecord) -> None:
        self.left -= 1


class Slow(Reporter):
    """Leaves time between the moments of a run, so that a signal can fall between any two."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_trained(self, site: str, mini_batches: int) -> None:
        time.sleep(self.seconds)

    def round(self, run: Run, record: RoundRecord) -> None:
        time.sleep(self.seconds)


def run_slowly(options: dict[str, Any], runs: str, mark: str, seconds: float) -> None:
    """The main function of a process that is going to be killed; its children's environment holds ``mark``."""
    import fedshift

    os.environ["FEDSHIFT_TEST_MARK"] = mark
    fedshift.run(options, runs, Slow(seconds))


def process(options: dict[str, Any], runs: Path, mark: str = "none", seconds: float = 0.02) -> Any:
    """`run_slowly` in a process that was forked from one with torch already imported."""
    return forked(run_slowly, options, str(runs), mark, seconds)


def run_command(words: tuple[str, ...], said: str, pause: float, environment: dict[str, str]) -> None:
    """``fedshift …`` as a process of its own; what it prints goes to the file ``said``."""
    from fedshift.cli import main
    from fedshift.experiment.runs.lines import Lines

    os.setsid()
    # Tests that were started in the background of a shell ignore Ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"COLUMNS": "300", **environment})
    tempfile.tempdir = None  # it may have been looked up before
    sys.argv = ["fedshift", *words]
    if pause:
        Lines.round = lambda self, run, record: time.sleep(pause * (record.round > 2))  # type: ignore[method-assign]
    main()


def command(*words: object, said: Path, pause: float = 0.0, **environment: str) -> Any:
    """`run_command` in a process that was forked as `process` is; it pauses after the third round of its first run."""
    return forked(run_command, tuple(map(str, words)), str(said), pause, environment)


def forked(main: Callable[..., None], *arguments: Any) -> Any:
    """``main`` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    preload = ["fedshift.api", "fedshift.cli.run", "fedshift.methods.federated.csac"]
    context.set_forkserver_preload(preload)
    made = context.Process(target=main, args=arguments)
    made.start()
    return made


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until ``condition()`` is true; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def lines(path: Path) -> int:
    """Lines of a file so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
