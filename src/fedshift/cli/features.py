"""``fedshift features``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedshift.cli.console import escape, safe_console
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.environment import threads_set
from fedshift.experiment.features import SiteFeatures, Watcher, all_features


def features_file(path: Path, overrides: Sequence[str]) -> None:
    """Compute the features of an experiment's images, with a progress bar, then print a line for each site."""
    errors = safe_console(stderr=True)
    try:
        result = _extract_with_bar(load(path, overrides), errors)
    except KeyboardInterrupt:
        errors.print("interrupted: run the same command again to continue after the last images", highlight=False)
        sys.exit(130)
    table = Table(box=None, pad_edge=False)
    for column in ("site", "images", "features", "computed now", "images/s", "file"):
        table.add_column(column, justify="left" if column in ("site", "file") else "right", overflow="fold")
    for name, item in result.items():
        number, width = item.features.shape
        speed = f"{item.computed / item.seconds:.1f}" if item.seconds else "–"
        table.add_row(escape(name), str(number), str(width), str(item.computed), speed, escape(str(item.path)))
    safe_console().print(table)


def _extract_with_bar(experiment: Experiment, errors: Console) -> dict[str, SiteFeatures]:
    bar = FeatureBar(errors)
    try:
        with threads_set(experiment.engine.thread_count()):
            return dict(all_features(experiment, experiment.data.build(), bar)[1])
    finally:
        bar.stop()


class Speed(ProgressColumn):
    """Images per second."""

    def render(self, task: Task) -> Text:
        """The task's speed since it began or was resumed."""
        return Text(f"{task.speed:.1f} images/s" if task.speed else "")


class FeatureBar(Watcher):
    """Shows the progress of the extraction as one bar."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("features of {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Speed(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, visible=False)

    def extraction(self, site: str, images: int, done: int) -> None:
        self._progress.start()
        self._progress.reset(self._task, total=images, completed=done, description=escape(site), visible=True)

    def on_extracted(self, images: int) -> None:
        self._progress.advance(self._task, images)

    def warn(self, message: str) -> None:
        self._progress.console.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.update(self._task, visible=False)
        self._progress.stop()
