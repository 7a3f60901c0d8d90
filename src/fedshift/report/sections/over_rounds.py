"""What happened over rounds: accuracy on average and at each target, and the weights of the sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedshift.report import plots
from fedshift.report.details import MOST_TARGETS, Details, Weights
from fedshift.report.sections.blocks import Block, Section, Text, curve_rows, figure, section


def curves_section(details: Details, targets: int) -> Section:
    """The main metric over rounds: mean over targets, then at each of so many targets."""
    measure, curves = details.over_rounds, details.curves
    title = f"{measure.name} over training"
    if not curves["round"]:
        text = "There is no rounds.jsonl with the results, so there is nothing to draw."
        return section("curves", title, Text(text, "note"))
    mean = figure(
        "accuracy-over-rounds",
        plots.accuracy_over_rounds(curves, measure),
        f"{measure.name} over rounds and over local mini-batches",
        "Mean over targets; the band is one standard deviation over seeds. "
        "The right panel compares at equal work, which includes what a method does before its first round.",
        curve_rows(["axis", "method", "x", "mean"], curves),
    )
    return section("curves", title, mean, *_at_each_target(details, targets))


def _at_each_target(details: Details, targets: int) -> Iterator[Block]:
    curves, measure = details.at_targets, details.over_rounds
    if curves:
        more = f" The first {MOST_TARGETS} of {targets} targets." if targets > MOST_TARGETS else ""
        yield figure(
            "accuracy-per-site",
            plots.accuracy_at_targets(curves, measure),
            f"{measure.name} over rounds at each target",
            f"Mean over seeds at each target; the band is one standard deviation over seeds.{more}",
            curve_rows(["target", "method", "round", "mean"], curves),
            title="At each target",
        )


def weights_section(weights: Sequence[Weights]) -> Section | None:
    """The weights of the sites, for methods that change them from round to round; None if none does."""
    figures = [
        figure(
            f"weights-{number}",
            plots.site_weights(of_layer.panels),
            f"Weights of the sites over rounds, {of_layer.method}",
            of_layer.note,
            curve_rows(["panel", "site", "round", "mean"], of_layer.panels),
            title=of_layer.method,
        )
        for number, of_layer in enumerate(weights, 1)
    ]
    caption = "How much each site counts in the aggregate: mean and standard deviation over seeds."
    title = "Weights of the sites over training"
    return section("weights", title, Text(caption, "note"), *figures) if figures else None
