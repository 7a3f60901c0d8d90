"""Writes a table for a terminal, and in Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedshift.evaluation.summary import AVERAGE
from fedshift.report.folding import Folded
from fedshift.report.measures import MISSING
from fedshift.report.table import Cell, Table
from fedshift.text import csv_text, escape_latex, escape_markdown, json_text, pipes, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text


def terminal(table: Table) -> RenderableType:
    """The table for a `rich.console.Console`.

    In a narrow terminal it stands on its side, if it fits in that way, or else in blocks of its columns.
    """
    from rich.console import Group

    return Group(*(part for part_table in (table, *table.more) for part in _with_title(part_table)))


def _with_title(table: Table) -> Iterable[RenderableType]:
    from rich.text import Text

    if table.measure.title:
        yield Text(table.measure.title, style="bold")
    yield _Fitting(table)
    yield from (Text(printable(note), style="dim") for note in table.sentences)


@dataclass(frozen=True)
class _Fitting:
    """The matrix, upright or on its side."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        methods, columns, cells = self.table.methods, self.table.columns, self.table.cells
        upright = Folded(
            ["method", *columns],
            [[self.table.label(name), *(_rich_entry(cells[name][column]) for column in columns)] for name in methods],
            ruled=True,
        )
        aside = Folded(
            ["target", *map(self.table.label, methods)],
            [[column, *(_rich_entry(cells[name][column]) for name in methods)] for column in columns],
            ruled=True,
        )
        if console.is_terminal and len(upright.blocks(console, options)) > 1:
            yield aside if len(aside.blocks(console, options)) == 1 else upright
        else:
            yield upright


def _rich_entry(cell: Cell | None) -> Text:
    from rich.text import Text

    if cell is None:
        return Text(MISSING, style="dim")
    return Text.assemble((cell.mean, "bold" if cell.best else ""), (f" ±{cell.error}" if cell.error else "", "dim"))


def markdown(table: Table) -> str:
    """The table in Markdown with its notes below, then further tables with their titles."""
    return "\n".join(map(_part, (table, *table.more)))


def markdown_entry(cell: Cell | None) -> str:
    """An entry in Markdown: the best is bold."""
    if cell is None:
        return MISSING
    mean = cell.mean.replace("*", "\\*")
    return (f"**{mean}**" if cell.best else mean) + (f" ± {cell.error}" if cell.error else "")


def _part(table: Table) -> str:
    head = ["method", *map(escape_markdown, table.columns)]
    rows = (
        [escape_markdown(table.label(name)), *map(markdown_entry, table.cells[name].values())] for name in table.methods
    )
    title = [f"**{escape_markdown(table.measure.title)}**"] if table.measure.title else []
    return "\n\n".join([*title, pipes(head, rows), *map(escape_markdown, table.sentences)]) + "\n"


def latex(table: Table) -> str:
    """A LaTeX `table` environment for each table, the average first, its notes below. Needs the package booktabs."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(
        _environment(part_table) for part_table in (table, *table.more)
    )


_LONGEST_IN_A_CAPTION = 60
"""Letters of a first note; a longer one stands below the table."""


def _environment(table: Table) -> str:

    def entry(cell: Cell | None) -> str:
        if cell is None:
            return "--"
        return (rf"\textbf{{{cell.mean}}}" if cell.best else cell.mean) + (
            rf" $\pm$ {cell.error}" if cell.error else ""
        )

    columns = sorted(table.columns, key=lambda column: column != AVERAGE)  # stable: the targets keep their order
    title = table.measure.title or table.measure.name
    first, *rest = (*table.sentences, "")
    if len(first) > _LONGEST_IN_A_CAPTION:
        first, rest = "", [first, *rest]
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\caption{" + " ".join(map(escape_latex, filter(None, [f"{title}.", first]))) + "}",
        r"\label{tab:" + re.sub(r"\W+", "-", title.lower()).strip("-") + "}",
        r"\begin{tabular}{l" + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join(["method", *map(escape_latex, columns)]) + r" \\",
        r"\midrule",
        *(
            " & ".join([escape_latex(table.label(name)), *(entry(table.cells[name][column]) for column in columns)])
            + r" \\"
            for name in table.methods
        ),
        r"\bottomrule",
        r"\end{tabular}",
        *([r"\par\footnotesize " + " ".join(map(escape_latex, filter(None, rest)))] if any(rest) else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_json(table: Table) -> str:
    """The rows as a JSON list, with the fields of `Row`, or of `PairRow` where both sides are measured, and badges."""
    return json_text(table.plain_rows(), indent=2) + "\n"


def as_csv(table: Table) -> str:
    """The rows as `as_json` has them, one line each. The values of the seeds share a cell, with spaces between them."""
    rows = table.plain_rows()
    head = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([head, *([_csv_cell(row.get(name)) for name in head] for row in rows)])


def _csv_cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "latex": latex, "csv": as_csv, "json": as_json}
"""The plain-text formats. `terminal` returns an object that rich prints."""
