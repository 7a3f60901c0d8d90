"""The report of an experiment: one HTML page that fetches nothing and needs no knowledge of fedshift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedshift.evaluation.stored import ROUNDS
from fedshift.extras import reports_installed
from fedshift.files import write_bytes
from fedshift.report import plots
from fedshift.report.advice.verdict import Verdict, verdict
from fedshift.report.collect import Collected, read_rounds
from fedshift.report.html import render
from fedshift.report.roles import Role, role_of
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
from fedshift.report.table import Table, table_of

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


def write_page(folder: Path, collected: Collected, samples: ShownSamples | None = None) -> Path:
    """Write `report.html` in ``folder``, atomically. Only the user may read a page with ``samples``.

    Returns:
        Its path.

    Raises:
        UserError: the page cannot be written there, or a `rounds.jsonl` is corrupt.
    """
    reports_installed("the page")
    path = folder / PAGE
    write_bytes(path, page(collected, samples).encode(), private=samples is not None)
    return path


def page(collected: Collected, samples: ShownSamples | None = None) -> str:
    """The page as text. It depends only on the files of ``collected``, and on the data if ``samples`` are shown."""
    alone = without_labels_section(collected)
    if not collected.runs and alone is not None:  # no target has labels, so nothing was measured
        sections = [alone, warnings_section([run.result for run in collected.unmeasured])]
        return render(
            "page.html", name=collected.name, question="", facts=(), sections=sections, light=LIGHT, dark=DARK
        )
    table = table_of(collected, "last")
    found = verdict(collected, table)
    roles = {result.method: role_of(result) for result in collected.results}
    return render(
        "page.html",
        name=collected.name,
        question=found.question,
        facts=facts(collected),
        sections=[verdict_section(found, table, roles), *_sections(collected, table, found, roles, samples)],
        light=LIGHT,
        dark=DARK,
    )


def _sections(
    collected: Collected, table: Table, found: Verdict, roles: Mapping[str, Role], samples: ShownSamples | None
) -> Iterator[Section]:
    results, runs = collected.results, collected.runs
    records = {run.folder: read_rounds(run.folder / ROUNDS) for run in runs}
    gains = gains_grid(table)
    if (estimated := without_labels_section(collected)) is not None:
        yield estimated
    yield result_section(collected, table, roles)
    if gains is not None:
        yield section("gains", "What each site gains", gains)
    further = [
        below_section(table, roles),
        rows_section(collected, roles),
        metrics_section(results, table.methods),
        predictions_section(runs, found.method, samples),
        None if samples is None else features_section(runs, table.methods, samples),
        curves_section(collected.seen, records, table),
        other_section(collected, roles),
        differences_section(found, table),
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
