"""``fedshift show``: the table of finished runs, and what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from fedshift.cli.console import safe_console
from fedshift.errors import UserError, nearest
from fedshift.evaluation.selection import selection_rule
from fedshift.report.advice.verdict import Verdict
from fedshift.report.advice.words import paragraphs
from fedshift.report.collect import collect
from fedshift.report.report import report_of, verdict_of
from fedshift.report.table import Table
from fedshift.report.table_formats import FORMATS, terminal
from fedshift.report.table_picture import picture
from fedshift.report.watch.live_page import ADDRESS, server
from fedshift.text import json_text


def show(folder: Path, format: str, select: str, metric: str = "", only: int = 0, *, says: bool = True) -> None:
    """Print the table of the finished runs below ``folder``; in the terminal also what they say.

    Args:
        folder: an experiment's folder, or one that holds it.
        only: the number of one part of the table, from 1; 0: all.
        says: in the terminal, the verdict below the table.

    Raises:
        UserError: the format, the selection rule, the metric or the part does not exist, or there is no finished run.
    """
    known = ["terminal", *FORMATS, "svg"]
    if format not in known:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, known)}")
    collected, rule = collect(folder), selection_rule(select).name
    report = report_of(collected, rule, metric)
    if format == "svg":
        typer.echo(picture(report), nl=False)
        return
    table = part(report.table, only)
    if format in FORMATS:
        typer.echo(FORMATS[format](table), nl=format != "csv")
        return
    safe_console().print(terminal(table))
    if says:
        print_paragraphs(report.verdict or verdict_of(collected))


def part(table: Table, number: int) -> Table:
    """The table with all below it (0), or one of them alone, counted from 1. UserError if there is no such table."""
    tables = (table, *table.more)
    if not 0 <= number <= len(tables):
        titles = "; ".join(f"{at} {item.measure.title or item.measure.name}" for at, item in enumerate(tables, 1))
        raise UserError(f"--only: there is no table {number}; there are {titles}")
    return replace(tables[number - 1], more=()) if number else table


def print_verdict(folder: Path, format: str) -> None:
    """Print what the finished runs below ``folder`` say, without the table.

    UserError if the format does not exist, or there is no finished run.
    """
    if format not in ("terminal", "json"):
        raise UserError(f"--format: a verdict has no format '{format}'; {nearest(format, ['terminal', 'json'])}")
    answer = verdict_of(collect(folder))
    if format == "json":
        typer.echo(json_text(answer.plain(), indent=2))
    else:
        print_paragraphs(answer)


def print_paragraphs(answer: Verdict) -> None:
    """Print a verdict in the terminal."""
    console = safe_console()
    if answer.question:
        console.print(answer.question, markup=False, highlight=False)
    for heading, lines in paragraphs(answer):
        console.print(f"\n{heading}", style="bold", markup=False, highlight=False)
        for line in lines:
            console.print(line, markup=False, highlight=False)


def write_report(folder: Path) -> None:
    """Write the page of the finished runs below ``folder``, and print its path.

    UserError if there is no finished run, or the page cannot be written.
    """
    from fedshift.report.collect import collect  # what only watches runs needs no drawings
    from fedshift.report.page import write_page
    from fedshift.report.report import whole_report

    typer.echo(write_page(folder, whole_report(collect(folder))))


def watch(folder: Path, port: int) -> None:
    """Serve the page of ``folder`` to this machine until Ctrl-C.

    UserError if there is no such folder, or the port is taken.
    """
    with server(folder, port) as serving:
        typer.echo(f"http://{ADDRESS}:{serving.server_port}/ shows {folder}; Ctrl-C ends it", err=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended; the runs go on", err=True)
