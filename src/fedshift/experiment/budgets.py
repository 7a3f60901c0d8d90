"""Equal work: how many mini-batches each site trains on in a run, and the rounds that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fedshift.data.site_data import batches_per_epoch
from fedshift.errors import UserError
from fedshift.experiment.protocols.base import Split
from fedshift.federation.site_runner import SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, Trained, per_round, work_of
from fedshift.methods.pooled.equal_steps import steps_of_run

_MANY = 10**6
"""Mini-batches of a long run, whose steps say how many one step takes."""


def budgets(method: Method, methods: Sequence[Method], training: Training, split: Split) -> dict[str, int]:
    """Mini-batches that each site may train on in a run of ``method``.

    The total over all sites is what the most demanding of ``methods`` needs, or `training.mini_batches` times the
    number of sources. So it is the same for every method. It is divided so that all sites
    finish in the same round: a site that finished early would keep sending a model that it no longer trains.
    Mini-batches at an unlabelled target count like any other. With `training.steps` it is what so many steps take, of
    each site or of the pooled model. A method that trains otherwise has the budget of an
    experiment in which all do.
    """

    def needs(candidate: Method, exchanges: int) -> dict[str, int]:
        return {
            site: _work(trained, len(rows), training, exchanges)
            for trained, chosen in zip(work_of(candidate), (split.train, split.unlabelled), strict=True)
            for site, rows in chosen.items()
        }

    if training.steps is not None:
        return _budgets_of_steps(method, training, split, needs(method, method.exchanges_per_epoch))
    fixed = training.mini_batches
    # More exchanges are no more work: an epoch counts as a whole here, whatever part of it a round trains on.
    total = fixed * len(split.train) if fixed else max(sum(needs(candidate, 1).values()) for candidate in methods)
    work = needs(method, method.exchanges_per_epoch)
    whole = sum(work.values())
    if whole == 0:  # the method needs no training; with a budget of 0 a run would end before its first round
        return dict.fromkeys(work, max(1, -(-total // len(work))))
    return {site: -(-need * total // whole) for site, need in work.items()}


def _budgets_of_steps(method: Method, training: Training, split: Split, needs: Mapping[str, int]) -> dict[str, int]:
    steps = training.steps
    assert steps is not None
    if not (method.traits.pooled or method.traits.target == "labelled"):
        total = steps * len(split.train)
        whole = sum(needs.values())
        return {site: -(-need * total // whole) if whole else steps for site, need in needs.items()}
    taken = steps_of_run(method, dict.fromkeys(needs, _MANY))
    batches_of_a_step = 1.0 if taken is None else len(needs) * _MANY / taken
    total, done, budget = math.ceil(steps * batches_of_a_step - 1e-6), 0, {}
    for number, site in enumerate(needs, 1):  # the pool has their sum, so that no share is rounded up
        budget[site] = number * total // len(needs) - done
        done += budget[site]
    return budget


def rounds_needed(
    method: Method, training: Training, split: Split, budget: Mapping[str, int], *, whole: bool = False
) -> int:
    """Rounds until every site has used its budget: ``training.rounds``, or more if the method uses less per round.

    It is 0 if the budget is used before the first round.

    Args:
        budget: of `budgets`.
        whole: only those rounds for which every site has enough left, as sums need: in the last round, of which each
            site trains on what is left, some would do a larger part than others.

    Raises:
        UserError: the backbone would be frozen in all of them, or the method does not go with a frozen one; or the
            budget is less than a whole round.
    """
    rounds = _rounds(method, training, split, budget, whole)
    if rounds is None:
        raise UserError(
            "training.mini_batches: with aggregation: secure sites train in whole rounds, and this is less than one "
            f"of {method.display}: raise it"
        )
    if training.thaw_after and not method.traits.thaws:
        raise UserError(
            f"training.thaw_after: {method.display} needs gradients of the features in every round: leave it out, or "
            "choose another method, such as deepall"
        )
    if training.thaw_after and training.thaw_after >= rounds:
        raise UserError(
            f"training.thaw_after: {method.display} has {rounds} rounds, and the backbone would be frozen in all: "
            "lower it, or choose model.trained_from"
        )
    return rounds


def _rounds(method: Method, training: Training, split: Split, budget: Mapping[str, int], whole: bool) -> int | None:
    """As `rounds_needed`; None if the budget is less than what comes before the rounds, or than a whole round."""
    if method.traits.pooled or method.traits.target == "labelled":
        total = sum(budget.values())
        return math.ceil(total / math.ceil(total / training.rounds))
    needed: list[float] = []
    for trained, chosen in zip(work_of(method), (split.train, split.unlabelled), strict=True):
        for site, rows in chosen.items():
            before, each = _rounds_work(trained, len(rows), training, method.exchanges_per_epoch)
            if each > 0:
                needed.append((budget[site] - before) / each)
    if not needed:  # a method that trains nothing in its rounds runs training.rounds of them
        return training.rounds
    most, least = math.ceil(max(needed)), math.floor(min(needed))
    if not whole:
        return max(0, most)
    return None if least < min(1, max(0, most)) else least


def trained_by_all(
    method: Method, training: Training, split: Split, budget: Mapping[str, int], drawn: int | None
) -> int:
    """Mini-batches that all sites together train on in a run, if so many sources are drawn for each round."""
    whole = sum(budget.values())
    if drawn is None:
        return whole
    before = {site: _rounds_work(method.mini_batches, len(rows), training, 1)[0] for site, rows in split.train.items()}
    in_rounds = sum(max(0, budget[site] - steps) for site, steps in before.items())
    return whole - round(in_rounds * (1 - drawn / len(before)))


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


def site_budget(budget: Mapping[str, int], plans: Sequence[SitePlan]) -> dict[str, int]:
    """The budget of each site of ``plans``. A single site, such as the pool, has the total."""
    return {plans[0].name: sum(budget.values())} if len(plans) == 1 else dict(budget)


def shortest_epochs(training: Training, splits: Iterable[Split]) -> dict[str, int]:
    """Source → mini-batches of an epoch, in the split in which it has the fewest."""
    fewest: dict[str, int] = {}
    for split in splits:
        for site, rows in split.train.items():
            steps = batches_per_epoch(len(rows), training.batch_size)
            fewest[site] = min(steps, fewest.get(site, steps))
    return fewest
