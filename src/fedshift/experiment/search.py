"""A search among the methods of an experiment by successive halving. It never reads the sites that are kept out.

Every source in turn is left out and measured, so that the choice is made as if one of them were the next site. All
methods begin with a part of the budget; the best go on with a larger part, until two or three are left with all of it.

Source: Jamieson & Talwalkar, AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan
from fedshift.experiment.protocols.base import EVERY_SITE
from fedshift.methods.base import Method


@dataclass(frozen=True)
class Rung:
    """One rung of the search."""

    number: int  # counted from 1
    methods: int  # how many take part
    share: float  # of the whole budget


def rungs(methods: int, factor: int) -> tuple[Rung, ...]:
    """The rungs of a search: each has ``factor`` times the budget of the one before, for that part of its methods.

    The last rung has at most ``factor`` methods, besides the first of the list. That one stays to the end, because the
    others are compared with it.

    Args:
        methods: how many there are in the beginning, the first included.
        factor: η, at least 2.

    Example:
        >>> [(rung.methods, round(rung.share, 3)) for rung in rungs(9, 2)]
        [(9, 0.25), (5, 0.5), (3, 1.0)]
    """
    sizes = [methods - 1]
    while sizes[-1] > factor:
        sizes.append(-(-sizes[-1] // factor))
    return tuple(Rung(number, size + 1, float(factor) ** (number - len(sizes))) for number, size in enumerate(sizes, 1))


def kept_out(experiment: Experiment, names: Sequence[str]) -> tuple[str, ...]:
    """The domains that the search never reads: those named, or else the experiment's targets, if it lists them.

    UserError if the experiment cannot be searched.
    """
    protocol = experiment.protocol
    protocol.for_search(names)  # refuses one that leaves no source out
    if len(experiment.methods) < 3:
        raise UserError("methods: a search chooses among at least two methods beside the first, which is the yardstick")
    return tuple(names) or tuple(target for target in protocol.named_targets if target != EVERY_SITE)


def budget_of(experiment: Experiment, out: Sequence[str]) -> int:
    """The whole budget: mini-batches of each site in a run, as the experiment's methods need them."""
    searched = _without(experiment, out)
    plan = Plan(searched, searched.protocol.taking_part(build_data(searched)))
    return max(planned.mini_batches for planned in plan.runs)


def on_rung(
    experiment: Experiment, rung: Rung, methods: Sequence[Method], out: Sequence[str], budget: int
) -> Experiment:
    """The experiment of one rung.

    Args:
        methods: those that take part in it.
        out: the domains that the search never reads.
        budget: mini-batches of each site with all of the budget.
    """
    training = experiment.training
    rounds = max(1, round(rung.share * training.rounds))
    part = training.model_copy(
        update={
            "mini_batches": max(1, round(rung.share * budget)),
            "rounds": rounds,
            "thaw_after": min(rounds - 1, round(rung.share * training.thaw_after)),
        }
    )
    update = {"name": f"{experiment.name}-rung{rung.number}", "training": part, "methods": tuple(methods)}
    return _without(experiment, out).model_copy(update=update)


def rank(methods: Sequence[Method], results: Iterable[RunResult]) -> list[tuple[Method, float | None]]:
    """The methods with their mean over sources and seeds, the best first; those that diverged come last, with None."""
    values: dict[str, list[float]] = {}
    runs: dict[str, int] = {}
    errors = False
    for result in results:
        errors = result.less_is_better
        score = result.score()
        runs[result.method] = runs.get(result.method, 0) + 1
        if score is not None:
            values.setdefault(result.method, []).append(score)
    whole = max(runs.values(), default=0)
    means: Mapping[str, float] = {name: fmean(scores) for name, scores in values.items() if len(scores) == whole}
    listed = [(method, means.get(method.display)) for method in methods]
    sign = -1.0 if errors else 1.0
    return sorted(listed, key=lambda entry: -math.inf if entry[1] is None else sign * entry[1], reverse=True)


def going_on(ranking: Sequence[tuple[Method, float | None]], first: Method, number: int) -> tuple[Method, ...]:
    """The first of the list and the best of the others, ``number`` in all; none that diverged but the first."""
    others = [method for method, mean in ranking if method is not first and mean is not None]
    return (first, *others[: number - 1])


def _without(experiment: Experiment, out: Sequence[str]) -> Experiment:
    return experiment.model_copy(update={"protocol": experiment.protocol.for_search(out)})
