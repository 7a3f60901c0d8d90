"""``fedshift report``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.report.collect import collect
from fedshift.report.page import write_page


def write_report(folder: Path) -> None:
    """Write the page of the finished runs below ``folder``, and print its path.

    Raises:
        UserError: there is no finished run, or the page cannot be written.
    """
    typer.echo(write_page(folder, collect(folder)))
