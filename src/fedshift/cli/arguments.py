"""Options that several commands have."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedshift import trust as trusted
from fedshift.errors import UserError, nearest
from fedshift.text import printable

ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.", metavar="DIR")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set, such as training.rounds=10.", metavar="[KEY.PATH=VALUE]...")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Trust the code of your own that it names; it is shown, and remembered.")
]
Written = Annotated[
    list[str] | None,
    typer.Argument(help="How a table is written, such as data.decimal=,", metavar="[data.FIELD=VALUE]..."),
]
RunOrModel = Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")]
OwnMethod = Annotated[str | None, typer.Option("--method", help="FILE.py:Class, if your own method trained the model.")]
OwnNetwork = Annotated[
    str | None, typer.Option("--network", help="FILE.py:Class, if the model is of your own network.")
]
TextOrJson = Annotated[str, typer.Option("--format", help="terminal or json.")]


def check_format(format: str, known: Sequence[str] = ("terminal", "json")) -> None:
    """Raise UserError if a command has no such format."""
    if format not in known:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, known)}")


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
