"""Draws that follow from the results of those before, by Optuna's TPE. Each target has draws of its own.

Nothing of a target is read: what the sampler learns from is what the first rule but the oracle sees, in runs for this
target alone. There is no second store. Before every draw the study is made anew from the stored runs, and the sampler
has a seed for each draw, so a search that was stopped goes on with the same draws.

Source: Bergstra, Bardenet, Bengio, Kégl, *Algorithms for Hyper-Parameter Optimization*, NeurIPS 2011.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import Experiment, check_training
from fedshift.experiment.config.search_section import Choosing, Search, Space
from fedshift.experiment.drawn_methods import Drawn, checked_spaces, spaces_of, with_values
from fedshift.experiment.search_rules import Results, by_run, value_of, with_draws, without_target
from fedshift.extras import import_extra
from fedshift.methods.base import Method

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
