"""``fedshift security``: a key for files at rest, signed logs, and every promise tried."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.deploy.cli.federation import KitFolder

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
