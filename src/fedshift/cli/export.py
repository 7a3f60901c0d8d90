"""``fedshift export``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.model import Model


def export_run(
    run: Path,
    to: str,
    out: Path | None,
    own_method: str | None,
    own_network: str | None,
    accept_shift: bool = False,
    push_to: str | None = None,
) -> None:
    """Write a run's model in another format and a model card beside it.

    Raises:
        UserError: the run, the format or the folder cannot be used, or the hub refuses the files; or the model was
            adapted to samples that are too unlike, unless ``accept_shift`` says that it is wanted all the same.
    """
    folder = out or (run if run.is_dir() else run.parent) / "export"
    exported = Model.load(run, own_method, own_network).export(to, folder, accept_shift, push_to)
    typer.echo(
        f"{exported.file}: its probabilities agree with the run's (largest difference {exported.difference:.1e})"
    )
    if exported.pushed is not None:
        typer.echo(f"pushed: {exported.pushed}")
