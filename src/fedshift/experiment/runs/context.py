"""What all runs of an experiment share: its data as each run sees them, its workers, and who is told how it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedshift.data.domain import DataSet
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.config.sections import LeaveOneOut
from fedshift.experiment.distance import proxy_distances
from fedshift.experiment.features import Watcher, built
from fedshift.experiment.plan import Run
from fedshift.experiment.protocol import Split, roles_of
from fedshift.federation.local.pool import WorkerPool


class Reporter(Watcher):
    """Told how an experiment goes on. This one says nothing; the command line draws progress bars."""

    def begin(self, runs: int) -> None:
        """The experiment has so many runs."""

    def run(self, run: Run, mini_batches: int, done: int) -> None:
        """A run begins or goes on: ``done`` of ``mini_batches`` are trained."""

    def trained(self, site: str, mini_batches: int) -> None:
        """A site answered after so many mini-batches."""

    def round(self, run: Run, record: RoundRecord) -> None:
        """A round was measured and written down."""

    def finished(self, run: Run, result: RunResult, resumed: bool) -> None:
        """A run is done; ``resumed``: it had been done before."""

    def diverged(self, run: Run) -> None:
        """A run's training turned to what is no number; the others go on, and the experiment ends with the error."""

    def skipped(self, run: Run) -> None:
        """Another process has this run."""


@dataclass(frozen=True)
class Context:
    """What all runs of an experiment share."""

    experiment: Experiment
    data: DataSet
    fingerprint: str
    device: str
    threads: int
    pool: WorkerPool | None
    reporter: Reporter
    encoded: dict[str, DataSet] = field(default_factory=dict)
    distances: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def encoded_for(self, target: str) -> DataSet:
        """The data with whoever is unseen kept out of the encoding; kept until another target's turn."""
        if target not in self.encoded:
            self.encoded.clear()
            self.encoded[target] = data_for(self.experiment, self.data, target)
            if self.pool is not None and self.encoded[target] is not self.data:
                self.pool.forget()
        return self.encoded[target]

    def distances_of(self, run: Run, data: DataSet, split: Split) -> dict[str, float]:
        """The distances between the sites of a pair, which every method of the experiment shares."""
        key = run.target, run.seed
        if key not in self.distances:
            self.distances[key] = proxy_distances(data, split, run.seed, self.device, self.experiment.engine)
        return self.distances[key]


def data_for(experiment: Experiment, data: DataSet, target: str) -> DataSet:
    """The experiment's ``data`` in an encoding in which a site that is unseen, or not in the pair, has no say.

    A target that takes part without labels shares in the encoding as the sources do.
    """
    sources, targets = roles_of(experiment.protocol, data, target)
    unseen = isinstance(experiment.protocol, LeaveOneOut)
    source = experiment.data
    for name in data.domains:
        if name not in sources and (unseen or name not in targets):
            source = source.without(name)
    return data if source == experiment.data else built(experiment, source)
