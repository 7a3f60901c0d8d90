"""All metrics of the last round, accuracy by class, and how often scores come true."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.evaluation.metric_entries import ENTRIES, Metric, metrics_of
from fedshift.evaluation.records import SiteMetric, format_metric
from fedshift.report import plots
from fedshift.report.details import ByClass, Metrics
from fedshift.report.measures import MISSING
from fedshift.report.sections.blocks import Block, Cells, Entry, Section, Text, figure, grid, number, section
from fedshift.text import join_names

_MOST_SENTENCES = 30
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


def metrics_section(measured: Metrics | None) -> Section | None:
    """All metrics of the last round; None if the results have none."""
    if measured is None:
        return None
    columns = {  # several classes have no sensitivity and no specificity
        name: title
        for name, title in columns_of(measured.metric).items()
        if any(values.get(name) is not None for values in measured.means.values())
    }
    lines: list[Cells] = []
    for (method, target), values in measured.means.items():
        entries = [(measured.metric, measured.baselines.get(target)), *((name, values.get(name)) for name in columns)]
        lines.append([method, target, *(_entry(name, value) for name, value in entries)])
    title = "Further metrics at each target"
    if measured.metric in _NOTES:
        baseline, note = _NOTES[measured.metric]
        head = ["method", "target", baseline, *columns.values()]
        return section("metrics", title, grid("Metrics of the last round", head, lines, [note, *_base_rates(measured)]))
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
    metrics = grid("Metrics of the last round", head, lines, [note, *_class_counts(measured)], "classes")
    return section("metrics", title, metrics, *_reliability(measured))


def columns_of(metric: Metric) -> dict[SiteMetric, str]:
    """The page's columns of a task, by the metric of its rounds. Pixels of masks are classes."""
    names = metrics_of("accuracy" if metric == "dice" else metric)
    return {name: ENTRIES[name].column or ENTRIES[name].title for name in names}


def _entry(metric: str, value: float | None) -> Entry:
    return Entry(MISSING) if value is None else Entry(format_metric(metric, value), value=value)


def _class_counts(measured: Metrics) -> Iterator[str]:
    """How many of a target's samples are of each class; targets with equal numbers share a sentence."""
    counts = {
        site: ", ".join(f"{MISSING if count is None else f'{count:,}'} of {name}" for name, count in named)
        for site, named in measured.counts.items()
    }
    for named in list(dict.fromkeys(counts.values()))[:_MOST_SENTENCES]:
        yield f"Samples at {join_names([site for site, text in counts.items() if text == named])}: {named}."


def _base_rates(measured: Metrics) -> Iterator[str]:
    """How many of a target's samples have each label, where there are several."""
    rates = [
        f"{site}: {', '.join(f'{name} {share:.1f} %' for name, share in named)}"
        for site, named in measured.rates.items()
    ]
    if rates:
        yield f"Base rates: {join_names(rates, sign='; ')}."


def _reliability(measured: Metrics) -> Iterator[Block]:
    if curves := measured.reliability:
        rows = [[method, *point] for method, points in curves.items() for point in points]
        yield figure(
            "reliability",
            plots.reliability(curves),
            "How often scores come true, by method",
            "Reliability: samples with a score of 70 % should come true in 70 of 100 cases, as on the thin line.",
            [["method", "mean_score", "came_true", "samples"], *rows],
        )


def classes_section(by_class: ByClass | None, unit: str) -> Section | None:
    """Accuracy by class, at each method's worst target; None where there are no classes."""
    if by_class is None:
        return None
    title = f"Per {unit}, at each method's worst target"
    if not by_class.lines:
        text = "No accuracies per class were recorded for one common list of classes."
        return section("classes", title, Text(text, "note"))
    note = "Last round: percent of a class's samples recognised, mean over seeds; – where the target lacks the class."
    if unit == "structure":
        note = "Last round: Dice coefficient of each structure in percent, mean over seeds."
    if unit == "label":
        note = "Last round: percent of samples for which each label is right, mean over seeds."
    if len(by_class.classes) > len(by_class.hardest):
        note += f" The {len(by_class.hardest)} hardest of {len(by_class.classes)} classes."
    body: list[Cells] = [
        [method, worst, *(_tint(accuracies.get(index)) for index in by_class.hardest)]
        for method, worst, accuracies in by_class.lines
    ]
    head = ["method", "target", *(by_class.classes[index] for index in by_class.hardest)]
    return section("classes", title, grid("Recognised, %", head, body, [note], "classes"))


def _tint(accuracy: float | None) -> Entry:
    return number(accuracy, 0) if accuracy is None else number(accuracy, 0, miss=round(0.7 * (100 - accuracy)))
