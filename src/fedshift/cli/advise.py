"""``fedshift advise``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.cli.console import safe_console
from fedshift.errors import UserError, nearest
from fedshift.report.advice.verdict import verdict
from fedshift.report.advice.words import paragraphs
from fedshift.report.collect import collect
from fedshift.text import json_text


def print_advice(folder: Path, format: str) -> None:
    """Print what the finished runs below ``folder`` say.

    Raises:
        UserError: the format does not exist, or there is no finished run.
    """
    if format not in ("terminal", "json"):
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, ['terminal', 'json'])}")
    found = verdict(collect(folder))
    if format == "json":
        typer.echo(json_text(found.plain(), indent=2))
        return
    console = safe_console()
    if found.question:
        console.print(found.question, markup=False, highlight=False)
    for heading, lines in paragraphs(found):
        console.print(f"\n{heading}", style="bold", markup=False, highlight=False)
        for line in lines:
            console.print(line, markup=False, highlight=False)
