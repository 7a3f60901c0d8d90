"""What happened over rounds: accuracy on average and at each target, and the weights of the sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedshift.evaluation.records import RoundRecord
from fedshift.report import plots
from fedshift.report.averages import mean_over_targets, moving, weights_by_layer, weights_over_rounds
from fedshift.report.by_site import rounds_at
from fedshift.report.collect import FinishedRun
from fedshift.report.measures import Measure
from fedshift.report.sections.blocks import Block, Section, Text, curve_rows, figure, section
from fedshift.report.table import Table
from fedshift.report.table import headline as usual_measure

_MOST_PANELS = 4
_MOST_SITES = 12
_MOST_LAYERS = 6
Records = Mapping[Path, list[RoundRecord]]
Runs = Sequence[FinishedRun]


def curves_section(runs: Runs, records: Records, table: Table) -> Section:
    """The main metric over rounds: mean over targets, then at each target."""
    measure = usual_measure([run.result for run in runs])
    quantity = measure.name
    title = f"{quantity} over training"
    curves: dict[str, dict[str, plots.Curve]] = {"round": {}, "local mini-batches per site": {}}
    for method in table.methods:
        found = _curve(runs, records, method)
        if found is not None:
            curves["round"][method], curves["local mini-batches per site"][method] = found
    if not curves["round"]:
        text = "There is no rounds.jsonl with the results, so there is nothing to draw."
        return section("curves", title, Text(text, "note"))
    mean = figure(
        "accuracy-over-rounds",
        plots.accuracy_over_rounds(curves, measure),
        f"{quantity} over rounds and over local mini-batches",
        "Mean over targets; the band is one standard deviation over seeds. "
        "The right panel compares at equal work, which includes what a method does before its first round.",
        curve_rows(
            ["axis", "method", "x", "mean", "standard_deviation"],
            {(axis, method): curve for axis, lines in curves.items() for method, curve in lines.items()},
        ),
    )
    return section("curves", title, mean, *_at_each_target(runs, records, table, measure))


def _curve(
    runs: Runs, records: Records, method: str, target: str | None = None
) -> tuple[plots.Curve, plots.Curve] | None:
    """A method's curve over rounds and over mini-batches, at one target or on average; None if there is none."""
    chosen = [run for run in runs if run.result.method == method and target in (None, run.result.target)]
    shown = [(run.result, rounds_at(run.result, records[run.folder])) for run in chosen]
    points = mean_over_targets([(result, rounds) for result, rounds in shown if rounds])
    if not points:
        return None
    numbers, batches, mean, spread = zip(*points, strict=True)
    band = None if None in spread else spread
    return (numbers, mean, band), (batches, mean, band)


def _at_each_target(runs: Runs, records: Records, table: Table, measure: Measure) -> Iterator[Block]:
    targets = table.columns[:-1]
    if len(targets) < 2:
        return
    curves: dict[str, dict[str, plots.Curve]] = {}
    for target in targets[:_MOST_SITES]:
        found = {method: _curve(runs, records, method, target) for method in table.methods}
        curves[target] = {method: curve[0] for method, curve in found.items() if curve is not None}
    curves = {target: lines for target, lines in curves.items() if lines}
    if not curves:
        return
    more = f" The first {_MOST_SITES} of {len(targets)} targets." if len(targets) > _MOST_SITES else ""
    yield figure(
        "accuracy-per-site",
        plots.accuracy_at_targets(curves, measure),
        f"{measure.name} over rounds at each target",
        f"Mean over seeds at each target; the band is one standard deviation over seeds.{more}",
        curve_rows(
            ["target", "method", "round", "mean", "standard_deviation"],
            {(target, method): curve for target, lines in curves.items() for method, curve in lines.items()},
        ),
        title="At each target",
    )


def weights_section(runs: Runs, records: Records, methods: Sequence[str]) -> Section | None:
    """The weights of the sites, for methods that change them from round to round; None if none does."""
    figures: list[Block] = []
    for method in methods:
        by_target: dict[str, list[list[RoundRecord]]] = defaultdict(list)
        for run in runs:
            if run.result.method == method:
                by_target[run.result.target].append(records[run.folder])
        curves = {target: weights_over_rounds(rounds) for target, rounds in by_target.items()}
        shown, note = dict(list(curves.items())[:_MOST_PANELS]), ""
        if any(moving(lines.values()) for lines in curves.values()):
            note = f"{len(shown)} of {len(curves)} targets." if len(shown) < len(curves) else "By target."
        else:
            first = next(iter(by_target), "")
            layers = weights_by_layer(by_target[first]) if first else {}
            if any(moving(lines.values()) for lines in layers.values()):
                shown = dict(list(layers.items())[:_MOST_LAYERS])
                note = f"By layer, target {first}; {len(shown)} of {len(layers)} layers."
        if note:
            figures.append(
                figure(
                    f"weights-{len(figures) + 1}",
                    plots.site_weights(shown),
                    f"Weights of the sites over rounds, {method}",
                    note,
                    curve_rows(
                        ["panel", "site", "round", "mean", "standard_deviation"],
                        {(panel, site): curve for panel, lines in shown.items() for site, curve in lines.items()},
                    ),
                    title=method,
                )
            )
    if not figures:
        return None
    caption = "How much each site counts in the aggregate: mean and standard deviation over seeds."
    return section("weights", "Weights of the sites over training", Text(caption, "note"), *figures)
