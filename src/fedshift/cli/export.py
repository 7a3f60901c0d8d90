"""``fedshift export``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.model import Model


def export_run(run: Path, to: str, out: Path | None, own_method: str | None, own_network: str | None) -> None:
    """Write a run's model in another format and a model card beside it.

    Raises:
        UserError: the run, the format or the folder cannot be used.
    """
    found = Model.load(run, own_method, own_network).export(to, out or (run if run.is_dir() else run.parent) / "export")
    typer.echo(f"{found.file}: its probabilities agree with the run's (largest difference {found.difference:.1e})")
