"""``fedshift table``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.cli.console import safe_console
from fedshift.errors import UserError, nearest
from fedshift.evaluation.selection import selection_rule
from fedshift.report.collect import collect
from fedshift.report.pictures.of_table import picture
from fedshift.report.table import table_of
from fedshift.report.table_formats import FORMATS, terminal


def print_table(folder: Path, format: str, select: str, metric: str = "") -> None:
    """Print the table of the finished runs below ``folder``.

    Raises:
        UserError: the format, the selection rule or the metric does not exist, or there is no finished run.
    """
    known = ["terminal", *FORMATS, "svg"]
    if format not in known:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, known)}")
    collected, rule = collect(folder), selection_rule(select).name
    if format == "svg":
        typer.echo(picture(collected, rule, metric), nl=False)
        return
    found = table_of(collected, rule, metric)
    if format in FORMATS:
        typer.echo(FORMATS[format](found), nl=format != "csv")
        return

    safe_console().print(terminal(found))
