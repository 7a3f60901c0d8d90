"""DomainBed's rules, which choose among draws, and what each chooses for every method, target and seed.

Source: Gulrajani & Lopez-Paz, ICLR 2021, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedshift.data.domain import DataSet
from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.summary import mean_and_standard_error
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.config.search_section import Choosing
from fedshift.experiment.drawn_methods import Drawn

RULES: Mapping[Choosing, str] = {
    "training_domains": "training-domain validation: the draw and round with the best mean on the sources' held-out "
    "parts",
    "leave_one_domain_out": "leave-one-domain-out cross-validation: the draw with the best mean over sources that were "
    "left out in turn; last round",
    "oracle": "oracle: the draw with the best last round at the target, by the very labels that it is measured by; a "
    "bound, not a result",
}


@dataclass(frozen=True)
class Chosen:
    """What a rule chose for a method at a target with a seed: a draw, and the accuracy at the target."""

    rule: Choosing
    method: str
    target: str
    seed: int
    draw: Drawn
    accuracy: float


@dataclass(frozen=True)
class RuleRow:
    """A row of the table: means over seeds, and standard errors (None for one seed), by target; then of the average."""

    rule: Choosing
    method: str
    targets: Mapping[str, tuple[float, float | None]]
    average: tuple[float, float | None] | None


Results = Mapping[tuple[str, str, int], RunResult]
"""(method's label, target, seed) → a finished run."""


def with_draws(
    experiment: Experiment, draws: Sequence[Drawn], out: Sequence[str], target: str | None = None
) -> Experiment:
    """The experiment that trains all draws; ``out``: domains that nothing reads; ``target``: the only one, if given."""
    changes: dict[str, object] = {}
    if out:
        changes["drop"] = tuple(dict.fromkeys((*getattr(experiment.protocol, "drop", ()), *out)))
    if target is not None:
        changes["targets"] = (target,)
    return experiment.model_copy(
        update={
            "name": f"{experiment.name}-draws" + (f"-{target}" if target else ""),
            "methods": tuple(drawn.method for drawn in draws),
            "protocol": experiment.protocol.model_copy(update=changes),
        }
    )


def without_target(experiment: Experiment, draws: Sequence[Drawn], out: Sequence[str], target: str) -> Experiment:
    """The experiment that leaves each source of a target out in turn, and never reads the target."""
    whole = with_draws(experiment, draws, out)
    protocol = whole.protocol.for_search((*out, target))
    return whole.model_copy(update={"name": f"{experiment.name}-without-{target}", "protocol": protocol})


def check_rules(experiment: Experiment, rules: Sequence[Choosing], data: DataSet) -> None:
    """Check that the rules can choose.

    ``experiment``: of `with_draws`. UserError if no samples are held out, or there are too few sources to leave one
    out.
    """
    if "training_domains" in rules and not experiment.protocol.holds_out:
        raise UserError(
            "search.rules: training_domains chooses by the sources' held-out parts, and protocol.test_fraction is 0: "
            "raise it, or leave the rule out"
        )
    if "leave_one_domain_out" in rules:
        experiment.protocol.for_search(())  # refuses a protocol that leaves no source out
        if len(data.domains) < 3:
            raise UserError(
                f"search.rules: leave_one_domain_out needs at least 3 domains, and there are {len(data.domains)}: "
                "leave the rule out"
            )


def by_run(results: Sequence[RunResult]) -> Results:
    """The finished runs by what they are of."""
    return {(result.method, result.target, result.seed): result for result in results}


def choices(
    rule: Choosing, draws: Sequence[Drawn], runs: Results, inner: Mapping[str, Results], targets: Sequence[str]
) -> list[Chosen]:
    """What a rule chooses. Draws whose training diverged cannot be chosen.

    ``runs``: of `with_draws`; ``inner``: target → the runs of `without_target`; empty for other rules.
    """
    seeds = sorted({seed for _, _, seed in runs})
    result = []
    for method in dict.fromkeys(drawn.of for drawn in draws):
        of_method = [drawn for drawn in draws if drawn.of == method]
        for target in targets:
            for seed in seeds:
                best = _best(rule, of_method, runs, inner.get(target, {}), target, seed)
                if best is not None:
                    result.append(Chosen(rule, method, target, seed, *best))
    return result


def _best(
    rule: Choosing, draws: Sequence[Drawn], runs: Results, inner: Results, target: str, seed: int
) -> tuple[Drawn, float] | None:
    best: tuple[float, Drawn, float] | None = None
    for drawn in draws:
        result = runs.get((drawn.method.display, target, seed))
        if result is None:
            continue
        left_out = [run for (label, _, at), run in inner.items() if (label, at) == (drawn.method.display, seed)]
        value, accuracy = _JUDGED[rule](result, left_out)
        if value is None or accuracy is None:
            continue
        signed = -value if result.less_is_better else value
        if best is None or signed > best[0]:  # the first of equal ones, which may be the defaults
            best = signed, drawn, accuracy
    return None if best is None else best[1:]


def _by_sources(result: RunResult, inner: Sequence[RunResult]) -> tuple[float | None, float | None]:
    return result.source_accuracy("source"), result.accuracy("source")


def _by_left_out(result: RunResult, inner: Sequence[RunResult]) -> tuple[float | None, float | None]:
    scores = [run.score() for run in inner]
    known = [score for score in scores if score is not None]
    return fmean(known) if known and len(known) == len(scores) else None, result.accuracy()


def _by_target(result: RunResult, inner: Sequence[RunResult]) -> tuple[float | None, float | None]:
    return result.accuracy(), result.accuracy()


_JUDGED: Mapping[Choosing, Callable[[RunResult, Sequence[RunResult]], tuple[float | None, float | None]]] = {
    "training_domains": _by_sources,
    "leave_one_domain_out": _by_left_out,
    "oracle": _by_target,
}
"""What a draw is chosen by, and its accuracy at the target."""


def with_choices(experiment: Experiment, chosen: Sequence[Chosen], target: str, *, alone: bool) -> Experiment | None:
    """The experiment for a target with the settings that were chosen for it, without the search.

    They are those of the first rule that reads nothing of the target; of several seeds, the most frequent draw.

    ``alone``: whether there is no other target, so that the name needs none. Returns none if only the oracle chose, or
    nothing could be chosen for a method.
    """
    search = experiment.search
    rule = next((rule for rule in search.rules if rule != "oracle"), None) if search is not None else None
    methods = []
    for method in experiment.methods:
        draws = [
            item.draw for item in chosen if (item.rule, item.method, item.target) == (rule, method.display, target)
        ]
        if not draws:
            return None
        number = Counter(draw.number for draw in draws).most_common(1)[0][0]
        drawn = next(draw.method for draw in draws if draw.number == number)
        methods.append(drawn.model_copy(update={"label": method.label}))
    update: dict[str, object] = {
        "search": None,
        "methods": tuple(methods),
        "name": f"{experiment.name}-chosen{'' if alone else f'-{target}'}",
    }
    if not alone and "targets" in type(experiment.protocol).model_fields:
        update["protocol"] = experiment.protocol.model_copy(update={"targets": (target,)})
    return experiment.model_copy(update=update)


def value_of(rule: Choosing, drawn: Drawn, runs: Results, inner: Results, target: str) -> float | None:
    """What a rule sees of a draw, mean over seeds; None if a run diverged."""
    seeds = sorted({seed for _, at, seed in runs if at == target})
    values = []
    for seed in seeds:
        result = runs.get((drawn.method.display, target, seed))
        left_out = [run for (label, _, at), run in inner.items() if (label, at) == (drawn.method.display, seed)]
        values.append(None if result is None else _JUDGED[rule](result, left_out)[0])
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def rule_rows(chosen: Sequence[Chosen], targets: Sequence[str]) -> list[RuleRow]:
    """The table: means and standard errors over seeds, of each target and of the average over targets."""
    rows = []
    for rule, method in dict.fromkeys((item.rule, item.method) for item in chosen):
        of_pair = [item for item in chosen if (item.rule, item.method) == (rule, method)]
        at = {target: [item.accuracy for item in of_pair if item.target == target] for target in targets}
        by_seed: dict[int, list[float]] = {}
        for item in of_pair:
            by_seed.setdefault(item.seed, []).append(item.accuracy)
        whole = [fmean(values) for values in by_seed.values() if len(values) == len(targets)]
        rows.append(
            RuleRow(
                rule,
                method,
                {target: mean_and_standard_error(values) for target, values in at.items() if values},
                mean_and_standard_error(whole) if whole else None,
            )
        )
    return rows
