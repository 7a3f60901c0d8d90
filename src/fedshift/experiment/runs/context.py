"""What all runs of an experiment share in one process: reporter, callbacks, device and workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedshift.data.domain import DataSet
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.experiment.distance import proxy_distances
from fedshift.experiment.features import Watcher
from fedshift.experiment.plan import PlannedRun, Run
from fedshift.federation.local.cards import Card
from fedshift.federation.local.pool import Pool, WorkerPool


class Reporter(Watcher):
    """Receives the progress of an experiment. This base class ignores it."""

    def begin(self, runs: int) -> None:
        """The experiment begins; it has this many runs."""

    def run(self, run: Run, mini_batches: int, done: int) -> None:
        """A run starts or resumes; ``done`` of its ``mini_batches`` are trained."""

    def on_trained(self, site: str, mini_batches: int) -> None:
        """A site answered after training on this many mini-batches."""

    def round(self, run: Run, record: RoundRecord) -> None:
        """A round was evaluated and logged."""

    def on_finished(self, run: Run, result: RunResult, resumed: bool) -> None:
        """A run is finished; ``resumed``: it was finished before this call."""

    def on_diverged(self, run: Run) -> None:
        """A run's training diverged. The other runs continue; the error is raised at the end."""

    def on_skipped(self, run: Run) -> None:
        """Another process is running this run."""

    def elsewhere(self, runs: int, holders: Collection[str]) -> None:
        """All else is done, and other processes are still at work on this many runs; ``holders`` names them."""


class Callback:
    """Is called while an experiment runs. A subclass overrides what it needs.

    Runs of further processes (``engine.parallel_runs``) are reported when all runs are done, with all their rounds.
    Runs that were finished before are not reported.
    """

    def after_round(self, run: Run, record: RoundRecord, folder: Path) -> None:
        """A round was measured and written to ``rounds.jsonl``.

        Args:
            run: its method, target and seed.
            record: the line that was written.
            folder: the run's folder.
        """

    def after_run(self, run: Run, result: RunResult, folder: Path) -> None:
        """A run is finished: its folder holds the result and the model.

        Args:
            run: its method, target and seed.
            result: the result.
            folder: the run's folder.
        """


@dataclass(frozen=True)
class Context:
    """What all runs of an experiment share in one process: device, threads, reporter, callbacks, distances of sites.

    ``stop`` is called before every round, and raises an error to stop there.
    """

    device: str
    threads: int
    reporter: Reporter
    callbacks: Sequence[Callback] = ()
    stop: Callable[[], None] = lambda: None
    distances: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def distances_of(self, planned: PlannedRun) -> dict[str, float]:
        """The proxy A-distances of the run's sites, measured once for all methods of the experiment."""
        key = planned.run.target, planned.run.seed
        if key not in self.distances:
            self.distances[key] = proxy_distances(
                planned.data, planned.split, planned.setting(self.device), planned.experiment.engine
            )
        return self.distances[key]


class Workers:
    """The worker processes that run the sites of a run.

    They start when the first run needs them, and again after `close`.
    """

    def __init__(
        self, number: int, threads: int, cards: Sequence[Card] = (), start: Callable[[], Pool] | None = None
    ) -> None:
        """``threads`` is the number of threads of each worker; ``cards`` are those that they share.

        ``start`` starts workers elsewhere; None: on this machine.
        """
        self._number = number
        self._start = start or (lambda: WorkerPool(number, threads, cards))
        self._pool: Pool | None = None
        self._data: DataSet | None = None

    def pool_for(self, data: DataSet) -> Pool | None:
        """The pool for a run on ``data``; None if runs train in this process."""
        if self._number == 1:
            return None
        if self._pool is None:
            self._pool = self._start()
        if data is not self._data:
            self._pool.forget()  # the samples and labels of an earlier run
            self._data = data
        return self._pool

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.close()
        self._pool = self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
