"""A search with drawn settings: the draws of every method, at once or each after those before, and DomainBed's rules.

Source: Gulrajani & Lopez-Paz, ICLR 2021, section 3.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ValidationError

from fedshift.data.domain import DataSet
from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.summary import mean_and_standard_error
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.config.experiment import Experiment, check_training
from fedshift.experiment.config.search_section import Choosing, Search, Space
from fedshift.extras import import_extra
from fedshift.methods.base import Method
from fedshift.methods.composition.training_changes import TrainingChanges
from fedshift.methods.symbols import symbols_of


@dataclass(frozen=True)
class Drawn:
    """A method with drawn settings."""

    of: str  # the label of the method of the file
    number: int  # of the draw, from 0
    values: Mapping[str, Any]  # field → its value; empty for the method as the file has it
    method: Method  # with a label of its own


def drawn_methods(experiment: Experiment) -> tuple[Drawn, ...]:
    """All draws of all methods. A method without a space of its own is there once.

    A draw depends on the seed, the method's label, its number and the field. So further methods, fields and draws leave
    those alone that there are.

    UserError if a space is of no field, or holds a value that the field does not take.
    """
    search = checked_spaces(experiment)
    draws = [drawn for method in experiment.methods for drawn in _draws_of(search, method)]
    check_training(experiment.model_copy(update={"methods": tuple(drawn.method for drawn in draws)}))
    return tuple(draws)


def checked_spaces(experiment: Experiment) -> Search:
    """The search section, whose spaces are of methods that there are.

    UserError if there is no section, or a space of another method.
    """
    search = _search_of(experiment)
    labels = [method.display for method in experiment.methods]
    for path in search.spaces:
        first, _, rest = path.partition(".")
        if not rest or first not in ("training", *labels):
            hint = nearest(first, ["training", *labels])
            raise UserError(f"search.spaces.{path}: begin with training or a method's label; {hint}")
    return search


def _search_of(experiment: Experiment) -> Search:
    if experiment.search is None:
        raise UserError("search: this section is missing from the experiment")
    return experiment.search


def spaces_of(search: Search, method: Method) -> dict[str, tuple[str, Space]]:
    """A method's spaces: its field → the path in the file, and the space."""
    spaces = {}
    for path, space in search.spaces.items():
        first, _, rest = path.partition(".")
        if first in ("training", method.display):
            field = path if first == "training" else symbols_of(type(method)).get(rest, rest)
            spaces[field] = path, space
    return spaces


def _draws_of(search: Search, method: Method) -> list[Drawn]:
    label, spaces = method.display, spaces_of(search, method)
    draws = []
    for number in range(search.draws if spaces else 1):
        plain = not spaces or (number == 0 and search.defaults_first)
        values = {
            field: space.draw(f"{search.seed} {label} {number} {path}")
            for field, (path, space) in spaces.items()
            if not plain
        }
        draws.append(with_values(method, number, values, spaces))
    return draws


def with_values(
    method: Method, number: int, values: Mapping[str, Any], spaces: Mapping[str, tuple[str, Space]]
) -> Drawn:
    """A draw of a method.

    Args:
        values: field → its value.
        spaces: of `spaces_of`.

    Raises:
        UserError: a field is unknown, or does not take its value.
    """
    return Drawn(method.display, number, values, _with_values(method, values, number, spaces))


def _with_values(
    method: Method, values: Mapping[str, Any], number: int, spaces: Mapping[str, tuple[str, Space]]
) -> Method:
    options = method.model_dump(mode="json")
    for field, value in values.items():
        _check_field(field, spaces[field][0], type(method))
        first, _, rest = field.partition(".")
        if rest:
            inner = options.get(first)
            options[first] = {**(inner if isinstance(inner, Mapping) else {}), rest: value}
        else:
            options[first] = value
    try:
        return type(method).model_validate({**options, "label": f"{method.display}-draw{number}"})
    except ValidationError as error:
        raise UserError(f"search.spaces: {describe(error, method.display, type(method))}") from None


def _check_field(field: str, path: str, kind: type[BaseModel]) -> None:
    first, _, rest = field.partition(".")
    known = TrainingChanges.model_fields if first == "training" and rest else kind.model_fields
    name = rest if first == "training" and rest else first
    if name not in known:
        raise UserError(f"search.spaces.{path}: there is no field '{name}'; {nearest(name, known)}")


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


Train = Callable[[Experiment], Sequence[RunResult]]


@dataclass(frozen=True)
class Trials:
    """What was tried for a target."""

    draws: tuple[Drawn, ...]  # of all methods
    runs: Results  # of `with_draws`
    inner: Results  # of `without_target`; empty where no rule needs it


def learned_by(search: Search) -> Choosing:
    """The rule that the sampler learns from: the first that reads nothing of the target.

    UserError if there is only the oracle.
    """
    rule = next((rule for rule in search.rules if rule != "oracle"), None)
    if rule is None:
        raise UserError("search.rules: optuna learns from training_domains or leave_one_domain_out; add one of them")
    return rule


def drawn_in_turn(experiment: Experiment, out: Sequence[str], target: str, train: Train) -> Trials:
    """Draw, train and draw again.

    ``train``: runs what is not finished of an experiment; the results of all its runs. UserError if Optuna is not
    installed, a space does not fit, or as ``train``.
    """
    search = checked_spaces(experiment)
    rule = learned_by(search)
    tried = Trials((), {}, {})
    for number in range(search.draws):
        spaces = [(method, spaces_of(search, method)) for method in experiment.methods]
        methods = [(method, held) for method, held in spaces if held or number == 0]
        batch = [_draw(search, method, held, number, tried, rule, target) for method, held in methods]
        check_training(experiment.model_copy(update={"methods": tuple(drawn.method for drawn in batch)}))
        runs = {**tried.runs, **by_run(train(with_draws(experiment, batch, out, target)))}
        inner = dict(tried.inner)
        if "leave_one_domain_out" in search.rules:
            inner |= by_run(train(without_target(experiment, batch, out, target)))
        tried = Trials((*tried.draws, *batch), runs, inner)
    return tried


def _draw(
    search: Search,
    method: Method,
    spaces: Mapping[str, tuple[str, Space]],
    number: int,
    tried: Trials,
    rule: Choosing,
    target: str,
) -> Drawn:
    if not spaces or (number == 0 and search.defaults_first):
        return with_values(method, number, {}, spaces)
    earlier = [
        (drawn.values, value_of(rule, drawn, tried.runs, tried.inner, target))
        for drawn in tried.draws
        if drawn.of == method.display and drawn.values
    ]
    less_is_better = any(result.less_is_better for result in tried.runs.values())
    purpose = f"{search.seed} {method.display} {target} {number}"
    kinds = {field: space for field, (_, space) in spaces.items()}
    return with_values(method, number, propose(kinds, earlier, purpose, less_is_better), spaces)


def propose(
    spaces: Mapping[str, Space],
    earlier: Sequence[tuple[Mapping[str, Any], float | None]],
    purpose: str,
    less_is_better: bool,
) -> dict[str, Any]:
    """The values that TPE proposes after the earlier ones; the same arguments give the same.

    Args:
        spaces: field → its space.
        earlier: values by field and what they were worth; None: training diverged.

    Raises:
        UserError: Optuna is not installed.
    """
    optuna = import_extra("optuna", extra="search", what="search.sampler: optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, direction="minimize" if less_is_better else "maximize")
    distributions = {field: _distribution(space, optuna.distributions) for field, space in spaces.items()}
    for values, worth in earlier:
        params = {field: _inside(spaces[field], value) for field, value in values.items()}
        state = optuna.trial.TrialState.PRUNED if worth is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=worth, state=state))
    chosen = study.ask(fixed_distributions=distributions).params
    return {
        field: chosen[field] if space.choices is None else space.choices[chosen[field]]
        for field, space in spaces.items()
    }


def _distribution(space: Space, kinds: Any) -> Any:
    """Optuna's form of a space. A choice is its number, since Optuna takes no lists and mappings."""
    if space.choices is not None:
        return kinds.CategoricalDistribution(range(len(space.choices)))
    if (whole := space.integer or space.log_integer) is not None:
        return kinds.IntDistribution(math.ceil(whole[0]), math.floor(whole[1]), log=space.log_integer is not None)
    pair = space.uniform or space.log_uniform
    assert pair is not None
    return kinds.FloatDistribution(*pair, log=space.log_uniform is not None)


def _inside(space: Space, value: Any) -> Any:
    return value if space.choices is None else space.choices.index(value)
