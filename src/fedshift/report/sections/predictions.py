"""Which classes are confused, ROC curves, the worst mistakes, and where models place samples."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

from fedshift.report import plots
from fedshift.report.measures import MISSING
from fedshift.report.mistakes import Mistake, Placed, Predictions
from fedshift.report.sections.blocks import (
    Block,
    Cells,
    Entry,
    Section,
    Text,
    curve_rows,
    figure,
    grid,
    number,
    section,
)

_TITLE = "Which mistakes are made"


def predictions_section(predictions: Predictions | None) -> Section | None:
    """What the stored predictions show; None for tasks that are no classification. Where there are none, it says so."""
    if predictions is None:
        return None
    blocks = [*_confusion(predictions), *_roc(predictions), *_mistakes(predictions)]
    if not blocks:
        text = "No predictions per sample were kept, so there are no confusion matrices, ROC curves or worst mistakes."
        blocks = [Text(text, "note")]
    return section("predictions", _TITLE, *blocks)


def _confusion(predictions: Predictions) -> Iterator[Block]:
    classes = predictions.classes
    for method, counts in predictions.confusion.items():
        totals = counts.sum(1)
        rows: list[Cells] = [
            [name, f"{totals[at]:,}", *(_share(counts[at, to], totals[at], at == to) for to in range(len(classes)))]
            for at, name in enumerate(classes)
        ]
        head = ["true class", "predictions", *classes]
        yield grid(f"Confusion matrix of {method}", head, rows, css="confusion")
    if predictions.confusion:
        yield Text(
            "Each row is a true class: percent of its samples that were called what the column says, all targets and "
            "seeds together. The stronger a cell is coloured, the more is wrong.",
            "note",
        )


def _share(count: int, total: int, right: bool) -> Entry:
    if not total:
        return number(None)
    share = 100 * count / total
    return number(share, 1, best=right, miss=round(0.7 * (100 - share if right else share)))


def _roc(predictions: Predictions) -> Iterator[Block]:
    which = predictions.classes[1] if len(predictions.classes) == 2 else "a class, mean over the classes,"
    if predictions.roc:
        yield figure(
            "roc",
            plots.operating_curves(predictions.roc),
            "ROC curves by target and method",
            f"ROC: what share of {which} is recognised, for each share of false alarms; samples of all seeds.",
            curve_rows(["target", "method", "false_alarms", "recognised"], predictions.roc),
            title="ROC curves",
        )


def _mistakes(predictions: Predictions) -> Iterator[Block]:
    rows: list[Cells] = [
        [
            mistake.name,
            *([_itself(mistake)] if predictions.shown else []),
            mistake.site,
            mistake.label,
            mistake.predicted,
            number(100 * mistake.score, 0),
            f"{mistake.wrong} of {mistake.seeds}",
        ]
        for mistake in predictions.mistakes
    ]
    if rows:
        contents = ["contents"] if predictions.shown else []
        head = ["sample", *contents, "site", "true class", "called", "score, %", "seeds"]
        note = "The samples whose wrong class had the highest score, mean over seeds (0 where a seed was right)."
        yield grid(f"Worst mistakes of {predictions.method}", head, rows, [note], "facts")


def _itself(mistake: Mistake) -> Entry:
    """A sample as it is: a picture, or the columns of a table."""
    if mistake.picture is None:
        return Entry(mistake.words or MISSING)
    return Entry(
        "", title=f"a sample of {mistake.label} at {mistake.site}", picture=base64.b64encode(mistake.picture).decode()
    )


def features_section(placed: Sequence[Placed]) -> Section | None:
    """t-SNE of the features of samples by class and by site, at the first target; None if there is no model."""
    if not placed:
        return None
    result = placed[0].run.result
    caption = (
        f"t-SNE of the last features before the classifier: up to 60 training samples of each source and measured "
        f"ones of the target {result.target}, seed {result.seed}. Near points are alike; far distances mean nothing. A "
        "model that generalises parts the classes and mixes the sites."
    )
    rows: list[Sequence[object]] = [
        [placement.run.result.method, site, label, float(x), float(y)]
        for placement in placed
        for (x, y), label, site in zip(placement.points, placement.classes, placement.sites, strict=True)
    ]
    drawn = figure(
        "features",
        plots.placed_samples(
            {
                placement.run.result.method: (placement.points, placement.classes, placement.sites)
                for placement in placed
            }
        ),
        f"Features of samples by class and by site, target {result.target}",
        caption,
        [["method", "site", "class", "x", "y"], *rows],
    )
    return section("features", "How models see the samples", drawn)
