"""Progress where there is no terminal: a line for each finished run, and one every few seconds within a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection

from fedshift.evaluation.records import RunResult, with_unit
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.text import clock

FIRST, EVERY = 3.0, 10.0
"""Seconds until the first line within a run, and between two lines."""
WARNING = "warning: "
"""How the line of a warning begins."""


class Lines(Reporter):
    """Prints how much of an experiment is done, how long it has run, and how long the rest will take at this pace."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.left = 0
        """Runs that another process holds."""
        self._say, self._clock = say, clock
        self._runs = self._passed = 0
        self._names: set[str] = set()
        self._begun: float | None = None
        self._done_before = 0  # runs that were finished before this call
        self._next = 0.0
        self._name = ""
        self._trained = self._total = 0

    def extraction(self, site: str, images: int, done: int) -> None:
        self._say(f"features of {site}: {images} images" + (f", {done} of them already done" if done else ""))

    def begin(self, runs: int) -> None:
        self._runs = runs

    def run(self, run: Run, mini_batches: int, done: int) -> None:
        if self._begun is None:
            self._begun, self._done_before = self._clock(), self._passed
            self._next = self._begun + FIRST
        self._name, self._trained, self._total = _name(run), done, mini_batches

    def on_trained(self, site: str, mini_batches: int) -> None:
        self._trained += mini_batches
        if self._clock() >= self._next:
            self._line(f"{self._name}: {100 * self._share:.0f} % trained")

    def on_finished(self, run: Run, result: RunResult, resumed: bool) -> None:
        self._pass(run)
        if not resumed:
            score = result.score()
            text = "no labels, so not measured" if score is None else with_unit(result.metric, score)
            self._line(f"{_name(run)}: {text}")

    def on_diverged(self, run: Run) -> None:
        self._pass(run)
        if self._runs > 1:  # with a single run, the error message says it
            self._line(f"{_name(run)}: diverged")

    def on_skipped(self, run: Run) -> None:
        self._pass(run)

    def elsewhere(self, runs: int, holders: Collection[str]) -> None:
        self.left = runs
        self._say(at_work(runs, holders))

    def warn(self, message: str) -> None:
        self._say(f"{WARNING}{message}")

    @property
    def _share(self) -> float:
        """The share of the current run's mini-batches that are done, 0 to 1."""
        return min(1.0, self._trained / self._total) if self._total else 0.0

    def _pass(self, run: Run) -> None:
        self._names.add(_name(run))  # one that another process had may be taken over
        self._passed = len(self._names)
        self._trained = self._total = 0

    def _line(self, text: str) -> None:
        now = self._clock()
        self._next = now + EVERY
        elapsed = now - (now if self._begun is None else self._begun)
        done = self._passed - self._done_before + self._share
        left = elapsed / done * max(0.0, self._runs - self._passed - self._share) if done else 0.0
        pace = f", about {clock(left)} left" if left else ""
        self._say(f"{text} ({self._passed} of {self._runs} runs, {clock(elapsed)}{pace})")


def notebook_reporter() -> Lines | None:
    """Shows the newest line and all warnings below a notebook's cell; None if this is no notebook."""
    known = sys.modules.get("IPython")
    shell = known.get_ipython() if known is not None else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    shown = display({"text/plain": ""}, raw=True, display_id=True)
    warnings: list[str] = []

    def say(text: str) -> None:
        if text.startswith(WARNING):
            warnings.append(text)
        lines = [*warnings, *([] if text in warnings else [text])]
        shown.update({"text/plain": "\n".join(lines)}, raw=True)

    return Lines(say)


def _name(run: Run) -> str:
    return f"{run.method.display} → {run.target}, seed {run.seed}"


def at_work(runs: int, holders: Collection[str]) -> str:
    """That other processes are at work on some runs, and which."""
    return (
        f"{runs} run{'s are' if runs > 1 else ' is'} being trained by {', '.join(holders)}: run the same command again "
        "when that is done, with --wait to wait for it"
    )
