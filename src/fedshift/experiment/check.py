"""What is known about an experiment before it trains (``fedshift check``)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.data.checks import absent_classes
from fedshift.data.codings import missing_cells
from fedshift.data.domain import DataSet, Preprocessing
from fedshift.data.site_data import SiteData, batches_per_epoch
from fedshift.data.tasks.objective import objective_of
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.stored import run_folders
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment, method_record
from fedshift.experiment.costs import DryRun, Spent, dry_run_of, spent_by_experiment, traffic, trained_of
from fedshift.experiment.environment import threads_set
from fedshift.experiment.export import export
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun, model_metadata
from fedshift.experiment.predict import from_weights, load_model
from fedshift.experiment.protocols.base import Split
from fedshift.experiment.runs.evaluator import Evaluator
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.run_folder import MODEL, model_file, run_folder
from fedshift.experiment.trial import try_method
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.messages import promised_kinds
from fedshift.federation.site import Site
from fedshift.federation.site_base import Batch, Envelope
from fedshift.federation.site_memory import SiteMemory
from fedshift.federation.training import Training
from fedshift.methods import registry as method_registry
from fedshift.methods.base import Method, Traffic, calls_of, cost_of, in_order, reads_of
from fedshift.methods.pooled.equal_steps import steps_of_run
from fedshift.models import registry as models
from fedshift.models.network import Network, freeze_backbone
from fedshift.models.own.forward_trial import SAMPLES, told_of
from fedshift.models.payload import payload
from fedshift.weights import Weights

_SMALL = 5_000_000
"""Parameters of a network whose export as ONNX is tried: that of larger ones takes long."""


def try_loading(planned: PlannedRun) -> tuple[str, ...]:
    """Write a run's model with arbitrary weights, load it, predict with it, and export it. Nothing is kept.

    Args:
        planned: a run whose network does not come with fedshift.

    Returns:
        A warning for each format in which the model cannot be exported.

    Raises:
        UserError: the model could not be loaded, or would predict something else.
    """
    options, data, method = planned.experiment.model, planned.data, planned.run.method
    what = f"model '{options.display}'"
    network = models.build(options, data.input_shape, len(data.classes), 0)
    sources = len(planned.plan.roles(planned.run.target)[0])
    evaluated = method.evaluated_network(method.adapt_network(network, sources), sources)
    weights, metadata = Weights(evaluated.state_dict()), model_metadata(planned)
    with tempfile.TemporaryDirectory() as folder, told_of(options, "predicting with it after training"):
        file = Path(folder, MODEL)
        file.write_bytes(model_file(weights, metadata))
        try:
            loaded = load_model(file, method, options.code)
        except UserError as error:
            reason = str(error).replace(str(file), "its file")
            raise UserError(f"{what} trains, but could not be loaded afterwards: {reason}") from error
        here = from_weights(weights, metadata, method, options)
        domain = next(iter(data.domains.values()))
        view = SiteData([(domain, np.arange(min(SAMPLES, len(domain))), 0)], data.preprocessing)
        with torch.no_grad():
            inputs, *_ = next(view.all_batches(SAMPLES))
            expected, gave = here.network(inputs), loaded.network(inputs)
        if not torch.allclose(expected, gave, rtol=0, atol=0, equal_nan=True):
            raise UserError(
                f"{what} trains, but predicts something else once it is loaded: what it computes depends on more than "
                "its parameters and buffers; register the rest with register_buffer"
            )
        warnings = []
        for to in _formats(network):
            try:
                export(loaded, to, Path(folder))
            except FedshiftError as error:
                warnings.append(f"{what} trains and predicts, but fedshift export --to {to} will fail: {error}")
        return tuple(warnings)


def _formats(network: nn.Module) -> tuple[str, ...]:
    """The formats in which an export is quickly tried."""
    installed = all(importlib.util.find_spec(package) for package in ("onnx", "onnxruntime", "onnxscript"))
    small = sum(parameter.numel() for parameter in network.parameters()) <= _SMALL
    return ("torchscript", "onnx") if installed and small else ("torchscript",)


_TIMED_BATCHES = 8
_MEASURED, _MEASURED_SITES = 64, 4
"""Samples of each of so many domains that are measured to take the time."""


@dataclass(frozen=True)
class DomainCheck:
    """Numbers of samples of one domain in the first split."""

    name: str  # the domain
    samples: int  # all
    train: int  # those it trains on as a source
    held_out: int  # those held out as a source
    measured_as_target: int  # those it is measured on as a target
    missing: tuple[str, ...]  # classes without a sample
    fixed_split: bool = False  # whether the data fix its test samples
    without_label: int = 0


@dataclass(frozen=True)
class MethodCheck:
    """What one method will need."""

    label: str  # the method's label in the experiment
    runs: int  # number of its runs (targets × seeds)
    rounds: int  # rounds of its longest run
    mini_batches_per_site: int  # mean over the sources, in its longest run
    mini_batches_per_round: float  # mean over the sources, in one round of that run
    hours: float  # time of all its runs for training and measuring; starting and saving are not included
    bytes_up: int | None  # bytes that leave the sites in all its runs; None where they are not known
    bytes_down: int | None  # bytes that reach the sites in all its runs; None where they are not known
    shares: tuple[str, ...]  # kinds of content that leave a site
    reads: str  # what the server reads of the sites' models: sums, norms or models; with sealed ones in words
    steps: float | None = None  # of the optimiser of a pooled method, in its longest run; None for others


@dataclass(frozen=True)
class Check:
    """The result of `check`.

    ``learned`` is the task in words, ``payload`` the bytes of one model, ``found`` what is known of its parts,
    ``privacy`` what private sites pay, ``missing`` the missing cells of a table before they are filled (column → site →
    its missing cells and its rows), and ``progress`` what of the experiment ran already. ``words`` is all of it as the
    command line prints it, if it was asked for from Python.
    """

    data: str
    learned: str
    fingerprint: str
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    domains: tuple[DomainCheck, ...]
    model: str
    model_notes: tuple[str, ...]
    parameters: int
    payload: int
    device: str
    threads: int
    methods: tuple[MethodCheck, ...]
    warnings: tuple[str, ...]
    encoding_shares: tuple[str, ...]
    privacy: Mapping[str, Spent]
    missing: Mapping[str, Mapping[str, tuple[int, int]]]
    progress: Progress
    words: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.words or repr(self)


@dataclass(frozen=True)
class Progress:
    """What of an experiment ran already."""

    finished: int  # number of its runs that have a result
    planned: int  # number of its runs
    others: int = 0  # number of runs in the same folder that are none of its own, such as those of other seeds
    refused: str | None = None  # why a run in the folder is not the planned one; None if all are


def progress_of(plan: Plan, folder: Path) -> Progress:
    """What of a plan ran already in the experiment's ``folder``.

    A run of other data or settings is not finished.
    """
    planned = {folder.absolute() / run.folder: run for run in plan.runs}
    there = run_folders(folder)
    finished, refused = 0, None
    for path in there:
        if path in planned:
            try:
                run_record = run_folder(planned[path], folder)
                run_record.check_identity()
                finished += run_record.result() is not None
            except UserError as error:
                refused = refused or str(error)
    return Progress(finished, len(planned), sum(path not in planned for path in there), refused)


def check(experiment: Experiment, runs: Path | None = None) -> Check:
    """Read the data, build the network, check that every method fits, and time a few mini-batches. Nothing is saved.

    ``runs``: the folder that holds the experiment's folder, to say what ran already; None: nothing did. UserError if
    something would stop the experiment later.
    """
    plan = Plan(experiment, experiment.protocol.taking_part(build_data(experiment)))
    data = plan.data
    device, threads = resolve_device(experiment.device), experiment.engine.thread_count()
    warnings = list(check_fit(plan))
    if experiment.model.code is not None:
        warnings += try_loading(plan.runs[0])
    with told_of(experiment.model, "training with it"):
        needs = _needs(plan, _Clock(experiment, data, device, threads), warnings)
    plain = payload(experiment.training.network(experiment.model, data.input_shape, len(data.classes), 0))
    return Check(
        data=data.name,
        learned=_task_in_words(data),
        fingerprint=plan.fingerprint,
        classes=data.classes,
        input_shape=data.input_shape,
        domains=tuple(_domain(plan, name) for name in data.domains),
        model=experiment.model.display,
        model_notes=experiment.model.report(data.input_shape, len(data.classes)),
        parameters=plain.parameters,
        payload=plain.bytes,
        device=device,
        threads=threads,
        methods=tuple(
            _method(method, needs[method.display], experiment.engine.routing == "sealed")
            for method in experiment.methods
        ),
        warnings=(*data.warnings, *plan.site_differences, *warnings),
        encoding_shares=experiment.data.shares,
        privacy=spent_by_experiment(plan),
        missing=missing_cells(data.columns),
        progress=Progress(0, len(plan.runs)) if runs is None else progress_of(plan, runs / experiment.name),
    )


@dataclass(frozen=True)
class NoiseCost:
    """Accuracy in percent of one method at one target: with the experiment's noise, and without it."""

    method: str
    target: str
    private: float
    plain: float


def noise_costs(experiment: Experiment) -> list[NoiseCost]:
    """Train with the first seed, with ``training.privacy`` and without, and keep only the accuracies.

    Use public or made-up data: each training looks at them, and this cost in ε is not counted.

    UserError if the experiment is not private, or cannot run.
    """
    if experiment.training.privacy is None:
        raise UserError("training.privacy: write it, or there is no noise whose cost could be measured")
    seeds = {"seeds": experiment.protocol.seeds[:1]}
    experiment = experiment.model_copy(update={"protocol": experiment.protocol.model_copy(update=seeds)})
    plain = experiment.training.model_copy(update={"privacy": None})
    values: list[dict[tuple[str, str], float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, item in enumerate((experiment, experiment.model_copy(update={"training": plain}))):
            path = run_experiment(item, Path(folder, str(number)))
            results = [RunResult.model_validate_json(file.read_bytes()) for file in path.rglob("result.json")]
            values.append({(result.method, result.target): result.accuracy() or 0.0 for result in results})
    return [NoiseCost(*run, accuracy, values[1][run]) for run, accuracy in values[0].items()]


@dataclass(frozen=True)
class _Need:
    """What one run needs."""

    rounds: int
    mini_batches: int
    per_round: float
    seconds: float
    traffic: Traffic | None
    steps: float | None


@dataclass(frozen=True)
class MeasuringTime:
    """Seconds to measure a model: of each site and of each of its samples, and those that only the last model takes."""

    site: float
    sample: float
    last_site: float
    last_sample: float


@dataclass(frozen=True)
class _Clock:
    """Seconds of a mini-batch, timed once for each way of training."""

    experiment: Experiment
    data: DataSet
    device: str
    threads: int
    timed: dict[tuple[int, str, bool], float] = field(default_factory=dict)
    measured: dict[bool, MeasuringTime] = field(default_factory=dict)

    def seconds(self, training: Training, *, frozen: bool) -> float:
        """Of one mini-batch; ``frozen``: while the backbone is."""
        kind = training.batch_size, training.optimizer, frozen
        if kind not in self.timed:
            experiment = self.experiment.model_copy(update={"training": training})
            with threads_set(self.threads):
                self.timed[kind] = _seconds_per_batch(experiment, self.data, self.device, frozen=frozen)
        return self.timed[kind]

    def measuring(self, personal: bool) -> MeasuringTime:
        """Seconds to measure a model; ``personal``: each site predicts with one of its own."""
        if personal not in self.measured:
            with threads_set(self.threads):
                self.measured[personal] = _seconds_to_measure(
                    self.experiment, self.data, self.device, personal=personal
                )
        return self.measured[personal]


def _needs(plan: Plan, clock: _Clock, warnings: list[str]) -> dict[str, list[_Need]]:
    """What every run needs, by method. Adds to ``warnings``."""
    needs: dict[str, list[_Need]] = {method.display: [] for method in plan.experiment.methods}
    dry: dict[object, DryRun | None] = {}
    refusing = bool(plan.experiment.engine.refuse_at)
    # The target is the outer loop, so that one encoding of the data and one network are in memory at a time.
    for target, method in itertools.product(plan.targets, plan.experiment.methods):
        runs = [planned for planned in plan.runs if planned.run.target == target and planned.run.method is method]
        network = runs[0].network()
        # Bytes depend on how many sites there are, not on which, unless single sites refuse something.
        sites = target if refusing else tuple(map(len, plan.roles(target)))
        kind = method.display, sites, runs[0].data.input_shape
        if kind not in dry:
            if method_record(method)["name"] not in method_registry.METHODS:
                try_method(runs[0], network)
            dry[kind] = _dry_run(runs[0], network, warnings)
        needs[method.display] += [_need(planned, network, clock, dry[kind]) for planned in runs]
    return needs


def _dry_run(planned: PlannedRun, network: Network, warnings: list[str]) -> DryRun | None:
    """The dry run of a planned run; None, with a warning, if it fails for lack of samples or training."""
    try:
        return dry_run_of(planned, network)
    except UserError:
        raise
    except Exception as error:
        method = planned.run.method.display
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        warning = f"{method}: what it sends is not known, since it fails on two samples and without training ({text})"
        warnings.append(warning)
        return None


def _need(planned: PlannedRun, network: Network, clock: _Clock, dry: DryRun | None) -> _Need:
    method, engine = planned.run.method, planned.experiment.engine
    sites = 1 if method.traits.pooled else len(planned.split.train)
    runs = max(1, engine.parallel_runs)
    speed_up = runs * min(engine.workers, sites)
    cost = cost_of(method, planned.plan.data.input_shape)
    trained = trained_of(planned)
    training = planned.training
    frozen = min(1.0, training.thaw_after / max(1, planned.rounds))
    per_batch = frozen * clock.seconds(training, frozen=True) + (1 - frozen) * clock.seconds(training, frozen=False)
    visits = 0.0 if dry is None or method.traits.pooled else planned.rounds * (planned.drawn or sites) * dry.visit
    saved = 0.0 if dry is None else planned.rounds * sites * dry.save
    seconds = (trained * per_batch * cost + visits) / speed_up + (_measuring(planned, clock) + saved) / runs
    sent = traffic(planned, network, dry) if dry is not None else None
    per_site = round(trained / len(planned.split.train))
    steps = steps_of_run(method, planned.budget)
    return _Need(planned.rounds, per_site, _per_round(planned), seconds, sent, steps)


def _measuring(planned: PlannedRun, clock: _Clock) -> float:
    """Seconds in which a run measures the model, in all its measured rounds."""
    split, method = planned.split, planned.run.method
    personal = method.calls.keep_own_weights or type(method).evaluated_network is not Method.evaluated_network
    time = clock.measuring(personal and planned.experiment.protocol.by_site)
    sizes = [
        len(rows) for part in (split.measured, split.held_out, split.common) for rows in part.values() if len(rows)
    ]
    rounds = 1 + (max(1, planned.rounds) - 1) // planned.training.measure_every
    each = len(sizes) * time.site + sum(sizes) * time.sample
    return rounds * each + len(sizes) * time.last_site + sum(sizes) * time.last_sample


def _per_round(planned: PlannedRun) -> float:
    """Mini-batches of a source in one round, mean over the sources. Training before the first round does not count."""
    method, training = planned.run.method, planned.training
    if method.traits.pooled or method.traits.target == "labelled":
        return planned.mini_batches / max(1, planned.rounds)
    parts = method.exchanges_per_epoch
    epochs = [-(-batches_per_epoch(len(rows), training.batch_size) // parts) for rows in planned.split.train.values()]
    whole = sum(method.mini_batches(epoch, 2) - method.mini_batches(epoch, 1) for epoch in epochs) / len(epochs)
    return whole if planned.drawn is None else whole * planned.drawn / len(epochs)


def _method(method: Method, needs: Sequence[_Need], sealed: bool) -> MethodCheck:
    sent = [need.traffic for need in needs if need.traffic is not None]
    known = len(sent) == len(needs)
    longest = max(needs, key=lambda need: need.rounds)
    return MethodCheck(
        label=method.display,
        runs=len(needs),
        rounds=longest.rounds,
        mini_batches_per_round=longest.per_round,
        mini_batches_per_site=max(need.mini_batches for need in needs),
        hours=sum(need.seconds for need in needs) / 3600,
        bytes_up=sum(item.up for item in sent) if known else None,
        bytes_down=sum(item.down for item in sent) if known else None,
        shares=_leaving(method) if sealed else method.calls.shares,
        reads=method.traits.reads_sealed if sealed else reads_of(method),
        steps=max((need.steps for need in needs if need.steps is not None), default=None),
    )


def _leaving(method: Method) -> tuple[str, ...]:
    """The kinds that leave a site if routed models are sealed. Models that the server reads still leave as weights."""
    inner: Method = getattr(method, "inner", method)
    clear = any(
        kind == "weights" and (call not in inner.traits.routed or field != inner.traits.routed[call].field)
        for call, reply in calls_of(type(inner)).items()
        for field, kind in promised_kinds(reply).items()
    )
    return in_order({"sealed", *(kind for kind in method.calls.shares if clear or kind != "weights")})


def _domain(plan: Plan, name: str) -> DomainCheck:
    protocol, data = plan.experiment.protocol, plan.data
    seed = protocol.seeds[0]
    # A domain that is not a target of the protocol is described as if it were one.
    as_source, as_target = protocol.described_at(data, name, plan.roles)
    given = plan.split(as_source, seed) if as_source is not None else None
    if given and protocol.by_site:
        measured = len(given.measured.get(name, ()))
    else:
        measured = protocol.measured_at(data, as_target, name, seed) if as_target is not None else 0
    return DomainCheck(
        name,
        samples=len(data.domains[name]),
        train=len(given.train[name]) if given else 0,
        held_out=len(given.held_out[name]) + (measured if protocol.by_site else 0) if given else 0,
        measured_as_target=measured,
        missing=() if data.domains[name].unlabelled else absent_classes(data, data.domains[name]),
        without_label=len(data.domains[name]) - len(data.domains[name].known),
        fixed_split=data.domains[name].fixed_split,
    )


def _task_in_words(data: DataSet) -> str:
    """What the data set is for, in words: "3 classes" or "regression of pressure"."""
    if data.preprocessing.objective is None:
        return f"{len(data.classes)} classes"
    return f"{data.task} of {', '.join(data.classes)}"


def _in_any_scale(data: DataSet) -> Preprocessing:
    """How samples are prepared to take the time of a network, which does not depend on the scale of a site."""
    return data.preprocessing.model_copy(update={"standardise": None})


def _seconds_to_measure(experiment: Experiment, data: DataSet, device: str, *, personal: bool) -> MeasuringTime:
    """Seconds of the largest domains, measured on one sample of each and on some: the fastest of three."""
    network = experiment.training.network(experiment.model, data.input_shape, len(data.classes), 0).to(device)
    weights = Weights(network.state_dict()).clone()
    known = {domain.name: domain.known for domain in data.domains.values() if len(domain.known)}
    largest = sorted(known, key=lambda name: len(known[name]))[-_MEASURED_SITES:]
    every, last = [], []
    for number in (1, _MEASURED):
        rows = {name: known[name][:number] for name in largest}
        evaluator = Evaluator(
            replace(data, preprocessing=_in_any_scale(data)),
            Split(rows, {}, rows),
            torch.device(device),
            experiment.model,
            experiment.evaluation.resamples,
            own_weights=(lambda _, common: common.clone()) if personal else None,
        )
        every.append(_fastest(evaluator.measure, network, weights) / len(largest))
        last.append(_fastest(evaluator.final, network, weights) / len(largest))
    further = max(1, min(_MEASURED, len(known[largest[0]])) - 1)
    (site, whole), (last_site, last_whole) = every, last
    sample, last_sample = (max(0.0, whole - site) / further, max(0.0, last_whole - last_site) / further)
    return MeasuringTime(site, sample, max(0.0, last_site - site), max(0.0, last_sample - sample))


def _fastest(call: Callable[..., object], *arguments: object) -> float:
    """Seconds of the fastest of three calls."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _seconds_per_batch(experiment: Experiment, data: DataSet, device: str, *, frozen: bool) -> float:
    """Seconds of one mini-batch: the median over mini-batches of the largest domain, with the task's loss.

    It is 0 for a frozen backbone in an experiment that freezes none.
    """
    if frozen and not experiment.training.thaw_after:
        return 0.0
    domain = max(data.domains.values(), key=len)
    rows = torch.arange(min(len(domain), experiment.training.batch_size * _TIMED_BATCHES)).numpy()
    view = SiteData([(domain, rows, 0)], _in_any_scale(data), experiment.training.augmentation, device)
    training = experiment.training
    network = training.network(experiment.model, data.input_shape, len(data.classes), 0).to(device)
    freeze_backbone(network, frozen)
    network = training.prepare(network).train()
    site = Site(
        name=domain.name,
        role="source",
        classes=len(data.classes),
        domains=1,
        training=training.model_copy(update={"privacy": None, "thaw_after": 0}),
        memory=SiteMemory(()),
        seed=0,
        device=torch.device(device),
        network=network,
        data=view,
        objective=objective_of(data.preprocessing),
    )
    seconds = _steps_of(site, network, 2 * _TIMED_BATCHES)  # the first half warms up
    timed = sorted(seconds[len(seconds) // 2 :])
    return timed[len(timed) // 2]


def _steps_of(site: Site, network: Network, steps: int) -> list[float]:
    """Seconds from the loss of one mini-batch to that of the next, as a site trains."""
    began: list[float] = []

    def loss_of(batch: Batch) -> Tensor:
        if site.device.type == "cuda":
            torch.cuda.synchronize()
        began.append(time.perf_counter())
        return site.objective.loss(network(batch.inputs), batch.targets)

    site.begin(Envelope(exchange=0, round=1, progress=0.0, mini_batches_left=steps + 1))
    with contextlib.suppress(TrainingDiverged):  # the time is the same
        site.minimise(loss_of, network, steps=steps + 1)
    return [after - before for before, after in itertools.pairwise(began)]
