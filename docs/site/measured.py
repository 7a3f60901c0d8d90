"""What the committed results say about each method, beside the published rows."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError
from fedshift.report.collect import Collected, collect
from fedshift.report.report import report_of
from fedshift.report.table_formats import markdown_entry
from fedshift.text import escape_markdown, pipes
from summarise import PUBLISHED


def read(benchmarks: Path) -> dict[str, str]:
    """Method → its rows of every committed experiment, as Markdown."""
    published = json.loads((benchmarks / "published.json").read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = defaultdict(list)
    for folder in sorted((benchmarks / "results").iterdir()):
        if not (folder / "runs.parquet").is_file():
            continue  # results of another form, such as of an audit
        try:
            found = collect(folder)
            rows = rows_of(found)
        except FedshiftError as error:
            raise SystemExit(f"{folder.name}: {error}") from None
        for method, text in rows.items():
            beside = published_row(method, published.get(PUBLISHED.get(folder.name, ""), {}))
            sections[method].append(f"### {folder.name.replace('_', ' ')}\n\n{text}{beside}")
    return {method: "\n".join(texts) for method, texts in sections.items()}


def rows_of(found: Collected) -> dict[str, str]:
    """Method → a table of its rows in one experiment; a method has several if it ran with several settings."""
    table = report_of(found).table
    names = {run.method: str(run.options["method"]["name"]) for run in found.results}
    rows: dict[str, list[list[str]]] = {}
    for label in filter(names.__contains__, table.methods):
        cells = [markdown_entry(cell and replace(cell, best=False)) for cell in table.cells[label].values()]
        rows.setdefault(names[label], []).append([escape_markdown(label), *cells])
    head = ["method", *map(escape_markdown, table.columns)]
    seeds = max(len({run.seed for run in found.results if run.method == label}) for label in names)
    note = f"\n{table.measure.title or 'Accuracy in percent, last round'}; n = {seeds} seed(s)."
    return {name: f"{pipes(head, lines)}\n{note}\n" for name, lines in rows.items()}


def published_row(method: str, entry: Mapping[str, Any]) -> str:
    """The published row of a method, as a table with its source, or ""."""
    for name, cells in entry.get("rows", {}).items():
        if plain(name.partition("(")[0]) == plain(method):
            head = "| published | " + " | ".join(cells) + " |\n|---" + "|---:" * len(cells) + "|\n"
            values = [
                f"{mean:.2f}" + (f" ± {error:.2f}" if error is not None else "") for mean, error in cells.values()
            ]
            return f"\n{head}| {name} | " + " | ".join(values) + f" |\n\nPublished: {entry['source']}.\n"
    return ""


def plain(name: str) -> str:
    """A name without what papers write in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
