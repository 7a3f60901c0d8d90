"""The commands that the deployment's rooms add to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.arguments import Runs, Trust, may_ask
from fedshift.deploy.cli.audits import audit
from fedshift.deploy.cli.federation import KitFolder, coordinator, project, site
from fedshift.deploy.cli.security import security

NETWORK, PRIVACY = "Train over a network", "Privacy and security"
"""Headings of these commands in ``fedshift --help``."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(audit, name="audit", rich_help_panel=PRIVACY)
    app.add_typer(project, name="project", rich_help_panel=NETWORK)
    app.add_typer(coordinator, name="coordinator", rich_help_panel=NETWORK)
    app.add_typer(site, name="site", rich_help_panel=NETWORK)
    app.add_typer(security, name="security", rich_help_panel=PRIVACY)
    app.command(rich_help_panel=NETWORK)(deploy)


def deploy(
    what: Annotated[
        str,
        typer.Argument(help="An experiment file; or status, logs, abort, resume.", metavar="EXPERIMENT.yaml|ACTION"),
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(help="Fields to set; or the deployment's name.", metavar="[KEY.PATH=VALUE|NAME]..."),
    ] = None,
    kit: KitFolder = Path("coordinator"),
    runs: Runs = Path("runs"),
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; do not wait for the end.")] = False,
    trust: Trust = False,
) -> None:
    """Run an experiment over the sites of a project. Call it on the coordinator's machine.

    Examples: fedshift deploy study.yaml; fedshift deploy status; fedshift deploy resume study
    """
    from fedshift.deploy.cli.deploy import deploy

    with may_ask(trust):
        deploy(what, rest or [], kit, runs, detach)
