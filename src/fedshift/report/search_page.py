"""The page of a search: what each method is worth beside the first, on every rung."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.evaluation.metric_entries import ENTRIES, Metric
from fedshift.evaluation.records import RunResult, format_metric
from fedshift.evaluation.significance import TTest, compare, holm
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.search import Rung, rank
from fedshift.experiment.search_rules import RULES, Chosen, rule_rows
from fedshift.methods.base import Method
from fedshift.report.differences import p_value
from fedshift.report.table import headline


@dataclass(frozen=True)
class Climbed:
    """A rung that was run: its experiment, its results, and the methods that went on."""

    rung: Rung
    experiment: Experiment
    results: tuple[RunResult, ...]
    going_on: tuple[Method, ...]


def search_page(climbed: Sequence[Climbed], out: Sequence[str], budget: int) -> str:
    """The page, in Markdown. p is corrected for all differences on it (Holm).

    ``out``: the domains that the search did not read; ``budget``: mini-batches of each site with all of the budget.
    """
    tests = [
        (level, method, _difference(level, method)) for level in climbed for method in level.experiment.methods[1:]
    ]
    corrected = dict(
        zip(
            ((level.rung.number, method.display) for level, method, _ in tests),
            holm([test.p if test else None for _, _, test in tests]),
            strict=True,
        )
    )
    metric = next((result.metric for level in climbed for result in level.results), "accuracy")
    first = climbed[0].experiment.methods[0].display
    sites = f"Not read at all: {', '.join(out)}." if out else "All sites took part: the result is for one that did not."
    lines = [
        f"# Search: {climbed[-1].going_on[-1].display}",
        "",
        f"Every source in turn was left out of training and measured. {sites}",
        "",
    ]
    for level in climbed:
        part = round(level.rung.share * budget)
        lines += [
            f"## Rung {level.rung.number}: {part:,} mini-batches a site",
            "",
            f"| method | mean | minus {first} | p | p (Holm) | goes on |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for method, mean in rank(level.experiment.methods, level.results):
            name = method.display
            test = next((test for at, other, test in tests if at is level and other is method), None)
            cells = ["", "", ""]
            if test is not None:
                error = "" if test.standard_error is None else f" ± {format_metric(metric, test.standard_error)}"
                cells = [
                    f"{'-' if test.mean < 0 else '+'}{format_metric(metric, abs(test.mean))}{error}",
                    p_value(test.p),
                    p_value(corrected[level.rung.number, name]),
                ]
            score = "diverged" if mean is None else format_metric(metric, mean)
            lines.append(f"| {name} | {score} | {' | '.join(cells)} | {'yes' if method in level.going_on else ''} |")
        lines.append("")
    looks = sum(test is not None and test.p is not None for _, _, test in tests)
    lines.append(
        f"{_quantity(climbed)}, mean over sources and seeds; the difference's standard error and p are of a mixed "
        "model with the left-out sites as clusters and seeds crossed with them (one site: over seeds, of it only), "
        f"p (Holm) is for all {looks} differences of this page together. A rung's best was chosen by its number, "
        "so that number is a little too good: the experiment file beside this page measures it again."
    )
    return "\n".join(lines) + "\n"


def outcome(climbed: Sequence[Climbed]) -> str:
    """The best method of the last rung in one line, and whether it is any better than the first."""
    level = climbed[-1]
    first, best = level.experiment.methods[0], level.going_on[-1]
    test = _difference(level, best)
    if test is None:
        return f"best: {best.display}; it has no run in common with {first.display}"
    result = level.results[0]
    better = -test.mean if result.less_is_better else test.mean
    if format_metric(result.metric, abs(better)) == format_metric(result.metric, 0.0):
        return f"best: {best.display}, level with {first.display} here"
    if not better > 0:
        return f"best: {best.display}, which is no better than {first.display} here"
    chance = f", p {p_value(test.p)} before correction" if test.p is not None else ""
    return f"best: {best.display}, {format_metric(result.metric, better)} better than {first.display}{chance}"


def _quantity(climbed: Sequence[Climbed]) -> str:
    results = [result for level in climbed for result in level.results]
    return headline(results).what


def _difference(level: Climbed, method: Method) -> TTest | None:
    """The method minus the first, with the sites that were left out as clusters."""
    first = level.experiment.methods[0].display
    by_name = {name: [result for result in level.results if result.method == name] for name in (method.display, first)}
    comparison = compare(by_name[method.display], by_name[first])
    return comparison.test if comparison else None


def rules_page(experiment: Experiment, chosen: Sequence[Chosen], targets: Sequence[str], metric: Metric) -> str:
    """The page, in Markdown."""
    search = experiment.search
    assert search is not None

    def cell(pair: tuple[float, float | None] | None) -> str:
        if pair is None:
            return ""
        error = "" if pair[1] is None else f" ± {format_metric(metric, pair[1])}"
        return f"{format_metric(metric, pair[0])}{error}"

    seeds = sorted({choice.seed for choice in chosen})
    lines = [
        f"# Search: {experiment.name}",
        "",
        f"{ENTRIES[metric].title} at targets, mean and standard error over {len(seeds)} seeds; {search.draws} draws of "
        f"each method that has spaces, search.seed {search.seed}.",
        "",
        f"| chosen by | method | {' | '.join(targets)} | average |",
        f"| --- | --- | {'---: | ' * len(targets)}---: |",
    ]
    for row in rule_rows(chosen, targets):
        cells = [cell(row.targets.get(target)) for target in targets]
        lines.append(f"| {row.rule} | {row.method} | {' | '.join(cells)} | {cell(row.average)} |")
    lines += ["", *(f"* `{rule}`: {RULES[rule]}." for rule in search.rules), "", "## What was chosen", ""]
    lines += ["| chosen by | method | target | draw of each seed | settings of the most frequent |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for rule, method, target in dict.fromkeys((choice.rule, choice.method, choice.target) for choice in chosen):
        same = [choice for choice in chosen if (choice.rule, choice.method, choice.target) == (rule, method, target)]
        usual = Counter(choice.draw.number for choice in same).most_common(1)[0][0]
        values = next(choice.draw.values for choice in same if choice.draw.number == usual)
        written = ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items()) or "as in the file"
        numbers = ", ".join(f"{choice.draw.number}" for choice in same)
        lines.append(f"| {rule} | {method} | {target} | {numbers} | {written} |")
    return "\n".join(lines) + "\n"
