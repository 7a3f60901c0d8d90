"""Which sites have which role, which rows train, are held out and are measured, and how much work a run may do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedshift.data.domain import DataSet, Domain, Rows
from fedshift.data.splits import part_rows
from fedshift.errors import UserError, nearest
from fedshift.evaluation.summary import AVERAGE
from fedshift.experiment.schema import Experiment, LeaveOneOut
from fedshift.federation.local import SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method

POOL = "pool"
"""Name of the one site that holds all sources for a pooled baseline."""


@dataclass(frozen=True)
class Part:
    """One run of an experiment: a method, the domain that is unseen, a seed."""

    method: Method
    target: str
    seed: int


@dataclass(frozen=True)
class Split:
    """Rows of one (target, seed).

    train: of each source. held_out: of each source, may be empty. measured: of the target.
    """

    train: Mapping[str, Rows]
    held_out: Mapping[str, Rows]
    measured: Mapping[str, Rows]


def targets_of(protocol: LeaveOneOut, data: DataSet) -> tuple[str, ...]:
    """The domains that take their turn as the target.

    Raises UserError for one that does not exist or stands twice, for a lone domain, and for one whose name cannot be
    that of a folder.
    """
    if len(data.domains) < 2:
        raise UserError(f"data: leave_one_out needs at least 2 domains, there is only '{next(iter(data.domains))}'")
    for name in data.domains:
        if not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable():
            raise UserError(
                f"data: site '{name}' names a folder: no '/', no '\\' and no '.' at its beginning; rename it"
            )
        if name == AVERAGE:
            raise UserError(f"data: a site cannot be called '{AVERAGE}', which is a column of the table; rename it")
    if protocol.targets == "all":
        return tuple(data.domains)
    for target in protocol.targets:
        if target not in data.domains:
            raise UserError(f"protocol.targets: no domain is called '{target}'; {nearest(target, data.domains)}")
        if protocol.targets.count(target) > 1:
            raise UserError(f"protocol.targets: '{target}' stands twice")
    if not protocol.targets:
        raise UserError("protocol.targets: name at least one domain, or write all")
    return protocol.targets


def parts_of(experiment: Experiment, data: DataSet) -> list[Part]:
    """Every run of the experiment, seed by seed so that early results cover all targets and methods."""
    return [
        Part(method, target, seed)
        for seed in experiment.protocol.seeds
        for target in targets_of(experiment.protocol, data)
        for method in experiment.methods
    ]


def split_of(protocol: LeaveOneOut, data: DataSet, target: str, seed: int) -> Split:
    """The rows of one (target, seed); the same for every method.

    Raises UserError when a careful split is asked for with nothing held out, a source would have nothing to train on,
    or nothing of the target would be measured.
    """
    rows = {name: _domain_rows(protocol, domain, seed) for name, domain in data.domains.items()}
    domain = data.domains[target]
    measured: Rows = np.arange(len(domain), dtype=np.int64)
    if domain.groups is not None and protocol.base_images == "disjoint":
        if protocol.test_fraction == 0:
            raise UserError(
                "protocol.test_fraction: 0 leaves no base sample to test the target on; choose a fraction, or write "
                "base_images: shared to test on base samples that the sources trained on"
            )
        measured = rows[target][1]
        if len(measured) == 0:
            raise UserError(
                f"protocol: no base sample of '{target}' is held out to test on; raise protocol.test_fraction or write "
                "base_images: shared"
            )
    train = {name: pair[0] for name, pair in rows.items() if name != target}
    for name, chosen in train.items():
        if len(chosen) == 0:
            raise UserError(f"protocol: site '{name}' has no training samples left; lower protocol.test_fraction")
    return Split(train, {name: pair[1] for name, pair in rows.items() if name != target}, {target: measured})


def _domain_rows(protocol: LeaveOneOut, domain: Domain, seed: int) -> tuple[Rows, Rows]:
    official = domain.train_rows is not None and domain.test_rows is not None
    kind = protocol.split if protocol.split != "auto" else ("official" if official else "random")
    return part_rows(domain, protocol.test_fraction, seed, kind)


def batches_per_epoch(samples: int, batch_size: int) -> int:
    """Mini-batches of one pass; a last batch of one sample is joined to the one before it."""
    full, rest = divmod(samples, batch_size)
    return max(1, full + (rest > 1))


def budgets(method: Method, methods: Sequence[Method], training: Training, split: Split) -> dict[str, int]:
    """Mini-batches that each source may train on in a run of ``method``.

    The sources together get what the most demanding of ``methods`` needs (or `mini_batches` times their number), the
    same for every method. They share it as the method itself spends it, so all of them are done in the same round: a
    site that is done early would go on voting with a model it did not train. Methods that count in epochs all share it
    alike.
    """

    def needs(candidate: Method) -> dict[str, int]:
        return {
            site: candidate.mini_batches(batches_per_epoch(len(rows), training.batch_size), training.rounds)
            for site, rows in split.train.items()
        }

    fixed = training.mini_batches
    total = fixed * len(split.train) if fixed else max(sum(needs(candidate).values()) for candidate in methods)
    own = needs(method)
    whole = sum(own.values())
    if whole == 0:  # a method that announces no training
        return dict.fromkeys(own, -(-total // len(own)))
    return {site: -(-need * total // whole) for site, need in own.items()}


def rounds_needed(method: Method, training: Training, split: Split, budget: Mapping[str, int]) -> int:
    """Rounds until every source has used its budget: ``training.rounds``, or more for a method that needs less in each.

    0 when the budget is used up before the first round.
    """
    if method.pooled:
        total = sum(budget.values())
        return math.ceil(total / math.ceil(total / training.rounds))
    rounds = 0
    for site, rows in split.train.items():
        per_epoch = batches_per_epoch(len(rows), training.batch_size)
        per_round = method.mini_batches(per_epoch, 2) - method.mini_batches(per_epoch, 1)
        before = method.mini_batches(per_epoch, 1) - per_round
        if per_round <= 0:  # a method that trains nothing in its rounds has those of the experiment
            return training.rounds
        rounds = max(rounds, math.ceil((budget[site] - before) / per_round))
    return rounds


def site_plans(method: Method, data: DataSet, split: Split) -> list[SitePlan]:
    """The sites a method talks to: one per source, or one pool of all sources. The unseen target is not among them."""
    parts = [
        (data.domains[name], rows, number)
        for number, (name, rows) in enumerate((name, split.train[name]) for name in data.domains if name in split.train)
    ]
    if method.pooled:
        return [SitePlan(POOL, "source", parts)]
    return [SitePlan(domain.name, "source", [(domain, rows, number)]) for domain, rows, number in parts]


def site_budget(method: Method, budget: Mapping[str, int]) -> dict[str, int]:
    """The budget by site as the method sees it: the pool may do the work of all sources together."""
    return {POOL: sum(budget.values())} if method.pooled else dict(budget)
