"""``fedshift page``: the page of finished runs, or one that this machine serves while they run."""

from __future__ import annotations

from pathlib import Path

import typer

from fedshift.report.watch.live_page import ADDRESS, server


def write_report(folder: Path) -> None:
    """Write the page of the finished runs below ``folder``, and print its path.

    UserError if there is no finished run, or the page cannot be written.
    """
    from fedshift.report.collect import collect  # what only watches runs needs no drawings
    from fedshift.report.page import write_page
    from fedshift.report.report import whole_report

    typer.echo(write_page(folder, whole_report(collect(folder))))


def watch(folder: Path, port: int) -> None:
    """Serve the page of ``folder`` to this machine until Ctrl-C.

    UserError if there is no such folder, or the port is taken.
    """
    with server(folder, port) as serving:
        typer.echo(f"http://{ADDRESS}:{serving.server_port}/ shows {folder}; Ctrl-C ends it", err=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended; the runs go on", err=True)
