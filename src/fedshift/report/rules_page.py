"""The page of a search with drawn settings: one table for all rules, and what each chose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from fedshift.evaluation.metric_entries import ENTRIES, Metric
from fedshift.evaluation.records import format_metric
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.search_rules import RULES, Chosen, rule_rows


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
