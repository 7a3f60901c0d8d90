"""``fedshift project``, ``coordinator`` and ``site``: the commands of those who run a federation, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.arguments import Overrides, Runs, Trust
from fedshift.cli.trusting import may_ask

ProjectFile = Annotated[Path, typer.Argument(help="The project's file.", metavar="PROJECT.yaml")]
Kits = Annotated[Path, typer.Option("--out", help="Folder of the kits.", metavar="DIR")]
SiteName = Annotated[str, typer.Argument(help="The site's name.", metavar="SITE")]
NoPassphrase = Annotated[
    bool, typer.Option("--no-passphrase", help="If the authority's key is written anew, do not encrypt it.")
]
KitFolder = Annotated[
    Path, typer.Option("--kit", help="The coordinator's kit.", metavar="DIR", envvar="FEDSHIFT_COORDINATOR")
]
project = typer.Typer(
    help="Set up a federation over a network: its members and their start-up kits. Or try one on this machine.",
    no_args_is_help=True,
)


@project.command("init")
def project_init(
    path: ProjectFile,
    site: Annotated[list[str], typer.Option("--site", help="A site's name; repeat for each site.")],
    server: Annotated[str, typer.Option("--server", help="The name under which sites reach the coordinator.")],
    contact: Annotated[str, typer.Option("--contact", help="An e-mail address.")],
    name: Annotated[str, typer.Option("--name", help="The project's name.")] = "federation",
    port: Annotated[int, typer.Option("--port", help="The coordinator's only port.")] = 8002,
) -> None:
    """Write a project's file.

    Example: fedshift project init project.yaml --site north --site south --server fl.example.org --contact a@b.org
    """
    from fedshift.deploy.cli.project import init_project

    init_project(path, name, contact, server, port, site)


@project.command("provision")
def project_provision(
    path: ProjectFile,
    out: Kits = Path("kits"),
    renew: Annotated[
        bool, typer.Option("--renew", help="Make all kits again, with a new certificate authority.")
    ] = False,
    no_passphrase: NoPassphrase = False,
) -> None:
    """Make a start-up kit for the coordinator and for each site. Repeat it to make kits for sites that were added.

    Asks for the passphrase of the authority's key, or takes it from FEDSHIFT_PASSPHRASE.
    """
    from fedshift.deploy.cli.project import provision_project

    provision_project(path, out, renew, no_passphrase)


@project.command("reissue")
def project_reissue(
    path: ProjectFile, name: SiteName, out: Kits = Path("kits"), no_passphrase: NoPassphrase = False
) -> None:
    """Make one site's kit again, with a new key. The coordinator then refuses the old kit.

    Example: fedshift project reissue project.yaml north
    """
    from fedshift.deploy.cli.project import reissue_kit

    reissue_kit(path, name, out, no_passphrase)


@project.command("revoke")
def project_revoke(name: SiteName, kit: KitFolder = Path("coordinator")) -> None:
    """Refuse a site's kit from now on, also after a restart. Call it on the coordinator's machine.

    Example: fedshift project revoke north
    """
    from fedshift.deploy.cli.project import revoke_kit

    revoke_kit(kit, name, True)


@project.command("accept")
def project_accept(name: SiteName, kit: KitFolder = Path("coordinator")) -> None:
    """Accept a revoked kit again. Call it on the coordinator's machine."""
    from fedshift.deploy.cli.project import revoke_kit

    revoke_kit(kit, name, False)


@project.command("remove")
def project_remove(path: ProjectFile, name: SiteName, out: Kits = Path("kits")) -> None:
    """Take a site out of the project: its kit is refused, and no experiment waits for it.

    Example: fedshift project remove project.yaml north
    """
    from fedshift.deploy.cli.project import remove_site

    remove_site(path, name, out)


@project.command("try")
def project_try(
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment with data on this machine.", metavar="[EXPERIMENT.yaml]")
    ] = None,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    port: Annotated[int | None, typer.Option("--port", help="The coordinator's port. [a free one]")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep kits and logs here.", metavar="DIR")] = None,
    trust: Trust = False,
) -> None:
    """Run a whole federation on this machine: one process per role, mutual TLS over loopback."""
    from fedshift.deploy.cli.project import try_project

    with may_ask(trust):
        try_project(experiment, overrides or [], runs, port, keep)


coordinator = typer.Typer(
    help="The coordinator's service: start it, stop it, see whether it runs.", no_args_is_help=True
)
Foreground = Annotated[bool, typer.Option("--foreground", help="Stay in the foreground, for systemd and containers.")]


@coordinator.command("start")
def coordinator_start(kit: KitFolder = Path("coordinator"), foreground: Foreground = False) -> None:
    """Start the coordinator's service. Unfinished deployments resume."""
    from fedshift.deploy.cli.site import start_coordinator

    start_coordinator(kit, foreground)


@coordinator.command("status")
def coordinator_status(kit: KitFolder = Path("coordinator")) -> None:
    """Show how the coordinator is: whether it runs, connected sites, run and round, refusals, disk, kit, versions."""
    from fedshift.deploy.cli.status import show_coordinator

    show_coordinator(kit)


@coordinator.command("stop")
def coordinator_stop(kit: KitFolder = Path("coordinator")) -> None:
    """Stop the coordinator's service."""
    from fedshift.deploy.cli.site import stop_coordinator

    stop_coordinator(kit)


site = typer.Typer(
    help="A site's service: check its data and policy, start it, stop it; open sealed models.", no_args_is_help=True
)
SiteFile = Annotated[Path, typer.Argument(help="The site's own file.", metavar="SITE.yaml")]


@site.command("check")
def site_check(path: SiteFile = Path("SITE.yaml"), trust: Trust = False) -> None:
    """Read the site's data as a run would, and show what may and what may not leave the site."""
    from fedshift.deploy.cli.site import check_site

    with may_ask(trust):
        check_site(path)


@site.command("agree")
def site_agree(
    path: SiteFile = Path("SITE.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Agree without a question.")] = False,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse without a question, and be asked no more.")] = False,
    only: Annotated[
        list[int] | None, typer.Option("--only", help="The number of a request; repeat it for others.", metavar="N")
    ] = None,
    name: Annotated[
        str, typer.Option("--as", help="Who you are, where several people must agree.", metavar="NAME")
    ] = "",
    key: Annotated[
        Path | None, typer.Option("--key", help="Your private key, where policy.approvers lists keys.", metavar="FILE")
    ] = None,
) -> None:
    """Show one refused request after another (who asked, when, for what), the newest first; agree to each or refuse it.

    Example: fedshift site agree SITE.yaml --only 3 --refuse
    """
    from fedshift.deploy.cli.site import agree_site

    agree_site(path, yes, refuse, only or (), name, key)


@site.command("recover")
def site_recover(
    path: SiteFile = Path("SITE.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Give it up without a question.")] = False,
) -> None:
    """Give up what is lost of the audit log, the ledger of privacy or its secret: what is not known counts as spent.

    Rather put the files back, from the newest copy that there is. The site refuses to answer until one of both is done.
    """
    from fedshift.deploy.cli.site import recover_site

    recover_site(path, yes)


@site.command("backup")
def site_backup(
    path: SiteFile = Path("SITE.yaml"),
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("site.backup"),
) -> None:
    """Write SITE.yaml, the kit with its private key, and the site's records into one file; neither data nor runs.

    Stop the site before. The file is encrypted if a key is set, as all that the site writes.
    """
    from fedshift.deploy.cli.backup import backup_site

    backup_site(path, out)


@site.command("restore")
def site_restore(
    backup: Annotated[Path, typer.Argument(help="What fedshift site backup wrote.", metavar="BACKUP")],
    path: SiteFile = Path("SITE.yaml"),
    log: Annotated[
        Path | None, typer.Option("--log", help="The newest copy of the audit log: of a file sink, or a signed export.")
    ] = None,
) -> None:
    """Put a site back. Records that are there and go on from the backup's stay, so nothing is spent a second time.

    Where they are lost, what the site may have answered since the backup counts as spent: by --log, else all of it.
    """
    from fedshift.deploy.cli.backup import restore_site

    restore_site(backup, path, log)


@site.command("open")
def site_open(
    model: Annotated[Path, typer.Argument(help="A run's folder or a model.sealed.", metavar="RUN_OR_MODEL")],
    path: SiteFile = Path("SITE.yaml"),
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("model.safetensors"),
) -> None:
    """Open the coordinator's sealed model at a site that may read it, and write it as a model.safetensors."""
    from fedshift.deploy.cli.site import open_model

    open_model(model, path, out)


@site.command("start")
def site_start(path: SiteFile = Path("SITE.yaml"), foreground: Foreground = False, trust: Trust = False) -> None:
    """Start the site's service. It connects out to the coordinator and listens on no port."""
    from fedshift.deploy.cli.site import start_site

    with may_ask(trust):
        start_site(path, foreground)


@site.command("status")
def site_status(path: SiteFile = Path("SITE.yaml")) -> None:
    """Show how the site is: whether it runs, the last request and refusal, ε spent, disk, kit, versions."""
    from fedshift.deploy.cli.status import show_site

    show_site(path)


@site.command("stop")
def site_stop(path: SiteFile = Path("SITE.yaml")) -> None:
    """Stop the site's service."""
    from fedshift.deploy.cli.site import stop_site

    stop_site(path)
