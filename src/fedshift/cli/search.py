"""``fedshift search``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console

from fedshift.cli.console import safe_console
from fedshift.cli.run import reporter_at, resumable
from fedshift.errors import TrainingDiverged, UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.check import check
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.stopping import Stop, heed_signals
from fedshift.experiment.search import Rung, budget_of, going_on, kept_out, on_rung, rank, rungs
from fedshift.experiment.search_rules import (
    Trials,
    by_run,
    check_rules,
    choices,
    drawn_in_turn,
    drawn_methods,
    learned_by,
    with_choices,
    with_draws,
    without_target,
)
from fedshift.extras import import_extra
from fedshift.files import write_bytes
from fedshift.methods.base import Method
from fedshift.report.collect import collect
from fedshift.report.folding import Folded
from fedshift.report.search_page import Climbed, outcome, rules_page, search_page


def search_file(
    path: Path, overrides: Sequence[str], runs: Path, keep_out: Sequence[str], factor: int, plan_only: bool
) -> None:
    """Search among the methods of an experiment file, or continue where the search stopped."""
    errors = safe_console(stderr=True)
    experiment = load(path, overrides)
    if experiment.search is not None:
        draw_file(experiment, runs, keep_out, plan_only)
        return
    out = kept_out(experiment, keep_out)
    ladder = rungs(len(experiment.methods), factor)
    budget = budget_of(experiment, out)
    _show_budget(experiment, ladder, out, budget)
    if plan_only:
        return
    folder = runs / f"{experiment.name}-search"
    with resumable(errors), heed_signals() as stop:
        climbed = _climb(experiment, ladder, out, budget, partial(_run_part, folder, errors, stop))
    best = climbed[-1].going_on
    page = folder / "search.md"
    write_bytes(page, search_page(climbed, out, budget).encode())
    safe_console().print(outcome(climbed), markup=False, highlight=False, soft_wrap=True)
    errors.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    chosen = experiment.model_copy(update={"name": f"{experiment.name}-chosen", "methods": best})
    _write_experiment(folder / "chosen.yaml", chosen, errors)


def draw_file(experiment: Experiment, runs: Path, keep_out: Sequence[str], plan_only: bool) -> None:
    """Run the draws of an experiment's ``search`` section, or go on with them, and print what each rule chooses."""
    errors, console, search = safe_console(stderr=True), safe_console(), experiment.search
    assert search is not None
    out, folder = tuple(keep_out), runs / f"{experiment.name}-search"
    draws = drawn_methods(experiment)  # refuses spaces that do not fit
    whole = with_draws(experiment, draws, out)
    plan = Plan(whole, whole.protocol.taking_part(build_data(whole)))
    check_rules(whole, search.rules, plan.data)
    with resumable(errors), heed_signals() as stop:
        train = partial(_run_part, folder, errors, stop)
        trials = (_in_turn if search.sampler == "optuna" else _at_once)(
            experiment, out, plan, errors, None if plan_only else train
        )
    if plan_only:
        return
    chosen = [
        choice
        for rule in search.rules
        for label in dict.fromkeys(drawn.of for drawn in draws)
        for target, tried in trials.items()
        for choice in choices(rule, tried.draws, tried.runs, {target: tried.inner}, [target])
        if choice.method == label
    ]
    page, text = folder / "search.md", rules_page(experiment, chosen, plan.targets, plan.metric)
    write_bytes(page, text.encode())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    errors.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    for target in plan.targets:
        made = with_choices(experiment, chosen, target, alone=len(plan.targets) == 1)
        if made is not None:
            _write_experiment(folder / f"{made.name.removeprefix(f'{experiment.name}-')}.yaml", made, errors)


Trainer = Callable[[Experiment], tuple[RunResult, ...]]


def _at_once(
    experiment: Experiment, out: tuple[str, ...], plan: Plan, errors: Console, train: Trainer | None
) -> dict[str, Trials]:
    """All draws together, which do not depend on results; only their number is printed without ``train``."""
    search, draws = experiment.search, drawn_methods(experiment)
    assert search is not None
    cross = plan.targets if "leave_one_domain_out" in search.rules else ()
    parts = [without_target(experiment, draws, out, target) for target in cross]
    further = sum(len(Plan(part, part.protocol.taking_part(build_data(part))).runs) for part in parts)
    left_out = f", and {further} that leave a source out" if cross else ""
    errors.print(f"{len(draws)} draws: {len(plan.runs)} runs{left_out}", highlight=False, soft_wrap=True)
    if train is None:
        return {}
    runs = by_run(train(with_draws(experiment, draws, out)))
    inner = {target: by_run(train(part)) for target, part in zip(cross, parts, strict=True)}
    return {target: Trials(draws, runs, inner.get(target, {})) for target in plan.targets}


def _in_turn(
    experiment: Experiment, out: tuple[str, ...], plan: Plan, errors: Console, train: Trainer | None
) -> dict[str, Trials]:
    """Draw after draw for each target, each from the results of those before."""
    search = experiment.search
    assert search is not None
    rule = learned_by(search)
    import_extra("optuna", extra="search", what="search.sampler: optuna")
    if "targets" not in type(experiment.protocol).model_fields:
        raise UserError("search.sampler: optuna goes target by target, and protocol.kind has no targets; write random")
    sentence = f"{search.draws} draws for each method and target, one after the other; optuna learns from {rule}"
    errors.print(sentence, highlight=False, soft_wrap=True)
    if train is None:
        return {}
    return {target: drawn_in_turn(experiment, out, target, train) for target in plan.targets}


def _write_experiment(file: Path, experiment: Experiment, errors: Console) -> None:
    write_bytes(file, yaml.safe_dump(experiment.dump(), sort_keys=False, allow_unicode=True).encode())
    errors.print(f"experiment: {file}", markup=False, highlight=False, soft_wrap=True)


def _run_part(folder: Path, errors: Console, stop: Stop, part: Experiment) -> tuple[RunResult, ...]:
    """Run what is not finished of an experiment of the search; runs that diverged are missing."""
    reporter, end = reporter_at(errors)
    try:
        run_experiment(part, folder, reporter, stop=stop.check)
    except TrainingDiverged as error:
        errors.print(f"warning: {error}", markup=False, highlight=False, soft_wrap=True)
    finally:
        end()
    if reporter.left:
        raise UserError("another process runs some of this search: start the command again when it is done")
    return tuple(collect(folder / part.name).results)


def _show_budget(experiment: Experiment, ladder: Sequence[Rung], out: Sequence[str], budget: int) -> None:
    """Print what the search will cost, if the methods that stay in it cost as much as the average method."""
    console = safe_console()
    first = check(on_rung(experiment, ladder[0], experiment.methods, out, budget))
    hours = sum(method.hours for method in first.methods) / len(first.methods)
    runs = first.methods[0].runs
    rows: list[list[str]] = []
    total = 0.0
    for rung in ladder:
        cost = hours * rung.methods * rung.share / ladder[0].share
        total += cost
        batches = f"{round(rung.share * budget):,}"
        rows.append([str(rung.number), str(rung.methods), str(runs * rung.methods), batches, f"{cost:.2f}"])
    console.print(Folded(["rung", "methods", "runs", "mini-batches per site", "hours"], rows))
    text = f"not read: {', '.join(out)}; " if out else "all sites take part; "
    console.print(f"{text}training of all runs: about {total:.2f} h", markup=False, highlight=False, soft_wrap=True)


def _climb(
    experiment: Experiment,
    ladder: Sequence[Rung],
    out: Sequence[str],
    budget: int,
    trained: Callable[[Experiment], tuple[RunResult, ...]],
) -> list[Climbed]:
    """Run the rungs. Finished runs are not repeated, so a second call goes on where the first stopped."""
    methods: tuple[Method, ...] = experiment.methods
    climbed: list[Climbed] = []
    for rung in ladder:
        part = on_rung(experiment, rung, methods, out, budget)
        results = trained(part)
        ranking = rank(methods, results)
        last = rung.number == len(ladder)
        methods = going_on(ranking, experiment.methods[0], 2 if last else ladder[rung.number].methods)
        climbed.append(Climbed(rung, part, results, methods))
        if len(methods) < 2:
            raise UserError(f"{part.name}: all methods but the first diverged: lower training.lr")
    return climbed
