"""The section of a report with all metrics of the last round, and how often scores come true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedshift.evaluation.cautions import majorities
from fedshift.evaluation.records import RunResult, SiteMetric
from fedshift.report import plots
from fedshift.report.averages import mean_site_metrics, pooled_reliability
from fedshift.report.html import escape, grid, paragraph, section
from fedshift.report.table import MISSING

_MOST_NAMED = 20
"""Classes whose samples are counted in a note."""
_COLUMNS: dict[SiteMetric, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "brier": "Brier",
    "calibration_error": "calibration error",
}


def metrics_section(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[str]:
    """A section with all metrics of the last round, if the results have them."""
    if not any(result.targets for result in results):
        return
    shares, lines = majorities(results), []
    for method, target in dict.fromkeys((result.method, result.target) for result in results):
        values = mean_site_metrics([one for one in results if (one.method, one.target) == (method, target)])
        numbers = [shares.get(target), *(values.get(metric) for metric in _COLUMNS)]
        cells = (MISSING if number is None else f"{number:.2f}" for number in numbers)
        lines.append([escape(method), escape(target), *cells])
    support: dict[str, str] = {}
    for result in results:
        for site in result.targets:
            pairs = zip(result.classes[:_MOST_NAMED], site.support, strict=False)
            counts = ", ".join(f"{name} {MISSING if count is None else count}" for name, count in pairs)
            support.setdefault(site.site, f"{site.site}: {counts}")
    note = (
        "Last round, percent, mean over seeds. Most frequent: the accuracy of always saying the target's most frequent "
        "class. Sensitivity and specificity are at the threshold that the sources' held-out samples choose. Brier "
        f"score and calibration error: less is better. Samples of each class: {'; '.join(support.values())}."
    )
    curves = {
        method: points
        for method in methods
        if (points := pooled_reliability([r for r in results if r.method == method]))
    }
    figure = plots.svg(plots.reliability(curves), "How often scores come true, by method")
    caption = "Reliability: samples with a score of 70 % should come true in 70 of 100 cases, as on the thin line."
    yield section(
        "metrics",
        "Further metrics at each target",
        grid(["method", "target", "most frequent", *_COLUMNS.values()], lines) + paragraph(note, "note"),
        f"<figure>{figure}<figcaption>{caption}</figcaption></figure>",
    )
