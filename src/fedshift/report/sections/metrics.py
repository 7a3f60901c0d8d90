"""All metrics of the last round, accuracy by class, and how often scores come true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedshift.evaluation.cautions import baselines
from fedshift.evaluation.metric_entries import ENTRIES, Metric, metrics_of
from fedshift.evaluation.records import RunResult, SiteMetric, shown
from fedshift.report import plots
from fedshift.report.averages import mean_per_class, mean_site_metrics, pooled_reliability
from fedshift.report.measures import MISSING
from fedshift.report.sections.blocks import Block, Cells, Entry, Section, Text, figure, grid, number, section
from fedshift.report.table import Table
from fedshift.text import listed

_MOST_NAMED, _MOST_SENTENCES = 20, 30
"""Classes whose samples are counted in a note."""
_MOST_CLASSES = 20
_NOTES: dict[Metric, tuple[str, str]] = {
    "rmse": (
        "mean of the sources",
        "Last round, mean over seeds. RMSE and MAE are in the label's unit, and less is better. Mean of the sources: "
        "the RMSE of always saying the mean that the label has at the sources. R² compares with the target's own mean.",
    ),
    "concordance": ("chance", "Last round, percent, mean over seeds. Harrell's concordance; chance is 50."),
    "label_accuracy": (
        "most frequent answers",
        "Last round, percent, mean over seeds. AUROC, AUPRC and F1 are means over labels. Most frequent answers: the "
        "label accuracy of always saying the more frequent answer to each label.",
    ),
}
"""The name of the baseline, and the note below the numbers, of tasks without classes."""


def metrics_section(results: Sequence[RunResult], methods: Sequence[str]) -> Section | None:
    """All metrics of the last round; None if the results have none."""
    if not any(result.targets for result in results):
        return None
    metric = results[0].metric
    shares = baselines(results)
    at: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        at.setdefault((result.method, result.target), []).append(result)
    means = {where: mean_site_metrics(those) for where, those in at.items()}
    columns = {  # several classes have no sensitivity and no specificity
        name: title
        for name, title in columns_of(metric).items()
        if any(values.get(name) is not None for values in means.values())
    }
    lines: list[Cells] = []
    for (method, target), values in means.items():
        told = [(metric, shares.get(target)), *((name, values.get(name)) for name in columns)]
        lines.append([method, target, *(_entry(name, value) for name, value in told)])
    if metric in _NOTES:
        baseline, note = _NOTES[metric]
        head = ["method", "target", baseline, *columns.values()]
        notes = [note, *_base_rates(results)]
        return section(
            "metrics", "Further metrics at each target", grid("Metrics of the last round", head, lines, notes)
        )
    threshold = (
        " Sensitivity and specificity are at the threshold that the sources' held-out samples choose."
        if {"sensitivity", "specificity"} & columns.keys()
        else ""
    )
    note = (
        "Last round, percent, mean over seeds. Most frequent: the accuracy of always saying the target's most frequent "
        f"class.{threshold} Brier score and calibration error: less is better."
    )
    head = ["method", "target", "most frequent", *columns.values()]
    return section(
        "metrics",
        "Further metrics at each target",
        grid("Metrics of the last round", head, lines, [note, *_class_counts(results)], "classes"),
        *_reliability(results, methods),
    )


def columns_of(metric: Metric) -> dict[SiteMetric, str]:
    """The page's columns of a task, by the metric of its rounds. Pixels of masks are classes."""
    names = metrics_of("accuracy" if metric == "dice" else metric)
    return {name: ENTRIES[name].column or ENTRIES[name].title for name in names}


def _entry(metric: str, value: float | None) -> Entry:
    return Entry(MISSING) if value is None else Entry(shown(metric, value), value=value)


def _class_counts(results: Sequence[RunResult]) -> Iterator[str]:
    """How many of a target's samples are of each class; targets with equal numbers share a sentence."""
    counts: dict[str, str] = {}
    for result in results:
        for site in result.targets:
            pairs = zip(result.classes[:_MOST_NAMED], site.support, strict=False)
            named = ", ".join(f"{MISSING if count is None else f'{count:,}'} of {name}" for name, count in pairs)
            if named:
                counts.setdefault(site.site, named)
    for named in list(dict.fromkeys(counts.values()))[:_MOST_SENTENCES]:
        yield f"Samples at {listed([site for site, found in counts.items() if found == named])}: {named}."


def _base_rates(results: Sequence[RunResult]) -> Iterator[str]:
    """How many of a target's samples have each label, where there are several."""
    said: dict[str, str] = {}
    for result in results:
        for site in result.targets:
            pairs = zip(result.classes[:_MOST_NAMED], site.support, strict=False)
            rates = ", ".join(
                f"{name} {100 * count / site.samples:.1f} %" for name, count in pairs if count is not None
            )
            if rates:
                said.setdefault(site.site, f"{site.site}: {rates}")
    if said:
        yield f"Base rates: {listed(list(said.values()), sign='; ')}."


def _reliability(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[Block]:
    found = {method: pooled_reliability([run for run in results if run.method == method]) for method in methods}
    curves = {method: points for method, points in found.items() if points}
    if curves:
        rows = [[method, *point] for method, points in curves.items() for point in points]
        yield figure(
            "reliability",
            plots.reliability(curves),
            "How often scores come true, by method",
            "Reliability: samples with a score of 70 % should come true in 70 of 100 cases, as on the thin line.",
            [["method", "mean_score", "came_true", "samples"], *rows],
        )


def unit_of(results: Sequence[RunResult]) -> str:
    """What the page calls a class: "class", for segmentation "structure", for several labels "label"."""
    return {"dice": "structure", "label_accuracy": "label"}.get(results[0].metric, "class")


def classes_section(results: Sequence[RunResult], table: Table) -> Section | None:
    """Accuracy by class, at each method's worst target; None where there are no classes."""
    if results[0].metric in ("rmse", "concordance"):
        return None
    title = f"Per {unit_of(results)}, at each method's worst target"
    lines = []
    for method in table.methods:
        cells = [cell for cell in list(table.cells[method].values())[:-1] if cell is not None]
        if not cells:
            continue
        worst = (max if table.measure.less_is_better else min)(cells, key=lambda cell: cell.row.mean).row.target
        runs = [result for result in results if result.method == method and result.target == worst]
        lines.append((method, worst, mean_per_class(runs)))
    classes = results[0].classes
    if any(result.classes != classes for result in results) or not any(accuracies for *_, accuracies in lines):
        text = "No accuracies per class were recorded for one common list of classes."
        return section("classes", title, Text(text, "note"))
    shown = list(range(len(classes)))
    note = "Last round: percent of a class's samples recognised, mean over seeds; – where the target lacks the class."
    if unit_of(results) == "structure":
        note = "Last round: Dice coefficient of each structure in percent, mean over seeds."
    if unit_of(results) == "label":
        note = "Last round: percent of samples for which each label is right, mean over seeds."
    if len(classes) > _MOST_CLASSES:
        hardest = sorted(
            shown, key=lambda index: min((a[index] for *_, a in lines if a.get(index) is not None), default=101)
        )
        shown = sorted(hardest[:_MOST_CLASSES])
        note += f" The {_MOST_CLASSES} hardest of {len(classes)} classes."
    body: list[Cells] = [
        [method, worst, *(_tinted(accuracies.get(index)) for index in shown)] for method, worst, accuracies in lines
    ]
    head = ["method", "target", *(classes[index] for index in shown)]
    return section("classes", title, grid("Recognised, %", head, body, [note], "classes"))


def _tinted(accuracy: float | None) -> Entry:
    return number(accuracy, 0) if accuracy is None else number(accuracy, 0, miss=round(0.7 * (100 - accuracy)))
