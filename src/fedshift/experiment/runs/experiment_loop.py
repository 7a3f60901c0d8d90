"""Runs an experiment: one run after another. Each can be resumed after every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedshift.claims import ClaimLost, network_file_system, silence
from fedshift.errors import SitesLost, TrainingDiverged, UserError
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.stored import FAILURE, ROUNDS, read_rounds
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import threads_set
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun
from fedshift.experiment.runs.context import Callback, Context, Reporter, Workers
from fedshift.experiment.runs.parallel import parallel_workers
from fedshift.experiment.runs.ray_runs import in_cluster, pool_in_cluster, spread
from fedshift.experiment.runs.round_loop import carry_out
from fedshift.experiment.runs.run_folder import RunFolder, run_folder, write_order
from fedshift.extras import reports_installed
from fedshift.federation.local.cards import cards_of, environment, resolve_device, shares
from fedshift.models.own.forward_trial import told_of

_LOOK = 1.0
"""Seconds between two looks at a run that another process holds."""


def run_experiment(
    experiment: Experiment,
    runs: Path,
    reporter: Reporter | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    helper: bool = False,
    stop: Callable[[], None] = lambda: None,
    shard: tuple[int, int] = (1, 1),
    wait: bool = False,
) -> Path:
    """Run every run that is not finished. An interrupted run resumes after its last round.

    If the training of a run diverges, the other runs continue.

    Args:
        runs: the folder that holds a folder for each experiment.
        callbacks: are called after each round and each run.
        helper: whether this is one of the further processes of ``engine.parallel_runs``. These take runs that no other
            process holds.
        stop: is called before every round, and raises an error to stop there.
        shard: (i, n): take the i-th, (i + n)-th … run alone, for processes that cannot lock each other's runs.
        wait: whether to wait for runs that other processes hold, and to take over those whose process is gone.

    Returns:
        The experiment's folder.

    Raises:
        UserError: the experiment has a mistake, or its folder belongs to another one.
        TrainingDiverged: a run diverged. Raised after the other runs.
        FedshiftError: something else failed.
    """
    if experiment.engine.name not in ("local", "ray"):
        raise UserError(f"engine.name: {experiment.engine.name} runs over a network: use fedshift deploy")
    reports_installed("training on one machine")
    engine, folder, reporter = experiment.engine, runs / experiment.name, reporter or Reporter()
    device = "cpu" if in_cluster(engine) else resolve_device(experiment.device)
    threads = engine.thread_count()
    plan = Plan(experiment, experiment.protocol.taking_part(build_data(experiment, watcher=reporter)))
    folders = _check_plan(plan, folder, reporter)
    unfinished = _count_unfinished(folders)
    elsewhere = dict(pair for pair in zip(folders, plan.runs, strict=True) if callbacks and pair[0].result() is None)
    if not helper:
        write_order(plan, folder)
        if kind := network_file_system(folder):
            reporter.warn(
                f"{folder} is on {kind}, where a lock of one machine may not hold on another: processes keep apart by "
                f"claims, too, and take over after {silence():g} seconds without a sign"
            )
    mine = list(zip(plan.runs, folders, strict=True))[shard[0] - 1 :: shard[1]]
    reporter.begin(len(mine))
    if in_cluster(engine):
        diverged = spread(run_experiment, experiment, runs, mine, shard, reporter, stop)
    else:
        helpers = 0 if helper or shard != (1, 1) else max(0, min(engine.parallel_runs or 1, unfinished) - 1)
        diverged = []
        first, *others = shares(cards_of(experiment.device), helpers + 1, engine.workers)
        further = [environment(cards) for cards in others]
        context = Context(first[0].device if first else device, threads, reporter, callbacks, stop)
        with (
            threads_set(threads),
            parallel_workers(experiment, runs, helpers, diverged, stop, further),
            Workers(engine.workers, threads, first, pool_in_cluster(engine, folder, device)) as workers,
        ):
            diverged += _carry_out_all(context, workers, mine, elsewhere)
            if not helper:
                diverged += _take_over(context, workers, mine, elsewhere, wait=wait)
    if not helper:
        _tell_held([held for _, held in mine], reporter)
    for run_of, planned in elsewhere.items():
        _pass_on(planned, run_of, callbacks)
    if diverged:
        more = "; others diverged too" if len(diverged) > 1 else ""
        raise TrainingDiverged(f"{diverged[0]}{more}") from diverged[0]
    return folder


def _check_plan(plan: Plan, folder: Path, reporter: Reporter) -> list[RunFolder]:
    """Check that the parts of an experiment fit, and tell the warnings."""
    for warning in (*plan.data.warnings, *plan.site_differences, *check_fit(plan)):
        reporter.warn(warning)
    folders = [run_folder(planned, folder) for planned in plan.runs]
    if plan.experiment.training.thaw_after:
        for planned in plan.runs:
            _ = planned.rounds  # refuses a method that has too few, before others train
    return folders


def _count_unfinished(folders: Sequence[RunFolder]) -> int:
    """The number of runs without a result."""
    unfinished = 0
    for folder in folders:
        folder.check_identity()
        unfinished += folder.result() is None
    return unfinished


def _tell_held(folders: Sequence[RunFolder], reporter: Reporter) -> None:
    """Tell which runs other processes, none of this experiment's helpers, are still at work on."""
    held = [folder.holder() for folder in folders if folder.result() is None and folder.is_held()]
    if held:
        reporter.elsewhere(len(held), sorted(set(held)))


def _pass_on(planned: PlannedRun, folder: RunFolder, callbacks: Sequence[Callback]) -> None:
    """Pass a run that another process finished on to the callbacks."""
    result, records = folder.result(), read_rounds(folder.path / ROUNDS)
    if result is None:
        return
    for callback in callbacks:
        for record in records:
            callback.after_round(planned.run, record, folder.path)
        callback.after_run(planned.run, result, folder.path)


def _take_over(
    context: Context,
    workers: Workers,
    runs: Sequence[tuple[PlannedRun, RunFolder]],
    elsewhere: dict[RunFolder, PlannedRun],
    *,
    wait: bool,
) -> list[TrainingDiverged]:
    """Carry out the runs that are held by processes that turn out to be gone, or with ``wait`` until none is left."""
    diverged: list[TrainingDiverged] = []
    for _, folder in runs:
        folder.doubt_holder()
    while True:
        left = [pair for pair in runs if pair[1].result() is None and not (pair[1].path / FAILURE).exists()]
        free = [pair for pair in left if not pair[1].is_held()]
        diverged += _carry_out_all(context, workers, free, elsewhere)
        if not free and not any(wait or not held.holder_lives() for _, held in left):
            return diverged
        if not free:
            context.stop()
            time.sleep(_LOOK)


def _carry_out_all(
    context: Context,
    workers: Workers,
    runs: Sequence[tuple[PlannedRun, RunFolder]],
    elsewhere: dict[RunFolder, PlannedRun],
) -> list[TrainingDiverged]:
    """Carry out the unfinished runs that no other process holds, and take them out of ``elsewhere``."""
    reporter, diverged = context.reporter, []
    for planned, folder in runs:
        if folder.result() is None and not folder.acquire():
            reporter.on_skipped(planned.run)
            continue
        with folder:
            folder.check_identity()  # again, because another process may have finished it meanwhile
            finished = folder.result()
            if finished is not None:
                reporter.on_finished(planned.run, finished, resumed=True)
                continue
            elsewhere.pop(folder, None)
            try:
                with told_of(planned.experiment.model, "training with it"):
                    result = _carry_out(context, workers, planned, folder)
            except ClaimLost as error:
                reporter.warn(str(error))
                reporter.on_skipped(planned.run)
                workers.close()
            except TrainingDiverged as error:
                diverged.append(error)
                reporter.on_diverged(planned.run)
                workers.close()  # they may be in the middle of a mini-batch
            else:
                reporter.on_finished(planned.run, result, resumed=False)
                for callback in context.callbacks:
                    callback.after_run(planned.run, result, folder.path)
    return diverged


def _carry_out(context: Context, workers: Workers, planned: PlannedRun, folder: RunFolder) -> RunResult:
    """`carry_out`; once more from the checkpoint, with new processes, where those of sites in a cluster are lost."""
    try:
        return carry_out(context, workers, planned, folder)
    except SitesLost as error:
        context.reporter.warn(f"{error}: the run goes on from its last round with new processes")
        workers.close()
        return carry_out(context, workers, planned, folder)
