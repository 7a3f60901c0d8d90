"""``fedshift search``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console

from fedshift.cli.console import safe_console
from fedshift.cli.run import reporter_at
from fedshift.errors import TrainingDiverged, UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.check import check
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.drawn_methods import drawn_methods
from fedshift.experiment.features import built
from fedshift.experiment.plan import Plan
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.experiment.runs.stopping import Stop, heeded
from fedshift.experiment.search import Rung, budget_of, going_on, kept_out, on_rung, ranked, rungs
from fedshift.experiment.search_rules import by_run, check_rules, choices, with_draws, without_target
from fedshift.files import write_bytes
from fedshift.methods.base import Method
from fedshift.report.collect import collect
from fedshift.report.folding import Folded
from fedshift.report.rules_page import rules_page
from fedshift.report.search_page import Climbed, outcome, search_page


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
    try:
        with heeded() as stop:
            climbed = _climb(experiment, ladder, out, budget, partial(_trained, folder, errors, stop))
    except KeyboardInterrupt:
        errors.print("interrupted: run the same command again to continue after the last round", highlight=False)
        sys.exit(130)
    best = climbed[-1].going_on
    found = experiment.model_copy(update={"name": f"{experiment.name}-found", "methods": best})
    page, file = folder / "search.md", folder / "found.yaml"
    write_bytes(page, search_page(climbed, out, budget).encode())
    write_bytes(file, yaml.safe_dump(found.dump(), sort_keys=False, allow_unicode=True).encode())
    safe_console().print(outcome(climbed), markup=False, highlight=False, soft_wrap=True)
    for name, made in (("page", page), ("experiment", file)):
        errors.print(f"{name}: {made}", markup=False, highlight=False, soft_wrap=True)


def draw_file(experiment: Experiment, runs: Path, keep_out: Sequence[str], plan_only: bool) -> None:
    """Run the draws of an experiment's ``search`` section, or go on with them, and print what each rule chooses."""
    errors, console, search = safe_console(stderr=True), safe_console(), experiment.search
    assert search is not None
    draws, out = drawn_methods(experiment), tuple(keep_out)
    whole = with_draws(experiment, draws, out)
    plan = Plan(whole, whole.protocol.taking_part(built(whole)))
    check_rules(whole, search.rules, plan.data)
    cross = plan.targets if "leave_one_domain_out" in search.rules else ()
    parts = [whole, *(without_target(experiment, draws, out, target) for target in cross)]
    counts = [len(plan.runs), *(len(Plan(part, part.protocol.taking_part(built(part))).runs) for part in parts[1:])]
    further = f", and {sum(counts[1:])} that leave a source out" if cross else ""
    errors.print(f"{len(draws)} draws: {counts[0]} runs{further}", highlight=False, soft_wrap=True)
    if plan_only:
        return
    folder = runs / f"{experiment.name}-search"
    try:
        with heeded() as stop:
            results = [by_run(_trained(folder, errors, stop, part)) for part in parts]
    except KeyboardInterrupt:
        errors.print("interrupted: run the same command again to continue after the last round", highlight=False)
        sys.exit(130)
    inner = dict(zip(cross, results[1:], strict=True))
    chosen = [one for rule in search.rules for one in choices(rule, draws, results[0], inner, plan.targets)]
    page, text = folder / "search.md", rules_page(experiment, chosen, plan.targets, plan.metric)
    write_bytes(page, text.encode())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    errors.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)


def _trained(folder: Path, errors: Console, stop: Stop, part: Experiment) -> tuple[RunResult, ...]:
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
    said = f"not read: {', '.join(out)}; " if out else "all sites take part; "
    console.print(f"{said}training of all runs: about {total:.2f} h", markup=False, highlight=False, soft_wrap=True)


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
        ranking = ranked(methods, results)
        last = rung.number == len(ladder)
        methods = going_on(ranking, experiment.methods[0], 2 if last else ladder[rung.number].methods)
        climbed.append(Climbed(rung, part, results, methods))
        if len(methods) < 2:
            raise UserError(f"{part.name}: all methods but the first diverged: lower training.lr")
    return climbed
