"""Experiment trackers: TensorBoard, MLflow and Weights & Biases, from the lines of ``rounds.jsonl``."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.stored import ROUNDS, read_rounds
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Callback
from fedshift.extras import import_extra

_DEPTH = 3
"""How many folders deep a run is below its experiment."""


class Tracker(Callback, ABC):
    """Writes the numbers of every round to a tracker.

    It reads them from ``rounds.jsonl``, so a resumed run is tracked from its first round. Each of fedshift's runs is
    one run of the tracker.
    """

    def __init__(self) -> None:
        self._open: dict[Path, tuple[Any, int]] = {}

    def after_round(self, run: Run, record: RoundRecord, folder: Path) -> None:
        tracked, last = self._open.get(folder) or (self.begin(run, folder), -1)
        for each_round in read_rounds(folder / ROUNDS):
            if each_round.round > last:
                self.write(tracked, each_round)
                last = each_round.round
        self._open[folder] = tracked, last

    def after_run(self, run: Run, result: RunResult, folder: Path) -> None:
        if folder in self._open:
            self.end(self._open.pop(folder)[0])

    @abstractmethod
    def begin(self, run: Run, folder: Path) -> Any:
        """Begin a run of the tracker. Returns what `write` and `end` need."""

    @abstractmethod
    def write(self, tracked: Any, record: RoundRecord) -> None:
        """Write the numbers of one round."""

    @abstractmethod
    def end(self, tracked: Any) -> None:
        """End the run: it is finished."""


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/`` in each run's folder."""

    def __init__(self) -> None:
        super().__init__()
        import_extra("tensorboard", extra="trackers", what="TensorBoard")

    def begin(self, run: Run, folder: Path) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        tracked = folder / "tensorboard"
        shutil.rmtree(tracked, ignore_errors=True)  # of an interrupted run, whose rounds are written again
        return SummaryWriter(str(tracked))

    def write(self, tracked: Any, record: RoundRecord) -> None:
        for name, value in record.numbers().items():
            tracked.add_scalar(name, value, record.round)
        tracked.flush()

    def end(self, tracked: Any) -> None:
        tracked.close()


class MLflow(Tracker):
    """Writes to ``MLFLOW_TRACKING_URI``, or if that is not set to ``mlflow/`` beside the experiment's folder."""

    def __init__(self) -> None:
        super().__init__()
        self._mlflow = import_extra("mlflow", extra="trackers", what="MLflow")

    def begin(self, run: Run, folder: Path) -> Any:
        experiment = folder.parents[_DEPTH - 1]
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (experiment.parent / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else files are refused in favour of a database
        client = self._mlflow.MlflowClient(uri)
        known = client.get_experiment_by_name(experiment.name)
        number = known.experiment_id if known else client.create_experiment(experiment.name)
        names = _names(run)
        made = client.create_run(number, run_name="-".join(names.values()))
        for name, value in names.items():
            client.log_param(made.info.run_id, name, value)
        return client, made.info.run_id

    def write(self, tracked: Any, record: RoundRecord) -> None:
        client, run_id = tracked
        for name, value in record.numbers().items():
            client.log_metric(run_id, name, value, step=record.round)

    def end(self, tracked: Any) -> None:
        client, run_id = tracked
        client.set_terminated(run_id)


class WeightsAndBiases(Tracker):
    """Writes to ``wandb/`` beside the experiment's folder. Nothing is sent unless ``WANDB_MODE`` says ``online``."""

    def __init__(self) -> None:
        super().__init__()
        self._wandb = import_extra("wandb", extra="trackers", what="Weights & Biases")

    def begin(self, run: Run, folder: Path) -> Any:
        experiment, names = folder.parents[_DEPTH - 1], _names(run)
        return self._wandb.init(
            project=experiment.name,
            name="-".join(names.values()),
            config=names,
            dir=str(experiment.parent),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=self._wandb.Settings(silent=True),
        )

    def write(self, tracked: Any, record: RoundRecord) -> None:
        tracked.log(record.numbers(), step=record.round)

    def end(self, tracked: Any) -> None:
        tracked.finish()


def _names(run: Run) -> dict[str, str]:
    return {"method": run.method.display, "target": run.target, "seed": str(run.seed)}


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def tracker(name: str) -> Tracker:
    """The tracker of that name. UserError if there is no such tracker, or its package is not installed."""
    if name not in TRACKERS:
        raise UserError(f"--track: there is no tracker '{name}'; {nearest(name, TRACKERS)}")
    return TRACKERS[name]()
