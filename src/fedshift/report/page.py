"""The report of an experiment: one HTML page that fetches nothing and needs no knowledge of fedshift."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedshift.extras import reports_installed
from fedshift.files import write_bytes
from fedshift.report import plots
from fedshift.report.advice.verdict import Verdict
from fedshift.report.details import Details
from fedshift.report.html import render
from fedshift.report.report import Report
from fedshift.report.sections.about_runs import cost_section, settings_section, warnings_section
from fedshift.report.sections.blocks import Section, section
from fedshift.report.sections.metrics import classes_section, metrics_section
from fedshift.report.sections.over_rounds import curves_section, weights_section
from fedshift.report.sections.predictions import features_section, predictions_section
from fedshift.report.sections.results import (
    below_section,
    differences_section,
    gains_grid,
    grids,
    other_section,
    result_section,
    rows_section,
    verdict_section,
    without_labels_section,
)
from fedshift.report.table import Table

PAGE = "report.html"
LIGHT = {
    **{f"s{number}": color for number, color in enumerate(plots.SERIES)},
    "ink": plots.INK,
    "grid": plots.GRID,
    "paper": plots.PAPER,
    "faint": "#5c6773",
    "wash": "#f4f6f8",
    "miss-ink": "#c8372d",
}
"""The page's colours by the names that its style sheet and its figures have for them."""
DARK = {
    **{f"s{number}": color for number, color in enumerate(plots.DARK)},
    "ink": "#e4e8ec",
    "grid": "#39424c",
    "paper": "#14191f",
    "faint": "#9aa5b1",
    "wash": "#1d242c",
    "miss-ink": "#c9473b",
}
"""The same on dark screens."""


def write_page(folder: Path, report: Report) -> Path:
    """Write `report.html` in ``folder``, atomically. Only the user may read a page that shows samples.

    Returns its path. UserError if the page cannot be written there.
    """
    reports_installed("the page")
    path, details = folder / PAGE, report.details
    private = details is not None and details.samples_shown
    write_bytes(path, page(report).encode(), private=private)
    return path


def page(report: Report) -> str:
    """The page as text, of a `whole_report`."""
    verdict, details = report.verdict, report.details
    if verdict is None or details is None:  # nothing was measured
        sections = [without_labels_section(report), warnings_section(report.warnings)]
    else:
        sections = [verdict_section(report, verdict), *_sections(report, verdict, details)]
    return render(
        "page.html",
        name=report.name,
        question="" if verdict is None or details is None else verdict.question,
        facts=() if details is None else details.facts,
        sections=[section for section in sections if section is not None],
        light=LIGHT,
        dark=DARK,
    )


def _sections(report: Report, verdict: Verdict, details: Details) -> Iterator[Section | None]:
    yield without_labels_section(report)
    yield result_section(report.table, report.roles)
    if (gains := gains_grid(details.gains, report.table.methods)) is not None:
        yield section("gains", "What each site gains", gains)
    yield below_section(report.table, report.roles)
    yield rows_section(report.used, details)
    yield metrics_section(details.metrics)
    yield predictions_section(details.predictions)
    yield features_section(details.placed)
    yield curves_section(details, report.targets)
    yield other_section(report)
    yield differences_section(verdict, report.table)
    yield weights_section(details.weights)
    yield cost_section(details.costs)
    yield classes_section(details.classes, details.unit)
    yield warnings_section(report.warnings)
    yield settings_section(report.name, details.settings)


def table_html(table: Table) -> str:
    """The table as HTML, with its notes and the further tables below it."""
    return render("grids.html", grids=grids(table))
