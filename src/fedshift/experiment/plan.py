"""The plan: an experiment's runs, with the rows, sites, budget and rounds of each.

Running, checking and deploying an experiment use the same `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedshift.data.domain import DataSet, SparseRows
from fedshift.data.site_data import batches_per_epoch
from fedshift.data.site_differences import site_differences
from fedshift.experiment.config.experiment import Experiment, data_record, method_record
from fedshift.experiment.config.sections import EXTENT, FlareEngine, LeaveOneOut
from fedshift.experiment.environment import data_fingerprint, versions
from fedshift.experiment.features import built
from fedshift.experiment.protocol import Split, roles_of, shortest_epochs, split_of, targets_of, with_wrong_labels
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, Trained, per_round
from fedshift.models import registry as models
from fedshift.models.network import Network

POOL = "pool"
"""Name of the single site that holds the samples of all sources for a pooled method."""


@dataclass(frozen=True)
class Run:
    """One run of an experiment: a method, a target (a domain, or the name of a pair) and a seed."""

    method: Method
    target: str
    seed: int


class Plan:
    """All runs of an experiment, and what they share.

    The split of a target and a seed is computed once, for all methods. The data are kept in memory in the encoding of
    one target at a time. A deployment's plan uses what the sites report in place of what is computed here from data.
    """

    def __init__(self, experiment: Experiment, data: DataSet) -> None:
        """``data`` holds the domains that take part."""
        self.experiment = experiment
        self.data = data
        self._roles: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._splits: dict[tuple[str, int], Split] = {}
        self._encoded: dict[str, DataSet] = {}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The targets, in order.

        Raises:
            UserError: as in `protocol.targets_of`.
        """
        return targets_of(self.experiment.protocol, self.data)

    @cached_property
    def runs(self) -> tuple[PlannedRun, ...]:
        """All runs, in order. The seed is the outer loop, so that early results cover all targets and methods."""
        return tuple(
            PlannedRun(self, Run(method, target, seed))
            for seed in self.experiment.protocol.seeds
            for target in self.targets
            for method in self.experiment.methods
        )

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the data."""
        return data_fingerprint(self.data)

    @cached_property
    def site_differences(self) -> tuple[str, ...]:
        """Warnings about what only shows when sites are compared."""
        return site_differences(self.data)

    def roles(self, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The sources and the targets of the runs with this target."""
        if target not in self._roles:
            self._roles[target] = roles_of(self.experiment.protocol, self.data, target)
        return self._roles[target]

    def split(self, target: str, seed: int) -> Split:
        """The rows of the runs with this target and seed.

        Raises:
            UserError: as in `protocol.split_of`.
        """
        if (target, seed) not in self._splits:
            self._splits[target, seed] = self._split(target, seed)
        return self._splits[target, seed]

    def data_for(self, target: str) -> DataSet:
        """The data in the encoding of this target: sites that are unseen or not in the pair do not influence it."""
        if target not in self._encoded:
            self._encoded.clear()  # first, so that two encodings need not fit in memory together
            self._encoded[target] = self._data_for(target)
        return self._encoded[target]

    def warnings(self) -> Iterator[str]:
        """The methods' warnings about sources whose epochs have few mini-batches."""
        steps = shortest_epochs(self.experiment.training, (planned.split for planned in self.runs))
        for method in self.experiment.methods:
            yield from method.check_steps(steps)

    def _split(self, target: str, seed: int) -> Split:
        return split_of(self.experiment.protocol, self.data, target, seed)

    def _data_for(self, target: str) -> DataSet:
        """As `data_for`. A target that trains without labels influences the encoding as the sources do."""
        sources, targets = self.roles(target)
        protocol = self.experiment.protocol
        unseen = isinstance(protocol, LeaveOneOut)
        source = self.experiment.data
        for name in (*self.data.domains, *(protocol.drop if isinstance(protocol, LeaveOneOut) else ())):
            if name not in sources and (unseen or name not in targets):
                source = source.without(name)
        return self.data if source == self.experiment.data else built(self.experiment, source)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan, with all that is known about it before it trains."""

    plan: Plan
    run: Run

    @property
    def experiment(self) -> Experiment:
        """The run's experiment."""
        return self.plan.experiment

    @property
    def split(self) -> Split:
        """The rows of the run."""
        return self.plan.split(self.run.target, self.run.seed)

    @property
    def data(self) -> DataSet:
        """The data in the run's encoding, with true labels. Models are measured on these."""
        return self.plan.data_for(self.run.target)

    @property
    def shown_data(self) -> DataSet:
        """The data that the sites train on: those of `data`, but with wrong labels at malicious sources."""
        return with_wrong_labels(self.experiment.protocol, self.data, self.split, self.run.seed)

    def sites(self, data: DataSet) -> list[SitePlan]:
        """The sites of the run, with their rows of ``data`` and the kinds that each refuses."""
        refused = self.experiment.engine.refuse_at
        plans = site_plans(self.run.method, data, self.split)
        return [replace(plan, refuse=frozenset(refused.get(plan.name, ()))) for plan in plans]

    @cached_property
    def budget(self) -> dict[str, int]:
        """Mini-batches that each site may train on."""
        return budgets(self.run.method, self.experiment.methods, self.experiment.training, self.split)

    @cached_property
    def rounds(self) -> int:
        """Rounds until the budget is used; 0 if it is used before the first round."""
        return rounds_needed(self.run.method, self.experiment.training, self.split, self.budget)

    @property
    def mini_batches(self) -> int:
        """Mini-batches per source, the mean over the sources."""
        return round(sum(self.budget.values()) / len(self.split.train))

    def setting(self, device: str) -> Setting:
        """What all sites of the run share. They train on ``device``."""
        experiment, data = self.experiment, self.data
        return Setting(
            method=self.run.method,
            training=experiment.training,
            network=experiment.model,
            preprocessing=data.preprocessing,
            input_shape=data.input_shape,
            classes=len(data.classes),
            sources=len(self.split.train),
            seed=self.run.seed,
            device=device,
            refuse=frozenset(experiment.engine.refuse),
            on_refusal=experiment.engine.on_refusal,
        )

    @property
    def pooled_bytes(self) -> dict[str, int]:
        """Bytes of the samples that leave each site before the method trains; empty unless it is pooled."""
        return pooled_bytes(self.run.method, self.data, self.split)

    def network(self) -> Network:
        """A network like that of the run's sites. Its weights are arbitrary."""
        data, sources = self.data, self.plan.roles(self.run.target)[0]
        plain = models.build(self.experiment.model, data.input_shape, len(data.classes), 0)
        return self.run.method.adapt_network(plain, len(sources))

    @property
    def folder(self) -> Path:
        """The run's folder, relative to the experiment's."""
        return Path(self.run.method.display, self.run.target, f"seed-{self.run.seed}")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the run, and others that are recorded with them."""
        experiment, settings = self.experiment, common_settings(self.experiment, self.run.method)
        identity = {
            **settings,
            "data": {**settings["data"], "fingerprint": self.plan.fingerprint},
            "target": self.run.target,
            "seed": self.run.seed,
            "training": {**settings["training"], "mini_batches": self.budget},
            "engine": experiment.dump()["engine"],
            "device": experiment.device,
            "versions": versions(),
        }
        return identity | {"wire": experiment.engine.wire} if isinstance(experiment.engine, FlareEngine) else identity


def common_settings(experiment: Experiment, method: Method) -> dict[str, Any]:
    """The settings that all runs of a method share. They depend on the experiment file only."""
    whole = experiment.dump()
    return {
        "name": experiment.name,
        "data": data_record(experiment.data),
        "protocol": {key: value for key, value in whole["protocol"].items() if key not in EXTENT},
        "model": experiment.model.record(),
        "training": whole["training"],
        "method": method_record(method),
    }


def budgets(method: Method, methods: Sequence[Method], training: Training, split: Split) -> dict[str, int]:
    """Mini-batches that each site may train on in a run of ``method``.

    The total over all sites is what the most demanding of ``methods`` needs, or `training.mini_batches` times the
    number of sources. So it is the same for every method. It is divided in the proportions in which the method uses it,
    so that all sites finish in the same round. A site that finished early would keep sending a model that it no longer
    trains. Mini-batches at an unlabelled target count like any other.

    Args:
        method: the method of the run.
        methods: all methods of the experiment.
        training: the experiment's training section.
        split: the rows of the run.
    """

    def needs(candidate: Method, exchanges: int) -> dict[str, int]:
        return {
            site: _work(trained, len(rows), training, exchanges)
            for trained, chosen in zip(candidate.work, (split.train, split.unlabelled), strict=True)
            for site, rows in chosen.items()
        }

    fixed = training.mini_batches
    # More exchanges are no more work: an epoch counts as a whole here, whatever part of it a round trains on.
    total = fixed * len(split.train) if fixed else max(sum(needs(candidate, 1).values()) for candidate in methods)
    own = needs(method, method.exchanges_per_epoch)
    whole = sum(own.values())
    if whole == 0:  # the method needs no training
        return dict.fromkeys(own, -(-total // len(own)))
    return {site: -(-need * total // whole) for site, need in own.items()}


def rounds_needed(method: Method, training: Training, split: Split, budget: Mapping[str, int]) -> int:
    """Rounds until every site has used its budget: ``training.rounds``, or more if the method uses less per round.

    It is 0 if the budget is used before the first round.
    """
    if method.pooled or method.supervised_target:
        total = sum(budget.values())
        return math.ceil(total / math.ceil(total / training.rounds))
    needed: list[int] = []
    for trained, chosen in zip(method.work, (split.train, split.unlabelled), strict=True):
        for site, rows in chosen.items():
            before, each = _rounds_work(trained, len(rows), training, method.exchanges_per_epoch)
            if each > 0:
                needed.append(math.ceil((budget[site] - before) / each))
    # A method that trains nothing in its rounds runs training.rounds of them.
    return max(0, *needed) if needed else training.rounds


def _work(trained: Trained, samples: int, training: Training, exchanges: int) -> int:
    """Mini-batches of a site in all rounds, and before the first; in the rounds an epoch has so many ``exchanges``."""
    if exchanges == 1:
        return trained(batches_per_epoch(samples, training.batch_size), training.rounds)
    before, each = _rounds_work(trained, samples, training, exchanges)
    return before + exchanges * training.rounds * each


def _rounds_work(trained: Trained, samples: int, training: Training, exchanges: int) -> tuple[int, int]:
    """Mini-batches of a site before the first round, and in each, where an epoch has so many ``exchanges``."""
    epoch = batches_per_epoch(samples, training.batch_size)
    return trained(epoch, 1) - per_round(trained, epoch), per_round(trained, -(-epoch // exchanges))


def site_plans(method: Method, data: DataSet, split: Split) -> list[SitePlan]:
    """The sites of a run: one per source and per target that takes part, or the pool.

    An unseen target is not among them.
    """
    names = [name for name in data.domains if name in split.train]
    parts = [(data.domains[name], split.train[name], number) for number, name in enumerate(names)]
    unlabelled = [
        (data.domains[name], rows, number) for number, (name, rows) in enumerate(split.unlabelled.items(), len(names))
    ]
    if method.supervised_target:
        return [SitePlan(domain.name, "source", [(domain, rows, 0)]) for domain, rows, _ in unlabelled]
    if method.pooled:
        return [SitePlan(POOL, "source", parts, unlabelled if method.needs_target else ())]
    held_out = {
        name: [(data.domains[name], rows, 0)]
        for name, rows in split.held_out.items()
        if method.uses_held_out and len(rows)
    }
    sources = [SitePlan(part[0].name, "source", [part], held_out=held_out.get(part[0].name, ())) for part in parts]
    return sources + [SitePlan(part[0].name, "target", [part]) for part in unlabelled]


def site_budget(budget: Mapping[str, int], plans: Sequence[SitePlan]) -> dict[str, int]:
    """The budget of each site of ``plans``. A single site, such as the pool, has the total."""
    return {plans[0].name: sum(budget.values())} if len(plans) == 1 else dict(budget)


def pooled_bytes(method: Method, data: DataSet, split: Split) -> dict[str, int]:
    """Site → bytes of its training samples and masks, which leave it if ``method`` is pooled; else empty."""
    sizes = {}
    pooled = {**split.train, **(split.unlabelled if method.needs_target else {})} if method.pooled else {}
    for name, rows in pooled.items():
        inputs = data.domains[name].inputs
        item = 4 if isinstance(inputs, SparseRows) else inputs.itemsize
        sizes[name] = len(rows) * math.prod(inputs.shape[1:]) * item
        masks = data.domains[name].masks
        if masks is not None and name in split.train:
            sizes[name] += len(rows) * math.prod(masks.shape[1:])
    return sizes
