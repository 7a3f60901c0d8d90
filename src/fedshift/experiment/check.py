"""Everything that can be known about an experiment before it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedshift.data.checks import absent_classes
from fedshift.data.domain import DataSet, Rows
from fedshift.data.site_data import SiteData, batches_per_epoch, epoch_batches
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.config.sections import SourceTarget
from fedshift.experiment.environment import data_fingerprint, resolve_device
from fedshift.experiment.features import built
from fedshift.experiment.plan import budgets, rounds_needed
from fedshift.experiment.protocol import roles_of, shortest_epochs, split_of, taking_part, targets_of
from fedshift.experiment.runs.context import data_for
from fedshift.experiment.runs.round_loop import pooled_bytes
from fedshift.functional.losses import task_loss
from fedshift.methods.base import Method, RunPlan
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.payload import payload
from fedshift.models.products import with_products

_TIMED_BATCHES = 8


@dataclass(frozen=True)
class DomainCheck:
    """Sizes of one domain in the first split. ``missing``: names of classes the domain has no sample of."""

    name: str
    samples: int
    train: int
    held_out: int
    measured_as_target: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class MethodCheck:
    """What one method will need. hours (of mini-batches alone) and bytes: of all runs (targets × seeds). rounds
    and mini-batches (the mean over the sources): of one run, the longest where they differ.
    """

    label: str
    runs: int
    rounds: int
    mini_batches_per_site: int
    hours: float
    bytes_up: int
    bytes_down: int
    shares: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """The answer of `check`."""

    data: str
    fingerprint: str
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    domains: tuple[DomainCheck, ...]
    model: str
    parameters: int
    payload: int
    device: str
    threads: int
    methods: tuple[MethodCheck, ...]
    warnings: tuple[str, ...]
    encoding_shares: tuple[str, ...]


def check(experiment: Experiment) -> Check:
    """Read the data, build the network, try every method's fit, time a few mini-batches; train nothing that is kept.

    Raises UserError for whatever would stop the experiment later.
    """
    data = taking_part(experiment.protocol, built(experiment))
    device = resolve_device(experiment.device)
    targets = targets_of(experiment.protocol, data)
    warnings = check_fit(experiment, data)
    encoded = {target: data_for(experiment, data, target) for target in targets}
    splits = {
        (target, seed): split_of(experiment.protocol, encoded[target], target, seed)
        for target in targets
        for seed in experiment.protocol.seeds
    }
    steps = shortest_epochs(experiment.training, splits.values())
    warnings += tuple(said for method in experiment.methods for said in method.check_steps(steps))
    threads = experiment.engine.thread_count()
    per_batch = _seconds_per_batch(experiment, data, device, threads)
    found = []
    for method in experiment.methods:
        networks = {
            target: _network(experiment, method, encoded[target], len(roles_of(experiment.protocol, data, target)[0]))
            for target in targets
        }
        work = up = down = rounds = 0
        seconds = 0.0
        for (target, _), split in splits.items():
            budget = budgets(method, experiment.methods, experiment.training, split)
            needed = rounds_needed(method, experiment.training, split, budget)
            rounds = max(rounds, needed)
            work = max(work, round(sum(budget.values()) / len(split.train)))
            sites = 1 if method.pooled else len(split.train)
            speed_up = experiment.engine.parallel_runs * min(experiment.engine.workers, sites)
            seconds += sum(budget.values()) * per_batch * method.relative_cost / speed_up
            network = networks[target]
            plan = RunPlan.of(
                network,
                input_shape=data.input_shape,
                samples={site: len(rows) for site, rows in split.train.items()},
                targets=len(split.unlabelled),
                rounds=needed,
                trained=_samples(experiment, budget, {**split.train, **split.unlabelled}),
            )
            traffic = method.traffic(plan)
            up, down = up + traffic.up, down + traffic.down
            up += sum(pooled_bytes(method, encoded[target], split).values())
        found.append(MethodCheck(method.display, len(splits), rounds, work, seconds / 3600, up, down, method.shares))
    plain = payload(models.build(experiment.model, data.input_shape, len(data.classes), 0))
    return Check(
        data=data.name,
        fingerprint=data_fingerprint(data),
        classes=data.classes,
        input_shape=data.input_shape,
        domains=tuple(_domain(experiment, data, name) for name in data.domains),
        model=experiment.model.name,
        parameters=plain.parameters,
        payload=plain.bytes,
        device=device,
        threads=threads,
        methods=tuple(found),
        warnings=(*data.warnings, *warnings),
        encoding_shares=experiment.data.shares,
    )


def _network(experiment: Experiment, method: Method, data: DataSet, sources: int) -> Network:
    """The network that sites train under ``method``."""
    return method.adapt_network(models.build(experiment.model, data.input_shape, len(data.classes), 0), sources)


def _samples(experiment: Experiment, budget: Mapping[str, int], rows: Mapping[str, Rows]) -> int:
    """Samples in the mini-batches of ``budget`` at sites that hold ``rows``, all sites together."""
    size = experiment.training.batch_size
    return round(sum(budget[site] * len(own) / batches_per_epoch(len(own), size) for site, own in rows.items()))


def _domain(experiment: Experiment, data: DataSet, name: str) -> DomainCheck:
    protocol, seed = experiment.protocol, experiment.protocol.seeds[0]
    targets = targets_of(protocol, data) if isinstance(protocol, SourceTarget) else tuple(data.domains)
    roles = {target: roles_of(protocol, data, target) for target in targets}
    as_source = next((target for target, (sources, _) in roles.items() if name in sources), None)
    as_target = next((target for target, (_, others) in roles.items() if name in others), None)
    given = split_of(protocol, data, as_source, seed) if as_source is not None else None
    domain = data.domains[name]
    return DomainCheck(
        name,
        len(domain),
        len(given.train[name]) if given else 0,
        len(given.held_out[name]) if given else 0,
        len(split_of(protocol, data, as_target, seed).measured[name]) if as_target is not None else 0,
        absent_classes(data, domain),
    )


def _seconds_per_batch(experiment: Experiment, data: DataSet, device: str, threads: int) -> float:
    """Seconds of one cross-entropy step on real batches of the largest domain."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        domain = max(data.domains.values(), key=len)
        rows = torch.arange(min(len(domain), experiment.training.batch_size * _TIMED_BATCHES)).numpy()
        view = SiteData([(domain, rows, 0)], data.preprocessing, experiment.training.augmentation, device)
        network = models.build(experiment.model, data.input_shape, len(data.classes), 0).to(device).train()
        network = with_products(network, experiment.training.matrix_products)
        optimizer = experiment.training.build_optimizer(network.parameters(), experiment.training.lr)
        draws = torch.Generator().manual_seed(0)
        seconds = []
        for _ in range(2):  # the first pass warms up
            for batch in epoch_batches(view.samples, experiment.training.batch_size, draws):
                began = time.perf_counter()
                inputs, labels, _ = view.batch(batch, draws)
                optimizer.zero_grad(set_to_none=True)
                task_loss(network(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
        timed = sorted(seconds[len(seconds) // 2 :])
        return timed[len(timed) // 2]
    finally:
        torch.set_num_threads(before)
