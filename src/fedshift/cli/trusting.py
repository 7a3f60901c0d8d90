"""Asks the person at the terminal before code that a file names is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedshift import trust as trusted
from fedshift.text import printable


@contextmanager
def may_ask(trust: bool) -> Iterator[None]:
    """Within it, code that is not trusted yet is shown. ``trust`` is a yes; else who sits at a terminal is asked."""

    def ask(code: trusted.Code) -> bool:
        typer.echo(printable(code.shown), err=True)
        if trust:
            return True
        return sys.stdin.isatty() and typer.confirm("Do you trust it?", default=False, err=True)

    with trusted.asks(ask):
        yield
