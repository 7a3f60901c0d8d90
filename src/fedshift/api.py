"""fedshift from Python: what the command line does, as functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult, Selection
from fedshift.experiment import check as checks
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.config.experiment import load as load_file
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.import_paths import CHILD
from fedshift.report.collect import Collected, collect
from fedshift.report.table import table_of
from fedshift.report.table_formats import markdown


@dataclass(frozen=True)
class Results:
    """The finished runs of an experiment. Printed, it is the table of last rounds in Markdown."""

    folder: Path
    collected: Collected

    @property
    def runs(self) -> list[RunResult]:
        """One result per (method, target, seed)."""
        return self.collected.results

    def rows(self, select: Selection = "last") -> list[dict[str, Any]]:
        """Rows ``{method, target, select, n, mean, standard_error, seeds}``, in percent, averages included."""
        return [row.model_dump() for row in table_of(self.collected, select).rows]

    def markdown(self, select: Selection = "last") -> str:
        """The table in Markdown."""
        return markdown(table_of(self.collected, select))

    def __str__(self) -> str:
        return self.markdown()


Given = Experiment | Mapping[str, Any] | str | Path
"""An experiment, the same as a mapping, or the file it stands in."""


def run(experiment: Given, runs: str | Path = "runs", reporter: Reporter | None = None) -> Results:
    """Run what is not finished of an experiment and return its results; what is finished is not run again.

    Raises fedshift.errors.UserError for a mistake in the experiment, FedshiftError when training fails.
    """
    if os.environ.get(CHILD):
        raise UserError(
            "fedshift.run was called while a worker imported this file for its method: put the call under "
            "if __name__ == '__main__', or the method into a file of its own"
        )
    folder = run_experiment(_resolved(experiment), Path(runs), reporter)
    return results(folder)


def results(folder: str | Path) -> Results:
    """The finished runs below an experiment's folder. Raises UserError where there are none."""
    return Results(Path(folder), collect(Path(folder)))


def load(path: str | Path, *overrides: str) -> Experiment:
    """The experiment in a YAML file, with ``key.path=value`` overrides."""
    return load_file(Path(path), overrides)


def check(experiment: Given) -> checks.Check:
    """Everything that can be known before training."""
    return checks.check(_resolved(experiment))


def _resolved(experiment: Given) -> Experiment:
    if isinstance(experiment, str | Path):
        return load(experiment)
    return experiment if isinstance(experiment, Experiment) else parse(experiment)
