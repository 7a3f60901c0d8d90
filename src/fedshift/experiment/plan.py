"""What an experiment will run: its runs, and the sites, the budget and the rounds of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.data.domain import DataSet, Rows
from fedshift.data.site_data import batches_per_epoch
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.protocol import Split, targets_of
from fedshift.federation.site_runner import SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method

POOL = "pool"
"""Name of the one site that holds all sources for a pooled baseline."""


@dataclass(frozen=True)
class Run:
    """One run of an experiment: a method, the domain that is the target (or the name of a pair), a seed."""

    method: Method
    target: str
    seed: int


def runs_of(experiment: Experiment, data: DataSet) -> list[Run]:
    """Every run of the experiment, seed by seed so that early results cover all targets and methods."""
    return [
        Run(method, target, seed)
        for seed in experiment.protocol.seeds
        for target in targets_of(experiment.protocol, data)
        for method in experiment.methods
    ]


def budgets(method: Method, methods: Sequence[Method], training: Training, split: Split) -> dict[str, int]:
    """Mini-batches that each site may train on in a run of ``method``.

    All sites together get what the most demanding of ``methods`` needs (or `mini_batches` times their number), the
    same for every method. They share it as the method itself spends it, so all of them are done in the same round: a
    site that is done early would go on voting with a model it did not train. Methods that count in epochs all share it
    alike. What a method trains at an unlabelled target counts like any other mini-batch.
    """

    def needs(candidate: Method) -> dict[str, int]:
        def epoch(rows: Rows) -> int:
            return batches_per_epoch(len(rows), training.batch_size)

        return {site: candidate.mini_batches(epoch(rows), training.rounds) for site, rows in split.train.items()} | {
            site: candidate.target_mini_batches(epoch(rows), training.rounds) for site, rows in split.unlabelled.items()
        }

    fixed = training.mini_batches
    total = fixed * len(split.train) if fixed else max(sum(needs(candidate).values()) for candidate in methods)
    own = needs(method)
    whole = sum(own.values())
    if whole == 0:  # a method that announces no training
        return dict.fromkeys(own, -(-total // len(own)))
    return {site: -(-need * total // whole) for site, need in own.items()}


def rounds_needed(method: Method, training: Training, split: Split, budget: Mapping[str, int]) -> int:
    """Rounds until every site has used its budget: ``training.rounds``, or more for a method that needs less in each.

    0 when the budget is used up before the first round.
    """
    if method.pooled or method.supervised_target:
        total = sum(budget.values())
        return math.ceil(total / math.ceil(total / training.rounds))
    needed: list[int] = []
    for trained, chosen in ((method.mini_batches, split.train), (method.target_mini_batches, split.unlabelled)):
        for site, rows in chosen.items():
            per_epoch = batches_per_epoch(len(rows), training.batch_size)
            per_round = trained(per_epoch, 2) - trained(per_epoch, 1)
            before = trained(per_epoch, 1) - per_round
            if per_round > 0:
                needed.append(math.ceil((budget[site] - before) / per_round))
    # A method that trains nothing in its rounds has those of the experiment.
    return max(0, *needed) if needed else training.rounds


def site_plans(method: Method, data: DataSet, split: Split) -> list[SitePlan]:
    """The sites a method talks to: one per source and per target that takes part, or one pool. An unseen target is not
    among them.
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
    """The budget by site as the method sees it: one site in place of all may do the work of all."""
    return {plans[0].name: sum(budget.values())} if len(plans) == 1 else dict(budget)
