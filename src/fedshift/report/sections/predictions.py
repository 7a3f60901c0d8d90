"""What stored predictions show: which classes are confused, ROC curves, and the worst mistakes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.evaluation.stored import check_sum
from fedshift.report import plots
from fedshift.report.collect import FinishedRun
from fedshift.report.measures import MISSING
from fedshift.report.roles import role_of
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
from fedshift.report.sections.samples import ShownSamples

_TITLE = "Which mistakes are made"
_MOST_CLASSES = 20
_MOST_TARGETS = 6
_MISTAKES = 15
_MOST_PLACED = 4
_POINTS = 60
"""Points of a ROC curve that are drawn."""


@dataclass(frozen=True)
class Predicted:
    """What one run predicted at its target.

    Attributes:
        run: the run.
        sites, rows, names: of each sample: its site, its row there, and its id, or its row if the data have no ids.
        labels, predicted: class numbers (n,).
        scores: probabilities (n, classes).
    """

    run: FinishedRun
    sites: Sequence[str]
    rows: Sequence[int]
    names: Sequence[str]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    scores: NDArray[np.float64]


def predictions_section(
    runs: Sequence[FinishedRun], method: str | None, samples: ShownSamples | None = None
) -> Section | None:
    """What the stored predictions show, the mistakes of ``method``; None for tasks that are no classification.

    Where there are none, it says why.

    With ``samples`` the samples themselves are shown.
    """
    classes = runs[0].result.classes
    if runs[0].result.metric != "accuracy" or any(run.result.classes != classes for run in runs):
        return None
    found = [predicted for run in runs if (predicted := _read(run, classes)) is not None]
    if not found:
        text = "No predictions per sample were kept, so there are no confusion matrices, ROC curves or worst mistakes."
        return section("predictions", _TITLE, Text(text, "note"))
    blocks: list[Block] = []
    if len(classes) <= _MOST_CLASSES:
        blocks += _confusion(found, classes)
    blocks += _roc(found, classes)
    chosen = [one for one in found if one.run.result.method == method]
    if chosen:
        blocks += _mistakes(chosen, classes, samples)
    return section("predictions", _TITLE, *blocks)


def _read(run: FinishedRun, classes: Sequence[str]) -> Predicted | None:
    """A run's predictions at its target; None if they were not kept."""
    path = run.folder / PREDICTIONS
    if not path.exists():
        return None
    check_sum(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, filters=[("part", "=", "target")])
        columns = {name: table.column(name).to_pylist() for name in ("site", "row", "id", "label", "predicted")}
        scores = np.stack([table.column(f"score_{name}").to_numpy() for name in classes], axis=1)
        place = {name: number for number, name in enumerate(classes)}
        labels, predicted = ([place[name] for name in columns[what]] for what in ("label", "predicted"))
    except (OSError, KeyError, pa.ArrowException):
        return None  # of another program, or damaged: the page has the numbers of result.json
    names = [name or f"row {row}" for name, row in zip(columns["id"], columns["row"], strict=True)]
    return Predicted(
        run, columns["site"], columns["row"], names, np.array(labels, int), np.array(predicted, int), scores
    )


def _confusion(found: Sequence[Predicted], classes: Sequence[str]) -> Iterator[Block]:
    for method in dict.fromkeys(one.run.result.method for one in found):
        counts: NDArray[Any] = np.zeros((len(classes), len(classes)), int)
        for one in found:
            if one.run.result.method == method:
                np.add.at(counts, (one.labels, one.predicted), 1)
        totals = counts.sum(1)
        rows: list[Cells] = [
            [name, f"{totals[at]:,}", *(_share(counts[at, to], totals[at], at == to) for to in range(len(classes)))]
            for at, name in enumerate(classes)
        ]
        head = ["true class", "predictions", *classes]
        yield grid(f"Confusion matrix of {method}", head, rows, css="confusion")
    yield Text(
        "Each row is a true class: percent of its samples that were called what the column says, all targets and seeds "
        "together. The stronger a cell is coloured, the more is wrong.",
        "note",
    )


def _share(count: int, total: int, right: bool) -> Entry:
    if not total:
        return number(None)
    share = 100 * count / total
    return number(share, 1, best=right, miss=round(0.7 * (100 - share if right else share)))


def _roc(found: Sequence[Predicted], classes: Sequence[str]) -> Iterator[Block]:
    """A ROC curve for each target and method, over the samples of all seeds."""
    curves: dict[str, dict[str, plots.Curve]] = {}
    for target in list(dict.fromkeys(one.run.result.target for one in found))[:_MOST_TARGETS]:
        for method in dict.fromkeys(one.run.result.method for one in found):
            here = [one for one in found if (one.run.result.method, one.run.result.target) == (method, target)]
            labels = np.concatenate([one.labels for one in here]) if here else np.empty(0, np.int64)
            scores = np.concatenate([one.scores for one in here]) if here else np.empty((0, 1))
            if len(np.unique(labels)) >= 2 and np.isfinite(scores).all():
                curves.setdefault(target, {})[method] = _mean_roc(labels, scores)
    which = classes[1] if len(classes) == 2 else "a class, mean over the classes,"
    if curves:
        yield figure(
            "roc",
            plots.operating_curves(curves),
            "ROC curves by target and method",
            f"ROC: what share of {which} is recognised, for each share of false alarms; samples of all seeds.",
            curve_rows(
                ["target", "method", "false_alarms", "recognised", "standard_deviation"],
                {(target, method): curve for target, lines in curves.items() for method, curve in lines.items()},
            ),
            title="ROC curves",
        )


def _mean_roc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> plots.Curve:
    """The ROC curve of the second of two classes; of more classes the mean over those of each against all others."""
    from sklearn.metrics import roc_curve

    if scores.shape[1] == 2:
        wrong, right, _ = roc_curve(labels, scores[:, 1])
        at = np.unique(np.linspace(0, len(wrong) - 1, _POINTS).round().astype(int))
        return (100 * wrong[at]).tolist(), (100 * right[at]).tolist(), None
    places = np.linspace(0, 1, _POINTS)
    single = [roc_curve(labels == one, scores[:, one])[:2] for one in np.unique(labels)]
    mean = np.mean([np.interp(places, wrong, right) for wrong, right in single], axis=0)
    return [0.0, *(100 * places).tolist()], [0.0, *(100 * mean).tolist()], None


def _mistakes(chosen: Sequence[Predicted], classes: Sequence[str], samples: ShownSamples | None) -> Iterator[Block]:
    """The samples that were wrong with the highest mean score of the wrong class."""
    seen: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
    names: dict[tuple[str, int], str] = {}
    for one in chosen:
        surest = one.scores[np.arange(len(one.labels)), one.predicted]
        for at, place in enumerate(zip(one.sites, one.rows, strict=True)):
            names[place] = one.names[at]
            seen.setdefault(place, []).append((int(one.labels[at]), int(one.predicted[at]), float(surest[at])))
    wrong = []
    for (site, row), said in seen.items():
        scores = [score if label != predicted else 0.0 for label, predicted, score in said]
        if any(scores):
            label, predicted, _ = max(said, key=lambda one: one[2] if one[0] != one[1] else 0.0)
            times = sum(one[0] != one[1] for one in said)
            wrong.append((float(np.mean(scores)), site, row, label, predicted, times, len(said)))
    wrong.sort(key=lambda one: (-one[0], one[1], one[2]))
    method = chosen[0].run.result.method
    rows: list[Cells] = [
        [
            names[site, row],
            *([] if samples is None else [_itself(samples, site, row, classes[label])]),
            site,
            classes[label],
            classes[predicted],
            number(100 * score, 0),
            f"{times} of {runs}",
        ]
        for score, site, row, label, predicted, times, runs in wrong[:_MISTAKES]
    ]
    if rows:
        shown = [] if samples is None else ["contents"]
        head = ["sample", *shown, "site", "true class", "called", "score, %", "seeds"]
        note = "The samples whose wrong class had the highest score, mean over seeds (0 where a seed was right)."
        yield grid(f"Worst mistakes of {method}", head, rows, [note], "facts")


def _itself(samples: ShownSamples, site: str, row: int, label: str) -> Entry:
    """A sample as it is: a picture, or the columns of a table."""
    picture = samples.picture(site, row)
    if picture is None:
        return Entry(samples.words(site, row) or MISSING)
    return Entry("", title=f"a sample of {label} at {site}", picture=base64.b64encode(picture).decode())


def features_section(runs: Sequence[FinishedRun], methods: Sequence[str], samples: ShownSamples) -> Section | None:
    """t-SNE of the features of samples by class and by site, at the first target; None if there is no model."""
    if runs[0].result.metric != "accuracy":
        return None
    first = {method: next(run for run in runs if run.result.method == method) for method in methods}
    one_model = [run for run in first.values() if role_of(run.result) != "alone"]
    placed = [found for run in one_model[:_MOST_PLACED] if (found := samples.placed(run)) is not None]
    if not placed:
        return None
    result = placed[0].run.result
    caption = (
        f"t-SNE of the last features before the classifier: up to 60 training samples of each source and measured "
        f"ones of the target {result.target}, seed {result.seed}. Near points are alike; far distances mean nothing. A "
        "model that generalises parts the classes and mixes the sites."
    )
    rows: list[Sequence[object]] = [
        [one.run.result.method, site, label, float(x), float(y)]
        for one in placed
        for (x, y), label, site in zip(one.points, one.classes, one.sites, strict=True)
    ]
    drawn = figure(
        "features",
        plots.placed_samples({one.run.result.method: (one.points, one.classes, one.sites) for one in placed}),
        f"Features of samples by class and by site, target {result.target}",
        caption,
        [["method", "site", "class", "x", "y"], *rows],
    )
    return section("features", "How models see the samples", drawn)
