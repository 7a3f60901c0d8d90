"""Which model answers at a target whose labels are not looked at: the common one, or one that was adapted there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.choice import FEWEST, HARM, choose, margin
from fedshift.evaluation.records import RunResult
from fedshift.report.collect import Collected
from fedshift.report.conditions import conditions, role_of
from fedshift.report.estimates import Estimates, estimates_of

_CONSTANT = "the most frequent class"


@dataclass(frozen=True)
class Choice:
    """The method whose model answers at a target, decided without its labels."""

    target: str  # the target
    method: str  # whose model answers
    common: str  # the method of the common model, which used nothing of the target
    # adapting method → its gains over the common model at the other targets, in points
    gains: Mapping[str, Sequence[float]]
    why: str  # in words
    # the class that should be answered for every sample, where no model is worth more; None: a model is
    constant: str | None = None

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        gains = {name: list(values) for name, values in self.gains.items()}
        plain = {"target": self.target, "method": self.method, "common": self.common, "gains": gains, "why": self.why}
        return plain | ({} if self.constant is None else {"constant": self.constant})


def choice_at(collected: Collected, target: str, estimates: Estimates | None = None) -> Choice:
    """Decide which model answers at a target, from what the others measured.

    ``estimates``: at targets without labels; None: they are made if the choice needs them. UserError if there is no
    such target, or no federated method left the target's samples alone.
    """
    results = [run.result for run in collected.all_runs]
    known = list(dict.fromkeys(result.target for result in results))
    if target not in known:
        raise UserError(f"there is no finished run with target '{target}'; {nearest(target, known)}")
    here = {result.method for result in results if result.target == target and role_of(result) == "federated"}
    used = conditions(results)
    scores = _scores(collected, target, here)
    common = [name for name in used if name in here and "target" not in used[name].uses]
    if not common:
        raise UserError("choice: no federated method left the target's samples alone: add fedavg, the common model")
    first = max(common, key=lambda name: fmean(scores[name].values()) if scores.get(name) else 0.0)
    gains = {
        name: [scores[name][site] - usual for site, usual in scores[first].items() if site in scores[name]]
        for name in used
        if name in here and name not in common
    }
    unfit = set[str]() if choose(gains) is None else _unfit(estimates or estimates_of(collected), target)
    frequent, always = _most_frequent(results, target, scores.get(first, {}))
    fit = {name: values for name, values in gains.items() if name not in unfit}
    chosen = choose({**fit, **({} if frequent is None else {_CONSTANT: always})})
    if chosen == _CONSTANT:
        return Choice(target, first, first, gains, f"{_gain(always)}, whatever the model", frequent)
    return Choice(target, chosen or first, first, gains, _why(chosen, gains, unfit))


def _most_frequent(
    results: Sequence[RunResult], target: str, common: Mapping[str, float]
) -> tuple[str | None, list[float]]:
    """The most frequent class at the other targets, and what saying it of every sample gains at each of them.

    At each of them it is the class that is most frequent at those that are left, so that no label there is used. None
    where sites do not tell how many samples of each class they have.
    """
    supports = {
        site.site: np.array(site.support)
        for result in results
        for site in result.sites
        if site.part == "target" and site.site in common and site.site != target and None not in site.support
    }
    lengths = {len(support) for support in supports.values()}
    if len(supports) < FEWEST or lengths != {len(results[0].classes)}:
        return None, []
    whole = np.sum(list(supports.values()), axis=0)
    differences = []
    for name, support in supports.items():
        usual = int(np.argmax(whole - support))
        differences.append(100.0 * float(support[usual]) / float(support.sum()) - common[name])
    return results[0].classes[int(np.argmax(whole))], differences


def _scores(collected: Collected, target: str, methods: set[str]) -> dict[str, dict[str, float]]:
    """Method → other target → the mean of its accuracy over seeds."""
    by_method: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    for result in collected.results:
        accuracy = result.accuracy()
        if result.target != target and result.method in methods and accuracy is not None:
            by_method[result.method].setdefault(result.target, []).append(accuracy)
    return {name: {site: fmean(values) for site, values in sites.items()} for name, sites in by_method.items()}


def _unfit(estimates: Estimates, target: str) -> set[str]:
    """The methods whose models find the target too unlike: none of them is handed out."""
    return {
        name
        for name, of_seeds in estimates.get(target, {}).items()
        if any(estimate.too_unlike for estimate in of_seeds)
    }


def _gain(gains: Sequence[float]) -> str:
    return f"at {len(gains)} other targets it gains {fmean(gains):.1f} points on average"


def _why(chosen: str | None, gains: Mapping[str, Sequence[float]], unfit: set[str]) -> str:
    if chosen is not None:
        return _gain(gains[chosen])
    if not gains:
        return "no method adapted to the target"
    if set(gains) <= unfit:
        return "the target is too unlike the others to hand out an adapted model"
    most = max(map(len, gains.values()))
    if most < FEWEST:
        return f"{most} other targets were measured, and {FEWEST} are needed to trust an adapted model"
    if any((margin(values) or 0.0) > 0 for values in gains.values()):
        return f"adapting lost {HARM:.0f} points or more at another target"
    return "adapting does not gain at the other targets"


def choices(collected: Collected, estimates: Estimates) -> tuple[Choice, ...]:
    """The choice at each target without labels at which some method adapted and another one did not."""
    choices_at = []
    for target in dict.fromkeys(run.result.target for run in collected.unmeasured):
        with contextlib.suppress(UserError):  # there is no common model
            choices_at.append(choice_at(collected, target, estimates))
    return tuple(choice for choice in choices_at if choice.gains)


def choices_in_words(choices_made: Sequence[Choice]) -> Iterator[str]:
    """A sentence for each choice."""
    for choice in choices_made:
        if choice.constant is None:
            yield f"At {choice.target} the model of {choice.method} should answer: {choice.why}."
        else:
            yield f"At {choice.target} no model should answer, but '{choice.constant}' for every sample: {choice.why}."
