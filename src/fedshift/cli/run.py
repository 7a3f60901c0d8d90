"""``fedshift run`` and ``fedshift demo``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedshift.cli.console import escape, safe_console
from fedshift.cli.features import FeatureBar
from fedshift.errors import TrainingDiverged, UserError
from fedshift.evaluation.records import RoundRecord, RunResult, with_unit
from fedshift.evaluation.stored import is_finished, run_folders
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.lines import Lines, at_work
from fedshift.experiment.runs.stopping import heed_signals
from fedshift.report.advice.words import two_sentences
from fedshift.report.collect import collect
from fedshift.report.mistakes import ShownSamples
from fedshift.report.page import write_page
from fedshift.report.report import report_of, whole_report
from fedshift.report.table_formats import terminal
from fedshift.report.trackers import tracker

ELSEWHERE = 5
"""Exit code of a process that leaves runs which other processes are training."""


def run_file(
    path: Path,
    overrides: Sequence[str],
    runs: Path,
    trackers: Sequence[str] = (),
    samples: bool = False,
    shard: str | None = None,
    wait: bool = False,
) -> None:
    """Run an experiment file, then print the table and write the report.

    Progress is shown as bars at a terminal and as lines elsewhere. ``trackers`` names those that get every round. With
    ``samples`` the page shows samples too. See `run_experiment` for ``shard``, here as "i/n", and ``wait``.
    """
    errors = safe_console(stderr=True)
    part = part_of(shard)
    with resumable(errors), heed_signals() as stop:
        experiment, callbacks = load(path, overrides), [tracker(name) for name in trackers]
        train = partial(run_experiment, callbacks=callbacks, stop=stop.check, shard=part, wait=wait)
        left = _run(experiment, runs, errors, train, samples)
    if left:
        sys.exit(ELSEWHERE)


def part_of(text: str | None) -> tuple[int, int]:
    """The i and n of "i/n". UserError if it is not of this form, or i is not from 1 to n."""
    parts = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text or "1/1")
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]):
        raise UserError(f"--shard {text}: give i/n, such as 2/4 for the second of four parts")
    return int(parts[1]), int(parts[2])


@contextmanager
def resumable(errors: Console) -> Iterator[None]:
    """Tell whoever stops a command by Ctrl-C how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("interrupted: run the same command again to continue after the last round", highlight=False)
        sys.exit(130)


Train = Callable[[Experiment, Path, Reporter], object]


def _run(experiment: Experiment, runs: Path, errors: Console, train: Train, samples: bool) -> int:
    """Train, then show what is finished."""
    reporter, stop = reporter_at(errors)
    folder, diverged = runs / experiment.name, None
    try:
        train(experiment, runs, reporter)
    except TrainingDiverged as error:
        diverged = error
    finally:
        stop()
    if any(map(is_finished, run_folders(folder))):
        show_results(folder, errors, ShownSamples(experiment) if samples else None, advise=not reporter.left)
    if diverged is not None:
        raise diverged
    return reporter.left


def show_results(folder: Path, errors: Console, samples: ShownSamples | None = None, *, advise: bool = True) -> None:
    """Print the table of the finished runs in ``folder``, write the page, and say in two sentences what they show.

    Without ``advise`` nothing is said: other processes are at work, and methods have unequal sets of runs.
    """
    collected, console = collect(folder), safe_console()
    console.print(terminal(report_of(collected).table))
    report = whole_report(collected, samples)  # of samples takes minutes
    path = write_page(folder, report)
    errors.print(f"page: {path}", markup=False, highlight=False, soft_wrap=True)
    if advise and report.verdict is not None:
        console.print(two_sentences(report.verdict), markup=False, highlight=False)


def reporter_at(errors: Console) -> tuple[Bars | Lines, Callable[[], None]]:
    """A reporter, bars at a terminal and lines elsewhere, and the function that ends it."""
    if not errors.is_terminal:
        return Lines(partial(errors.print, markup=False, highlight=False, soft_wrap=True)), lambda: None
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=errors,
    )
    return Bars(progress), progress.stop


class Bars(Reporter):
    """Shows progress as two bars: runs, and mini-batches of the current run."""

    def __init__(self, progress: Progress) -> None:
        self.left = 0
        """Runs that another process holds."""
        self._runs = 0
        self._progress = progress
        self._whole = progress.add_task("runs", total=None, unit="runs")
        self._current = progress.add_task("", total=None, unit="mini-batches", visible=False)
        self._features = FeatureBar(progress.console)

    def extraction(self, site: str, images: int, done: int) -> None:
        self._features.extraction(site, images, done)

    def on_extracted(self, images: int) -> None:
        self._features.on_extracted(images)

    def begin(self, runs: int) -> None:
        self._features.stop()
        self._runs = runs
        self._progress.update(self._whole, total=runs)
        self._progress.start()

    def run(self, run: Run, mini_batches: int, done: int) -> None:
        name = escape(f"{run.method.display} → {run.target}, seed {run.seed}")
        self._progress.reset(self._current, total=mini_batches, completed=done, description=name, visible=True)

    def on_trained(self, site: str, mini_batches: int) -> None:
        self._progress.advance(self._current, mini_batches)

    def round(self, run: Run, record: RoundRecord) -> None:
        if record.target_mean is not None:
            name = escape(
                f"{run.method.display} → {run.target}, seed {run.seed}: {with_unit(run.metric, record.target_mean)}"
            )
            self._progress.update(self._current, description=name)

    def on_finished(self, run: Run, result: RunResult, resumed: bool) -> None:
        self._progress.advance(self._whole)

    def on_diverged(self, run: Run) -> None:
        self._progress.advance(self._whole)
        if self._runs > 1:  # with a single run, the error message says it
            name = f"{run.method.display} → {run.target}, seed {run.seed}: diverged"
            self._progress.console.print(name, markup=False, highlight=False, soft_wrap=True)

    def on_skipped(self, run: Run) -> None:
        self._progress.advance(self._whole)

    def elsewhere(self, runs: int, holders: Collection[str]) -> None:
        self.left = runs
        self._progress.console.print(at_work(runs, holders), markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self._progress.console.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)
