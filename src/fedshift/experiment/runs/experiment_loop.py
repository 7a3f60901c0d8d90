"""The loop: every (method, target, seed) of an experiment, each resumable after every round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedshift.errors import TrainingDiverged, UserError
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import data_fingerprint, resolve_device, threads_set
from fedshift.experiment.features import built
from fedshift.experiment.plan import runs_of
from fedshift.experiment.protocol import shortest_epochs, split_of, taking_part, targets_of
from fedshift.experiment.runs.context import Context, Reporter
from fedshift.experiment.runs.one_run import carry_out
from fedshift.experiment.runs.parallel import parallel_workers
from fedshift.experiment.runs.run_folder import run_folder, write_order
from fedshift.federation.local.pool import WorkerPool


def run_experiment(
    experiment: Experiment, runs: Path, reporter: Reporter | None = None, *, helper: bool = False
) -> Path:
    """Run what is not finished yet; returns the experiment's folder. Running again resumes.

    ``helper`` marks the further processes of ``engine.parallel_runs``: they take parts that nobody else holds and leave
    the rest. A run whose training diverges does not keep the others from being run. Raises UserError for a mistake in
    the experiment or a folder of another one, TrainingDiverged in the end when a run diverged, FedshiftError when
    something else fails.
    """
    if experiment.engine.name != "local":
        raise UserError(f"engine.name: {experiment.engine.name} runs over a network: use fedshift deploy")
    reporter = reporter or Reporter()
    folder = runs / experiment.name
    device = resolve_device(experiment.device)
    threads = experiment.engine.thread_count()
    data = taking_part(experiment.protocol, built(experiment, watcher=None if helper else reporter))
    for warning in data.warnings if not helper else ():
        reporter.warn(warning)
    planned = runs_of(experiment, data)
    for warning in check_fit(experiment, data):
        if not helper:
            reporter.warn(warning)
    fingerprint = data_fingerprint(data)
    folders = {}
    splits = []
    for run in planned:
        split = split_of(experiment.protocol, data, run.target, run.seed)
        splits.append(split)
        folders[run] = run_folder(experiment, split, fingerprint, run, folder)
    steps = shortest_epochs(experiment.training, splits)
    for warning in (said for method in experiment.methods for said in method.check_steps(steps) if not helper):
        reporter.warn(warning)
    unfinished = 0
    for place in folders.values():
        place.check_identity()
        unfinished += place.result() is None
    if not helper:
        write_order(experiment, targets_of(experiment.protocol, data), folder)
    reporter.begin(len(planned))
    engine = experiment.engine
    diverged: list[TrainingDiverged] = []
    helpers = 0 if helper else max(0, min(engine.parallel_runs, unfinished) - 1)
    with threads_set(threads), parallel_workers(experiment, runs, helpers, diverged):
        pool: WorkerPool | None = None
        try:
            context = Context(experiment, data, fingerprint, device, threads, pool, reporter)
            for run, place in folders.items():
                if place.result() is None and not place.acquire():
                    reporter.skipped(run)
                    continue
                with place:
                    place.check_identity()  # another process may have finished it since the first look
                    finished = place.result()
                    if finished is not None:
                        reporter.finished(run, finished, resumed=True)
                        continue
                    if pool is None and engine.workers > 1:
                        pool = WorkerPool(engine.workers, threads)
                        context = replace(context, pool=pool)
                    try:
                        reporter.finished(run, carry_out(context, run, place), resumed=False)
                    except TrainingDiverged as error:
                        diverged.append(error)
                        reporter.diverged(run)
                        if pool is not None:  # its workers may be in the midst of a step
                            pool.close()
                            pool = None
        finally:
            if pool is not None:
                pool.close()
    if diverged:
        others = "; others diverged too" if len(diverged) > 1 else ""
        raise TrainingDiverged(f"{diverged[0]}{others}") from diverged[0]
    return folder
