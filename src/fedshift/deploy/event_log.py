"""Progress of a deployed experiment, as lines of JSON that `fedshift deploy` shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.deploy.json_files import append_event
from fedshift.evaluation.records import RoundRecord
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter


class EventLog(Reporter):
    """Writes the events of an experiment to a log in the deployment's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def event(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        append_event(self._path, event)

    def begin(self, runs: int) -> None:
        self.event({"what": "experiment", "is": "begun", "runs": runs})

    def run(self, run: Run, mini_batches: int, done: int) -> None:
        self.event({"what": "run", "is": "begun", **_name(run), "mini_batches": mini_batches, "done": done})

    def on_trained(self, site: str, mini_batches: int) -> None:
        self.event({"what": "trained", "site": site, "mini_batches": mini_batches})

    def round(self, run: Run, record: RoundRecord) -> None:
        accuracy, sources = record.target_mean, record.source_mean
        measured = {"metric": run.metric, "accuracy": accuracy, "sources": sources}
        self.event({"what": "round", **_name(run), "round": record.round, **measured})

    def on_finished(self, run: Run, result: Any, resumed: bool) -> None:
        self.event({"what": "run", "is": "finished", **_name(run), "accuracy": result.accuracy(), "before": resumed})

    def warn(self, message: str) -> None:
        self.event({"what": "warning", "message": message})


def _name(run: Run) -> dict[str, Any]:
    return {"method": run.method.display, "target": run.target, "seed": run.seed}
