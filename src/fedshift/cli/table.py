"""``fedshift table``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from fedshift.cli.console import safe_console
from fedshift.errors import UserError, nearest
from fedshift.evaluation.selection import selection_rule
from fedshift.report.collect import collect
from fedshift.report.pictures.of_table import picture
from fedshift.report.table import Table, table_of
from fedshift.report.table_formats import FORMATS, terminal


def print_table(folder: Path, format: str, select: str, metric: str = "", only: int = 0) -> None:
    """Print the table of the finished runs below ``folder``; ``only``: the number of one of its parts, from 1; 0: all.

    Raises:
        UserError: the format, the selection rule, the metric or the part does not exist, or there is no finished run.
    """
    known = ["terminal", *FORMATS, "svg"]
    if format not in known:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, known)}")
    collected, rule = collect(folder), selection_rule(select).name
    if format == "svg":
        typer.echo(picture(collected, rule, metric), nl=False)
        return
    table = part(table_of(collected, rule, metric), only)
    if format in FORMATS:
        typer.echo(FORMATS[format](table), nl=format != "csv")
        return

    safe_console().print(terminal(table))


def part(table: Table, number: int) -> Table:
    """The table with all below it (0), or one of them alone, counted from 1.

    Raises:
        UserError: there is no such table.
    """
    tables = (table, *table.more)
    if not 0 <= number <= len(tables):
        titles = "; ".join(f"{at} {one.measure.title or one.measure.name}" for at, one in enumerate(tables, 1))
        raise UserError(f"--only: there is no table {number}; there are {titles}")
    return replace(tables[number - 1], more=()) if number else table
