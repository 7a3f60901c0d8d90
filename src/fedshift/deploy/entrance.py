"""The commands that the deployment's rooms add to the command line, and their options: of those who run a federation
(``fedshift project``, ``coordinator``, ``site``, ``deploy``), and ``fedshift audit`` and ``security``.

What a command does is in a file of its own below ``cli/``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.arguments import ExperimentFile, Overrides, Runs, Trust, may_ask
from fedshift.cli.console import say
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.deploy.flare.certificates import Ask
    from fedshift.deploy.flare.provision import Provisioned
    from fedshift.deploy.flare.roles import Status
    from fedshift.deploy.site_file import SiteConfig

PASSPHRASE = "FEDSHIFT_PASSPHRASE"
"""The environment variable of the passphrase of the authority's key."""
_FILE = """\
name: {name}
contact: {contact}
server: {server}   # the name under which every site reaches the coordinator
port: {port}
sites: [{sites}]
"""

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
    from fedshift.deploy.flare import roles

    if path.exists():
        raise UserError(f"{path} exists: edit it, or give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_FILE.format(name=name, contact=contact, server=server, port=port, sites=", ".join(site)))
    try:
        roles.load_project(path)
    except UserError:
        path.unlink()
        raise
    say(f"wrote {path}: check it, then call fedshift project provision {path}")


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
    from fedshift.deploy.flare import roles

    made = roles.provision(roles.load_project(path), out, _asking(no_passphrase), renew=renew)
    say(f"coordinator: {made.coordinator}")
    revoked = roles.revoked_sites(roles.load_kit(made.coordinator, "coordinator"))
    for site, kit in made.sites.items():
        if site in made.changed:
            continue
        new = "" if site in made.new else " (unchanged)"
        say(f"site {site}: {kit}{new}: give it to {site} only; it holds a private key")
        if site in revoked:
            say(f"site {site}: this kit is revoked: fedshift project accept {site}, or reissue it")
    _say_changed(made)
    say(f"keep {made.folder / 'authority'} secret: with it anyone can add sites")


def _say_changed(made: Provisioned) -> None:
    """Which sites need another kit.json, since what it tells of the project has changed."""
    for site, what in made.changed.items():
        say(
            f"site {site}: {', '.join(what)}: give {made.sites[site] / 'kit.json'} to {site}, in place of the one in "
            "its kit (it holds no key), and start it again there: until then it looks for the coordinator as before"
        )
    if made.changed:
        say("coordinator: stop it and start it again; if it runs elsewhere, copy its whole kit there")


def _asking(no_passphrase: bool) -> Ask:
    """How the passphrase of the authority's key is found: in the environment, or by asking whoever types."""

    def ask(new: bool) -> str | None:
        if new and no_passphrase:
            return None
        asking = os.environ.get(PASSPHRASE, "")
        if not asking and sys.stdin.isatty():
            asking = str(typer.prompt("passphrase of the authority's key", hide_input=True, confirmation_prompt=new))
        if not asking:
            without = ", or choose --no-passphrase" if new else ""
            raise UserError(
                f"the authority's key needs a passphrase: set {PASSPHRASE}, or run this in a terminal{without}"
            )
        return asking

    return ask


@project.command("reissue")
def project_reissue(
    path: ProjectFile, name: SiteName, out: Kits = Path("kits"), no_passphrase: NoPassphrase = False
) -> None:
    """Make one site's kit again, with a new key. The coordinator then refuses the old kit.

    Example: fedshift project reissue project.yaml north
    """
    from fedshift.deploy.flare import roles

    made = roles.reissue(roles.load_project(path), out, name, _asking(no_passphrase))
    say(
        f"site {name}: give {made.sites[name] / 'flare' / 'startup'} to {name} only, in place of its own; "
        f"{made.coordinator} refuses the old one. If it runs elsewhere, copy certificates.json into its kit"
    )
    _say_changed(made)


@project.command("revoke")
def project_revoke(name: SiteName, kit: KitFolder = Path("coordinator")) -> None:
    """Refuse a site's kit from now on, also after a restart. Call it on the coordinator's machine.

    Example: fedshift project revoke north
    """
    _set_revoked(kit, name, True)


@project.command("accept")
def project_accept(name: SiteName, kit: KitFolder = Path("coordinator")) -> None:
    """Accept a revoked kit again. Call it on the coordinator's machine."""
    _set_revoked(kit, name, False)


def _set_revoked(folder: Path, site: str, revoked: bool) -> None:
    from fedshift.deploy.flare import roles

    changed = roles.set_revoked(folder, site, revoked)
    say(f"site {site}: its kit is {'refused' if revoked else 'accepted'}{'' if changed else ' (unchanged)'}")


@project.command("remove")
def project_remove(path: ProjectFile, name: SiteName, out: Kits = Path("kits")) -> None:
    """Take a site out of the project: its kit is refused, and no experiment waits for it.

    Example: fedshift project remove project.yaml north
    """
    from fedshift.deploy.flare import roles

    made = roles.remove(path, out, name)
    rest = [*made.sites]
    say(
        f"site {name}: removed from {path}; {made.coordinator} refuses its kit. If the coordinator runs elsewhere, "
        "copy kit.json and certificates.json into its kit"
    )
    say(
        f"experiments: take {name} out of protocol.targets; engine.quorum can be {len(rest)} at most. One that it was "
        "part of and that has not finished goes on with engine.quorum only; else begin it anew under another name"
    )
    say(
        f"secure sums: a site that was in one with {name} refuses those without it (rule policy.roster): a person at "
        f"each writes policy.roster: [{', '.join(sorted(rest))}] into SITE.yaml; begin the next experiment from "
        "another start, since what sums before and after differ by is one model (docs/privacy.md)"
        if len(rest) >= 3
        else f"secure sums: {len(rest)} sites are too few for them"
    )
    say(f"its kit and records at {made.folder / 'sites' / name} stay: delete them when nobody needs them")
    _say_changed(made)


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
    from fedshift.deploy.cli.play import try_project

    with may_ask(trust):
        try_project(experiment, overrides or [], runs, port, keep)


coordinator = typer.Typer(
    help="The coordinator's service: start it, stop it, see whether it runs.", no_args_is_help=True
)
Foreground = Annotated[bool, typer.Option("--foreground", help="Stay in the foreground, for systemd and containers.")]


@coordinator.command("start")
def coordinator_start(kit: KitFolder = Path("coordinator"), foreground: Foreground = False) -> None:
    """Start the coordinator's service. Unfinished deployments resume."""
    from fedshift.deploy.flare import roles

    _say_status("coordinator", roles.start(roles.load_kit(kit, "coordinator"), foreground=foreground))


def _say_status(name: str, status: Status) -> None:
    pid = f" (process {status.pid})" if status.pid else ""
    say(f"{name}: {status.state}{pid} {status.message}".rstrip())


@coordinator.command("status")
def coordinator_status(kit: KitFolder = Path("coordinator")) -> None:
    """Show how the coordinator is: whether it runs, connected sites, run and round, refusals, disk, kit, versions."""
    from fedshift.deploy.cli.status import show_coordinator

    show_coordinator(kit)


@coordinator.command("stop")
def coordinator_stop(kit: KitFolder = Path("coordinator")) -> None:
    """Stop the coordinator's service. Deployments resume when it is started again."""
    from fedshift.deploy.flare import roles

    say(f"coordinator: {'stopped' if roles.stop(roles.load_kit(kit, 'coordinator')) else 'was not running'}")


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
    from fedshift.deploy.privacy.ledger import lost_records, recover_records
    from fedshift.deploy.site_file import load_site

    config = load_site(path)
    lost = lost_records(config)
    for line in lost or [f"site {config.file.site}: audit log, ledger and secret are whole"]:
        say(line)
    question = "Give up what is lost? What is not known of the budget of privacy counts as spent."
    if lost and (yes or typer.confirm(question)):
        for line in recover_records(config):
            say(line)


@site.command("backup")
def site_backup(
    path: SiteFile = Path("SITE.yaml"),
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("site.backup"),
) -> None:
    """Write SITE.yaml, the kit with its private key, and the site's records into one file; neither data nor runs.

    Stop the site before. The file is encrypted if a key is set, as all that the site writes.
    """
    from fedshift.deploy.site_backup import back_up
    from fedshift.deploy.site_file import load_site
    from fedshift.encryption import KEY_FILE, present_key

    config = load_site(path)
    _check_stopped(config)
    files = back_up(config, out)
    sealed = "encrypted" if present_key() else f"not encrypted ({KEY_FILE} is not set): it holds the kit's private key"
    say(f"site {config.file.site}: {files} files in {out}, {sealed}")


def _check_stopped(config: SiteConfig) -> None:
    """Raise UserError if the site's service runs."""
    from fedshift.deploy.flare import roles

    if (config.kit / "kit.json").exists() and roles.running(config.kit):
        raise UserError(f"site '{config.file.site}' runs; stop it first: fedshift site stop {config.path}")


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
    from fedshift.deploy.site_backup import restore
    from fedshift.deploy.site_file import load_site

    if path.exists():
        _check_stopped(load_site(path))
    done = restore(backup, path, log)
    say(f"site {done.config.file.site}: {len(done.written)} files put back, {len(done.kept)} that are there stay")
    if done.counted:
        say(f"budget of privacy: counted as spent: {done.counted}")
    say(f"look at it with fedshift site check {path}; runs that were under way are deployed anew")


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
    from fedshift.deploy.cli.site import check_name
    from fedshift.deploy.flare import roles
    from fedshift.deploy.privacy.ledger import lost_records
    from fedshift.deploy.site_file import load_site, read_holding

    with may_ask(trust):
        config = load_site(path)
        kit = roles.load_kit(config.kit, "site")
        check_name(config, kit.name)
        if lost := lost_records(config):
            raise UserError(lost[0])
        read_holding(config)  # what is wrong with the data is said now
        _say_status(kit.name, roles.start(kit, config.path, foreground=foreground))


@site.command("status")
def site_status(path: SiteFile = Path("SITE.yaml")) -> None:
    """Show how the site is: whether it runs, the last request and refusal, ε spent, disk, kit, versions."""
    from fedshift.deploy.cli.status import show_site

    show_site(path)


@site.command("stop")
def site_stop(path: SiteFile = Path("SITE.yaml")) -> None:
    """Stop the site's service."""
    from fedshift.deploy.flare import roles
    from fedshift.deploy.site_file import load_site

    kit = roles.load_kit(load_site(path).kit, "site")
    say(f"site {kit.name}: {'stopped' if roles.stop(kit) else 'was not running'}")


Source = Annotated[str | None, typer.Option("--site", help="The source to attack. [the first]")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the results. [RUNS/NAME/audit]", metavar="DIR")]
audit = typer.Typer(help="Measure what an attacker could learn from what leaves a site.", no_args_is_help=True)


@audit.command()
def leakage(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    site: Source = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Samples in a mini-batch; repeat for several sizes. [1, 4, 8]"),
    ] = None,
    attack: Annotated[str, typer.Option("--attack", help="l2, cosine or both.")] = "both",
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Gradient evaluations of each attempt.")] = 300,
    starts: Annotated[int, typer.Option("--starts", min=1, help="Attempts of each attack; the best counts.")] = 4,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Mini-batches and epochs that are attacked; 2 and more give bounds.")
    ] = 1,
    model: Annotated[
        Path | None, typer.Option("--model", help="A finished run's folder: attack its trained model.", metavar="RUN")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="A site's file, whose policy crafted networks meet.", metavar="SITE.yaml"),
    ] = None,
    out: Out = None,
    runs: Runs = Path("runs"),
    trust: Trust = False,
) -> None:
    """Try to reconstruct a site's samples: from a mini-batch's gradient, from an epoch's model, by crafted networks.

    Example: fedshift audit leakage digits.yaml --site D15 --batch 1 --batch 4
    """
    from fedshift.deploy.cli.audit import audit_file

    with may_ask(trust):
        audit_file(
            experiment,
            overrides or [],
            out,
            policy,
            runs=runs,
            site=site,
            batches=batch or (1, 4, 8),
            attack=attack,
            iterations=iterations,
            starts=starts,
            repeats=repeats,
            model=model,
        )


@audit.command()
def membership(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    site: Source = None,
    trainings: Annotated[
        int,
        typer.Option(
            "--trainings",
            min=2,
            help="How often the method is trained. From 8 on also likelihood ratios, of half of them.",
        ),
    ] = 8,
    out: Out = None,
    runs: Runs = Path("runs"),
    trust: Trust = False,
) -> None:
    """Try to tell from a trained model which samples of a site it was trained on, and bound ε from below by it.

    The experiment's first method is trained with other samples each time. With training.privacy, the bound is compared
    with the ε that the training claims.

    Example: fedshift audit membership hearts.yaml --site cleveland --trainings 16
    """
    from fedshift.deploy.cli.audit import membership_file

    with may_ask(trust):
        membership_file(experiment, overrides or [], out, runs=runs, site=site, trainings=trainings)


security = typer.Typer(
    help="Keys for files at rest, signed logs, and promises of docs/threats.md tried.", no_args_is_help=True
)


@security.command()
def key(path: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")]) -> None:
    """Make a key for checkpoints and site memory; FEDSHIFT_KEY_FILE names it to the role that uses it.

    Keep it apart from the disk that it protects. Whoever loses it begins unfinished runs anew.
    """
    from fedshift.encryption import KEY_FILE, new_key
    from fedshift.errors import UserError
    from fedshift.files import write_bytes

    if path.exists():
        raise UserError(f"{path} exists: files that were encrypted with it need it; give another name")
    write_bytes(path, new_key().encode(), private=True)
    typer.echo(f"{path}: export {KEY_FILE}={path.resolve()} where the role is started")


@security.command()
def export(
    what: Annotated[
        str, typer.Argument(help="A site's SITE.yaml; or a deployment's name.", metavar="SITE.yaml|DEPLOYMENT")
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")],
    kit: KitFolder = Path("coordinator"),
) -> None:
    """Write a signed copy of a role's log: a site's audit log, or what the coordinator noted of a deployment.

    Example: fedshift security export SITE.yaml --out north-2026-01.log
    """
    from fedshift.deploy.flare import roles
    from fedshift.deploy.log_export import export_log

    if what.endswith((".yaml", ".yml")):
        from fedshift.deploy.site_file import load_site

        site = load_site(Path(what))
        lines = export_log(site.audit_log, roles.load_kit(site.kit, "site"), "audit", out)
    else:
        from fedshift.deploy.flare.deployment_folder import Deployment

        coordinator_kit = roles.load_kit(kit, "coordinator")
        deployment = Deployment.find(coordinator_kit.folder, what)
        lines = export_log(deployment.folder / "progress.jsonl", coordinator_kit, deployment.name, out)
    typer.echo(f"{out}: signed, {_lines(lines)}")


@security.command()
def verify(
    path: Annotated[Path, typer.Argument(help="An export.", metavar="EXPORT")],
    authority: Annotated[
        Path, typer.Option("--authority", help="rootCA.pem, of any kit's flare/startup.", metavar="PEM")
    ],
    log: Annotated[
        Path | None, typer.Option("--log", help="Also check that this log still begins with these lines.")
    ] = None,
) -> None:
    """Check an export: who signed it, and that no line was changed, removed or added since.

    Example: fedshift security verify north-2026-01.log --authority rootCA.pem
    """
    from fedshift.deploy.log_export import verify_export
    from fedshift.text import printable

    result = verify_export(path, authority, log)
    whose = f"of the log '{result.log}' of {result.role} '{result.name}'"
    typer.echo(printable(f"{path}: {_lines(len(result.lines))} {whose}, unchanged since {result.made}"))


def _lines(number: int) -> str:
    return "1 line" if number == 1 else f"{number} lines"


@security.command()
def selftest(
    keep: Annotated[Path | None, typer.Option("--keep", help="Leave kits and logs here.", metavar="DIR")] = None,
) -> None:
    """Play a federation on this machine and try on it the promises of docs/threats.md that depend on an installation.

    It says who tried what and what came of it, and ends with 1 if a promise does not hold.
    """
    import tempfile

    from fedshift.cli.console import say
    from fedshift.deploy.flare import roles

    roles.check_installed()
    from fedshift.deploy.playground.selftest import selftest as every

    result = []
    with tempfile.TemporaryDirectory(prefix="fedshift-selftest-", ignore_cleanup_errors=True) as folder:
        for outcome in every(keep or Path(folder)):
            mark, promise = "holds " if outcome.holds else "BROKEN", outcome.promise
            line = f"{mark}  {promise.who} {promise.tries}: {outcome.what}"
            say(line)
            result.append(outcome.holds)
    say(f"{sum(result)} of {len(result)} hold")
    raise typer.Exit(0 if all(result) else 1)


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
