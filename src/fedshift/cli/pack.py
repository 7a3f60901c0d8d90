"""``fedshift pack`` and ``fedshift unpack``: finished runs as a few small files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds several.", metavar="DIR")]


def pack(folder: Folder) -> None:
    """Move finished runs into two files that can be committed. Models stay where they are.

    runs.parquet has a row for each run, rounds.parquet one for each round. Packed runs count as finished, and every
    command reads them. Losses, weights, seconds of rounds and accuracies of classes keep five digits. Pack again to
    add runs that finished since.
    """
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        change = packing.pack(experiment)
        left = f", {change.left} unfinished runs unchanged" if change.left else ""
        typer.echo(f"{experiment.name}: {change.moved} runs packed{left}")


def unpack(folder: Folder) -> None:
    """Move each packed run back into a folder of its own."""
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        typer.echo(f"{experiment.name}: {packing.unpack(experiment).moved} runs unpacked")
