"""``fedshift results``: pack finished runs into a few small files, and unpack them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

results = typer.Typer(
    help="Finished runs in three small files an experiment, to be committed; and back.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Folder = Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds several.", metavar="DIR")]


@results.command()
def pack(folder: Folder) -> None:
    """Move finished runs into experiment.yaml, runs.csv and rounds.jsonl.xz; models stay where they are.

    Packed runs count as finished: run, table and all others read them. Pack again to add what was run since.
    """
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        change = packing.pack(experiment)
        left = f", {change.left} unfinished left as they are" if change.left else ""
        typer.echo(f"{experiment.name}: {change.moved} runs packed{left}")


@results.command()
def unpack(folder: Folder) -> None:
    """Move packed runs into a folder each again."""
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        typer.echo(f"{experiment.name}: {packing.unpack(experiment).moved} runs unpacked")
