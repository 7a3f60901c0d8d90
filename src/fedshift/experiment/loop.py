"""The loop: every (method, target, seed) of an experiment, each resumable after every round."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.data.domain import DataSet
from fedshift.errors import FedshiftError, TrainingDiverged, UserError, nearest
from fedshift.evaluation.stored import ORDER, pack_of
from fedshift.experiment.context import Context, Reporter
from fedshift.experiment.environment import data_fingerprint, resolve_device, threads_set, versions
from fedshift.experiment.features import built
from fedshift.experiment.folder import RunFolder
from fedshift.experiment.part import run_part
from fedshift.experiment.protocol import (
    Part,
    Split,
    budgets,
    parts_of,
    roles_of,
    shortest_epochs,
    split_of,
    taking_part,
    targets_of,
)
from fedshift.experiment.schema import Experiment, method_record
from fedshift.experiment.sections import EXTENT, LeaveOneOut
from fedshift.federation.pool import WorkerPool
from fedshift.files import write_bytes
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.models import registry as models

DIVERGED = 3
"""How a helper ends when training diverged in one of its parts."""


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
    parts = parts_of(experiment, data)
    for warning in check_fit(experiment, data):
        if not helper:
            reporter.warn(warning)
    fingerprint = data_fingerprint(data)
    folders = {}
    splits = []
    for part in parts:
        split = split_of(experiment.protocol, data, part.target, part.seed)
        splits.append(split)
        folders[part] = run_folder(experiment, split, fingerprint, part, folder)
    steps = shortest_epochs(experiment.training, splits)
    for warning in (said for method in experiment.methods for said in method.check_steps(steps) if not helper):
        reporter.warn(warning)
    unfinished = 0
    for place in folders.values():
        place.check_identity()
        unfinished += place.result() is None
    if not helper:
        write_order(experiment, targets_of(experiment.protocol, data), folder)
    reporter.begin(len(parts))
    engine = experiment.engine
    diverged: list[TrainingDiverged] = []
    helpers = 0 if helper else max(0, min(engine.parallel_runs, unfinished) - 1)
    with threads_set(threads), _helpers(experiment, runs, helpers, diverged):
        pool: WorkerPool | None = None
        try:
            context = Context(experiment, data, fingerprint, device, threads, pool, reporter)
            for part, place in folders.items():
                if place.result() is None and not place.acquire():
                    reporter.skipped(part)
                    continue
                with place:
                    place.check_identity()  # another process may have finished it since the first look
                    finished = place.result()
                    if finished is not None:
                        reporter.finished(part, finished, resumed=True)
                        continue
                    if pool is None and engine.workers > 1:
                        pool = WorkerPool(engine.workers, threads)
                        context = replace(context, pool=pool)
                    try:
                        reporter.finished(part, run_part(context, part, place), resumed=False)
                    except TrainingDiverged as error:
                        diverged.append(error)
                        reporter.diverged(part)
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


def check_fit(experiment: Experiment, data: DataSet, targets: Sequence[str] | None = None) -> tuple[str, ...]:
    """Warnings of the methods about their options on these data.

    targets: those of a deployment, which has a name for all sites together; else the protocol's. Raises UserError when
    a method, the network, the data and what sites refuse do not fit; nothing is trained.
    """
    warnings: list[str] = []
    engine = experiment.engine
    for site in engine.refuse_at:
        if site not in data.domains:
            raise UserError(f"engine.refuse_at: no site is called '{site}'; {nearest(site, data.domains)}")
    for kind in experiment.data.shares:
        if kind in engine.refuse or any(kind in kinds for kinds in engine.refuse_at.values()):
            raise UserError(
                f"engine.refuse: sites refuse {kind}, which data set {experiment.data.name} needs for a common encoding"
            )
    models.check_task(experiment.model, data.task, data.name)
    protocol = experiment.protocol
    roles = [roles_of(protocol, data, target) for target in targets or targets_of(protocol, data)]
    numbers = {len(sources) for sources, _ in roles}
    unseen = isinstance(protocol, LeaveOneOut)
    most = max(len(sources) + (0 if unseen else len(others)) for sources, others in roles)
    if engine.quorum is not None and engine.quorum > most:
        raise UserError(
            f"engine.quorum: {engine.quorum} sites must answer, but at most {most} train in a run: lower it, or leave "
            "it out to wait for all"
        )
    for method in experiment.methods:
        if data.task not in method.tasks:
            known = {name: registry.method_class(name).tasks for name in registry.names()}
            # A method in front of another one learns what that one can: its class alone does not say.
            fitting = [name for name, tasks in known.items() if isinstance(tasks, tuple) and data.task in tasks]
            raise UserError(
                f"methods: {method.display} is a method of {' and '.join(method.tasks)}, data set {data.name} is one "
                f"of {data.task}: choose {', '.join(fitting)}"
            )
        for sources in sorted(numbers):
            network = models.build(experiment.model, data.input_shape, len(data.classes), 0)
            method.check(method.adapt_network(network, sources))
        refused = sorted(set(method.shares) & set(engine.refuse))
        if refused:
            raise UserError(
                f"engine.refuse: sites refuse {refused[0]}, which {method.display} shares: choose another method or "
                "take the kind out of engine.refuse"
            )
        asked = {site for sources, others in roles for site in (*sources, *(others if method.needs_target else ()))}
        for site in (site for site in engine.refuse_at if site in asked):
            for kind in sorted(set(method.shares) & set(engine.refuse_at[site])):
                refusal = f"site '{site}' refuses to send {kind}, which {method.display} shares"
                if engine.on_refusal == "stop" or method.pooled:
                    way = "" if method.pooled else " or write engine.on_refusal: leave_out"
                    raise UserError(f"engine.refuse_at: {refusal}: choose another method, take the kind out{way}")
                warnings.append(f"{refusal}: it is left out of such exchanges")
        warnings += method.check_samples(data.input_shape)
    return tuple(warnings)


def write_order(experiment: Experiment, targets: Sequence[str], folder: Path) -> None:
    """Say beside the methods' folders what was planned, in the order of the tables; not where packed files say it."""
    order = {
        "methods": [method.display for method in experiment.methods],
        "targets": list(targets),
        "seeds": list(experiment.protocol.seeds),
    }
    pack = pack_of(folder)
    if pack is None or pack.order != order:
        write_bytes(folder / ORDER, (json.dumps(order, indent=2) + "\n").encode())


def run_folder(experiment: Experiment, split: Split, fingerprint: str, part: Part, folder: Path) -> RunFolder:
    """The folder of one run below the experiment's, with the settings that make it this run."""
    settings = common_settings(experiment, part.method)
    budget = budgets(part.method, experiment.methods, experiment.training, split)
    identity = {
        **settings,
        "data": {**settings["data"], "fingerprint": fingerprint},
        "target": part.target,
        "seed": part.seed,
        "training": {**settings["training"], "mini_batches": budget},
        "engine": experiment.dump()["engine"],
        "device": experiment.device,
        "versions": versions(),
    }
    return RunFolder(folder / part.method.display / part.target / f"seed-{part.seed}", identity)


def common_settings(experiment: Experiment, method: Method) -> dict[str, Any]:
    """What all runs of a method in an experiment share."""
    whole = experiment.dump()
    return {
        "name": experiment.name,
        "data": whole["data"],
        "protocol": {key: value for key, value in whole["protocol"].items() if key not in EXTENT},
        "model": whole["model"],
        "training": whole["training"],
        "method": method_record(method),
    }


@contextmanager
def _helpers(experiment: Experiment, runs: Path, number: int, diverged: list[TrainingDiverged]) -> Iterator[None]:
    """Further processes that take parts of the same experiment; they are waited for, or ended with this one.

    What diverged in one of them is added to ``diverged``.
    """
    if number == 0:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fedshift-runs-") as folder:
        file = Path(folder) / "experiment.json"
        file.write_text(json.dumps(experiment.dump()))
        command = [sys.executable, "-m", "fedshift.experiment.helper", str(file), str(runs)]
        processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        try:
            for count in range(number):
                output = Path(folder) / f"errors-{count}.txt"
                with open(output, "wb") as errors:
                    # A session of its own: Ctrl-C reaches this process alone, which then ends its helpers.
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True
                    )
                processes.append((process, output))
            yield
            for process, output in processes:
                if process.wait():
                    lines = output.read_text(errors="replace").strip().splitlines()
                    said = lines[-1] if lines else f"a parallel run ended with code {process.returncode}"
                    if process.returncode == DIVERGED:
                        diverged.append(TrainingDiverged(said))
                    else:
                        raise (UserError if process.returncode == UserError.exit_code else FedshiftError)(said)
        finally:
            for process, _ in processes:
                assert process.stdin is not None
                process.stdin.close()  # a helper ends when this pipe does, however this process ends
            for process, _ in processes:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
