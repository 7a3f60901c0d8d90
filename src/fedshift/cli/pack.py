"""``fedshift pack`` and ``fedshift unpack``: finished runs as a few small files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds several.", metavar="DIR")]


def pack(folder: Folder) -> None:
    """Move finished runs into three small files that can be committed. Models stay where they are.

    The files are experiment.yaml, runs.csv and rounds.jsonl.xz.

    Packed runs count as finished, and every command reads them. Losses, weights, seconds of rounds and accuracies of
    classes keep five digits. Pack again to add runs that finished since, or to rewrite files of an older version.
    """
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        change = packing.pack(experiment)
        left = f", {change.left} unfinished runs unchanged" if change.left else ""
        renewed = f", {change.renewed} packed runs written in today's format" if change.renewed else ""
        typer.echo(f"{experiment.name}: {change.moved} runs packed{renewed}{left}")


def unpack(folder: Folder) -> None:
    """Move each packed run back into a folder of its own."""
    from fedshift.evaluation import packing

    for experiment in packing.experiments_below(folder):
        typer.echo(f"{experiment.name}: {packing.unpack(experiment).moved} runs unpacked")
