"""``fedshift watch``: a page on this machine that shows running experiments."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.report.watch.server import ADDRESS, server


def watch(folder: Path, port: int) -> None:
    """Serve the page of ``folder`` to this machine until Ctrl-C.

    Raises:
        UserError: there is no such folder, or the port is taken.
    """
    with server(folder, port) as serving:
        typer.echo(f"http://{ADDRESS}:{serving.server_port}/ shows {folder}; Ctrl-C ends it", err=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended; the runs go on", err=True)
