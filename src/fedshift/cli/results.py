"""``fedshift results``: pack finished runs into a few small files, or unpack them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

results = typer.Typer(
    help="Pack an experiment's finished runs into three small files that can be committed, or unpack them.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds several.", metavar="DIR")]


@results.command()
def pack(folder: Folder) -> None:
    """Move finished runs into experiment.yaml, runs.csv and rounds.jsonl.xz. Models stay where they are.

    Packed runs count as finished, and every command reads them. Losses, weights, seconds of rounds and accuracies of
    classes keep five digits. Pack again to add runs that finished since, or to rewrite files of an older version.
    """
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        change = packing.pack(experiment)
        left = f", {change.left} unfinished runs unchanged" if change.left else ""
        renewed = f", {change.renewed} packed runs written in today's format" if change.renewed else ""
        typer.echo(f"{experiment.name}: {change.moved} runs packed{renewed}{left}")


@results.command()
def unpack(folder: Folder) -> None:
    """Move each packed run back into a folder of its own."""
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        typer.echo(f"{experiment.name}: {packing.unpack(experiment).moved} runs unpacked")
