"""Spreads the runs of an experiment over a cluster of Ray (``engine: {name: ray}``).

Each process of the cluster takes runs that no other one holds, as further processes of this machine do: the folder,
which all nodes share, says what is done. Ray tries nothing again. If a node is lost, its runs go on once, elsewhere,
from their last rounds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.claims import silence
from fedshift.data.builders.in_memory import InMemory
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.evaluation.stored import RESULT, ROUNDS
from fedshift.experiment.config.engine_section import Engine, RayEngine
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.plan import PlannedRun
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.local.pool import Pool
from fedshift.federation.local.ray_cluster import check_room, join_cluster, room_for, settle_in, where

_LOOK = 0.5
"""Seconds between two looks at what is finished."""
Run = Callable[..., Path]
Runs = Sequence[tuple[PlannedRun, RunFolder]]


def in_cluster(engine: Engine) -> bool:
    """Whether runs train in processes of a cluster, and this process only waits for them."""
    return isinstance(engine, RayEngine) and engine.workers == 1


def pool_in_cluster(engine: Engine, folder: Path, device: str) -> Callable[[], Pool] | None:
    """What starts the processes of the sites of a run in a cluster; None where they are on this machine."""
    if not isinstance(engine, RayEngine):
        return None

    def start() -> Pool:
        from fedshift.federation.local.ray_pool import RayPool

        absolute = folder.absolute()
        of_sites = "cuda" if engine.cards and device != "cpu" else None
        return RayPool(
            engine.address, engine.workers, engine.thread_count(), engine.cards, engine.wait, absolute, of_sites
        )

    return start


def spread(
    run: Run,
    experiment: Experiment,
    runs: Path,
    mine: Runs,
    shard: tuple[int, int],
    reporter: Reporter,
    stop: Callable[[], None],
) -> list[TrainingDiverged]:
    """Carry out the runs ``mine``, those of a ``shard``, in processes of the cluster, and wait for them.

    ``run`` is `run_experiment`, which each of them calls.

    Returns:
        The errors of runs that diverged.

    Raises:
        UserError: there is no cluster, or it has no room; the data are objects of this process; or a process's own.
        FedshiftError: the cluster does not answer, or a process failed.
    """
    engine = experiment.engine
    assert isinstance(engine, RayEngine)
    if any(isinstance(held, InMemory) for held in (getattr(experiment.data, "sites", None) or {}).values()):
        raise UserError("engine.name: ray: data in memory are known to this process alone: use engine.workers")
    tasks = _Tasks(run, experiment, engine, runs, mine, shard, reporter, stop)
    if not tasks.runs_left():
        return []
    with join_cluster(engine.address) as ray:
        if tasks.carry_out(ray):
            tasks.wait_for_claims()
            if tasks.carry_out(ray):
                raise FedshiftError("nodes of the cluster were lost twice; run again to continue from the last rounds")
    return tasks.diverged


class _Tasks:
    """Processes of the cluster that carry out runs."""

    def __init__(
        self,
        run: Run,
        experiment: Experiment,
        engine: RayEngine,
        runs: Path,
        mine: Runs,
        shard: tuple[int, int],
        reporter: Reporter,
        stop: Callable[[], None],
    ) -> None:
        alone = {"name": "local", "threads": engine.thread_count()}
        shared = ("refuse", "refuse_at", "on_refusal", "quorum", "aggregation", "routing")
        whole = experiment.dump()
        whole["engine"] = alone | {name: whole["engine"][name] for name in shared}
        self._run = run
        self._options, self._engine, self._runs, self._shard = json.dumps(whole), engine, runs.absolute(), shard
        self._mine = [pair for pair in mine if pair[1].result() is None]
        self._reporter, self._stop = reporter, stop
        self._told: set[RunFolder] = set()
        self.diverged: list[TrainingDiverged] = []

    def runs_left(self) -> Runs:
        """The runs without a result."""
        return [pair for pair in self._mine if not (pair[1].path / RESULT).exists()]

    def carry_out(self, ray: Any) -> bool:
        """Start processes, and wait for them; whether a node was lost under one of them."""
        engine, left = self._engine, self.runs_left()
        threads = engine.thread_count()
        check_room(ray, engine.parallel_runs or 1, threads, engine.cards)
        number = min(len(left), engine.parallel_runs or room_for(ray, threads, engine.cards))
        task = ray.remote(_run_those_free).options(
            num_cpus=threads, num_gpus=engine.cards, max_retries=0, scheduling_strategy="SPREAD"
        )
        what = self._run, self._options, str(self._runs), os.getcwd(), where(), threads, self._shard
        open_tasks = [task.remote(*what) for _ in range(number)]
        try:
            return self._wait_for(ray, open_tasks)
        finally:
            for item in open_tasks:
                ray.cancel(item)  # what is done is not touched

    def _wait_for(self, ray: Any, open_tasks: list[Any]) -> bool:
        lost, newest, heard = False, 0, time.monotonic()
        while open_tasks:
            self._stop()
            self._tell()
            there, _ = ray.wait(open_tasks, num_returns=1, timeout=_LOOK)
            if there or self._newest() > newest:
                newest, heard = self._newest(), time.monotonic()
            if time.monotonic() - heard > self._engine.wait:
                raise FedshiftError(
                    f"no round ended in {self._engine.wait:g} seconds (engine.wait): a node may be gone, or too small"
                )
            for item in there:
                open_tasks.remove(item)
                try:
                    self._take(ray.get(item))
                except ray.exceptions.RayError as error:
                    lost = True
                    self._reporter.warn(f"a process in the cluster is gone ({type(error).__name__})")
        self._tell()
        return lost and bool(self.runs_left())

    def _take(self, failure: Mapping[str, str] | None) -> None:
        """What a process says of its end."""
        if failure is None:
            return
        error = _ERRORS[failure["error"]](failure["message"])
        if not isinstance(error, TrainingDiverged):
            raise error
        self.diverged.append(error)

    def wait_for_claims(self) -> None:
        """Wait until what a lost node held is free: on another machine its claims end by their silence alone."""
        end = time.monotonic() + 2 * silence()
        while any(folder.is_held() for _, folder in self.runs_left()) and time.monotonic() < end:
            self._stop()
            time.sleep(_LOOK)

    def _newest(self) -> int:
        """When the last round of any run was written."""
        files = [folder.path / ROUNDS for _, folder in self._mine]
        return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)

    def _tell(self) -> None:
        """Report what was finished since the last look."""
        news = [pair for pair in self._mine if pair[1] not in self._told and (pair[1].path / RESULT).exists()]
        for planned, folder in news:
            if (result := folder.result()) is not None:
                self._told.add(folder)
                self._reporter.on_finished(planned.run, result, resumed=False)


_ERRORS: Mapping[str, type[FedshiftError]] = {"diverged": TrainingDiverged, "user": UserError, "failed": FedshiftError}


def _run_those_free(
    run: Run, options: str, runs: str, folder: str, variables: Mapping[str, str], threads: int, shard: tuple[int, int]
) -> dict[str, str] | None:
    """In a process of the cluster: carry out the runs that no other process holds, until none is left."""
    settle_in(variables, threads)
    os.chdir(folder)
    try:
        run(parse(json.loads(options)), Path(runs), helper=True, shard=shard)
    except TrainingDiverged as error:
        return {"error": "diverged", "message": str(error)}
    except UserError as error:
        return {"error": "user", "message": str(error)}
    except FedshiftError as error:
        return {"error": "failed", "message": str(error)}
    return None
