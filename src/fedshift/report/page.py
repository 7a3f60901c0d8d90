"""The report of an experiment: one HTML page that fetches nothing and needs no knowledge of fedshift."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedshift.evaluation.stored import ROUNDS
from fedshift.extras import reports_installed
from fedshift.files import write_bytes
from fedshift.report import plots
from fedshift.report.collect import Collected, read_rounds
from fedshift.report.html import render
from fedshift.report.report import Report, report_of
from fedshift.report.sections.about import cost_section, facts, settings_section, warnings_section
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
)
from fedshift.report.sections.samples import ShownSamples
from fedshift.report.sections.without_labels import without_labels_section
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


def write_page(
    folder: Path, collected: Collected, samples: ShownSamples | None = None, report: Report | None = None
) -> Path:
    """Write `report.html` in ``folder``, atomically. Only the user may read a page with ``samples``.

    Returns:
        Its path.

    Raises:
        UserError: the page cannot be written there, or a `rounds.jsonl` is corrupt.
    """
    reports_installed("the page")
    path = folder / PAGE
    write_bytes(path, page(collected, samples, report).encode(), private=samples is not None)
    return path


def page(collected: Collected, samples: ShownSamples | None = None, report: Report | None = None) -> str:
    """The page as text. It depends only on the files of ``collected``, and on the data if ``samples`` are shown."""
    report = report or report_of(collected)
    alone = without_labels_section(collected, report)
    if not collected.runs and alone is not None:  # no target has labels, so nothing was measured
        sections = [alone, warnings_section([run.result for run in collected.unmeasured])]
        return render(
            "page.html", name=collected.name, question="", facts=(), sections=sections, light=LIGHT, dark=DARK
        )
    assert report.verdict is not None
    return render(
        "page.html",
        name=collected.name,
        question=report.verdict.question,
        facts=facts(collected),
        sections=[
            verdict_section(report.verdict, report.table, report.roles),
            *_sections(collected, report, alone, samples),
        ],
        light=LIGHT,
        dark=DARK,
    )


def _sections(
    collected: Collected, report: Report, estimated: Section | None, samples: ShownSamples | None
) -> Iterator[Section]:
    results, runs, table, roles = collected.results, collected.runs, report.table, report.roles
    assert report.verdict is not None
    records = {run.folder: read_rounds(run.folder / ROUNDS) for run in runs}
    gains = gains_grid(table)
    if estimated is not None:
        yield estimated
    yield result_section(table, roles)
    if gains is not None:
        yield section("gains", "What each site gains", gains)
    further = [
        below_section(table, roles),
        rows_section(collected, report.used),
        metrics_section(results, table.methods),
        predictions_section(runs, report.verdict.method, samples),
        None if samples is None else features_section(runs, table.methods, samples),
        curves_section(collected.seen, records, table),
        other_section(collected, report),
        differences_section(report.verdict, table),
        weights_section(runs, records, table.methods),
        cost_section([run.result for run in runs], table.methods),
        classes_section(results, table),
        warnings_section([run.result for run in runs], results),
        settings_section(collected),
    ]
    yield from (one for one in further if one is not None)


def table_html(table: Table) -> str:
    """The table as HTML, with its notes and the further tables below it."""
    return render("grids.html", grids=grids(table))
