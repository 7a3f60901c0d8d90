"""``fedshift export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.arguments import OwnMethod, OwnNetwork, RunOrModel


def export(
    model: RunOrModel,
    to: Annotated[str, typer.Option("--to", help="onnx, torchscript or safetensors.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to. [RUN/export]", metavar="DIR")] = None,
    method: OwnMethod = None,
    network: OwnNetwork = None,
    accept_shift: Annotated[
        bool, typer.Option("--accept-shift", help="Also a model that was adapted to data that look too unlike.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", help="Also to this repository on Hugging Face's hub.", metavar="OWNER/NAME")
    ] = None,
) -> None:
    """Write a trained model for other programs, with its preprocessing, and a model card (README.md) beside it.

    Nothing is written unless the outputs agree with fedshift's own.
    """
    from fedshift.model import Model

    folder = out or (model if model.is_dir() else model.parent) / "export"
    exported = Model.load(model, method, network).export(to, folder, accept_shift, push)
    typer.echo(
        f"{exported.file}: its probabilities agree with the run's (largest difference {exported.difference:.1e})"
    )
    if exported.pushed is not None:
        typer.echo(f"pushed: {exported.pushed}")
