"""``fedshift project``: the project file, its start-up kits, and a trial federation on one machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
import yaml

from fedshift.cli.console import say
from fedshift.data.databases import Database
from fedshift.data.domain import DataSet, Domain, SparseRows
from fedshift.data.splits import TEST, TRAIN
from fedshift.deploy.flare import roles
from fedshift.errors import UserError
from fedshift.experiment.config.engine_section import FlareEngine, LocalEngine
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.federation.local.cards import cards_of

if TYPE_CHECKING:
    from fedshift.deploy.flare.authority import Ask
    from fedshift.deploy.flare.provision import Provisioned

PASSPHRASE = "FEDSHIFT_PASSPHRASE"
"""The environment variable of the passphrase of the authority's key."""
_SENT = ("weights", "numbers", "accuracy", "metrics", "statistics", "styles", "spectra", "features")
_FILE = """\
name: {name}
contact: {contact}
server: {server}   # the name under which every site reaches the coordinator
port: {port}
sites: [{sites}]
"""


def init_project(path: Path, name: str, contact: str, server: str, port: int, sites: Sequence[str]) -> None:
    """Write a project file.

    Raises:
        UserError: the file exists, or an option cannot be used.
    """
    if path.exists():
        raise UserError(f"{path} exists: edit it, or give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_FILE.format(name=name, contact=contact, server=server, port=port, sites=", ".join(sites)))
    try:
        roles.load_project(path)
    except UserError:
        path.unlink()
        raise
    say(f"wrote {path}: check it, then call fedshift project provision {path}")


def provision_project(path: Path, out: Path, renew: bool, no_passphrase: bool) -> None:
    """Make the kits and print what to do with each."""
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


def reissue_kit(path: Path, site: str, out: Path, no_passphrase: bool) -> None:
    """Make one site's kit again and print what to do with it."""
    made = roles.reissue(roles.load_project(path), out, site, _asking(no_passphrase))
    say(
        f"site {site}: give {made.sites[site] / 'flare' / 'startup'} to {site} only, in place of its own; "
        f"{made.coordinator} refuses the old one. If it runs elsewhere, copy certificates.json into its kit"
    )
    _say_changed(made)


def revoke_kit(folder: Path, site: str, revoked: bool) -> None:
    """Refuse a site's kit at the coordinator, or accept it again."""
    changed = roles.set_revoked(folder, site, revoked)
    state = "refused" if revoked else "accepted"
    say(f"site {site}: its kit is {state}{'' if changed else ' (unchanged)'}")


def remove_site(path: Path, site: str, out: Path) -> None:
    """Take a site out of the project and print what is left for people to do."""
    made = roles.remove(path, out, site)
    rest = [*made.sites]
    for line in (
        f"site {site}: removed from {path}; {made.coordinator} refuses its kit. If the coordinator runs elsewhere, "
        "copy kit.json and certificates.json into its kit",
        f"experiments: take {site} out of protocol.targets; engine.quorum can be {len(rest)} at most. One that it was "
        "part of and that has not finished goes on with engine.quorum only; else begin it anew under another name",
        f"secure sums: a site that was in one with {site} refuses those without it (rule policy.roster): a person at "
        f"each writes policy.roster: [{', '.join(sorted(rest))}] into SITE.yaml; begin the next experiment from "
        "another start, since what sums before and after differ by is one model (docs/privacy.md)"
        if len(rest) >= 3
        else f"secure sums: {len(rest)} sites are too few for them",
        f"its kit and records at {made.folder / 'sites' / site} stay: delete them when nobody needs them",
    ):
        say(line)
    _say_changed(made)


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


def try_project(path: Path | None, overrides: Sequence[str], runs: Path, port: int | None, keep: Path | None) -> None:
    """Run a whole federation on this machine: one process per role, TLS over loopback, a data file per site."""
    experiment = load(path, overrides) if path else load(Path(__file__).with_name("try.yaml"), overrides)
    roles.check_installed()
    if keep is not None:
        play(experiment, keep, runs, port)
        return
    with tempfile.TemporaryDirectory(prefix="fedshift-try-", ignore_cleanup_errors=True) as folder:
        play(experiment, Path(folder), runs, port)


def play(experiment: Experiment, folder: Path, runs: Path, port: int | None) -> Path:
    """Provision, start, deploy and stop a federation for an experiment whose data are on this machine.

    Returns:
        The folder of the results.
    """
    from fedshift.deploy.cli.deploy import follow
    from fedshift.experiment.runs.run_folder import check_place

    folder.mkdir(parents=True, exist_ok=True)
    deployed, sites = spread(experiment, folder)
    check_place(deployed, runs / deployed.name)  # fails before anything starts
    project = {
        "name": "try",
        "contact": "try@fedshift.example.org",
        "server": "localhost",
        "port": port or roles.free_port(),
        "sites": list(sites),
    }
    file = folder / "project.yaml"
    file.write_text(yaml.safe_dump(project))
    made = roles.provision(roles.load_project(file), folder, lambda new: None)
    shutil.rmtree(made.folder / "authority")  # its key is not encrypted, and nobody needs it any more
    for site, options in sites.items():
        (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(options))
    say(f"starting a coordinator and {len(sites)} sites on this machine …", stderr=True)
    with roles.running_services(made.coordinator, made.sites.values()):
        return follow(made.coordinator, deployed, runs)


def spread(experiment: Experiment, folder: Path) -> tuple[Experiment, dict[str, dict[str, object]]]:
    """Write each site's data below ``folder``.

    Returns:
        The experiment to deploy, and the content of each site's SITE.yaml.
    """
    data = experiment.protocol.taking_part(experiment.data.build())
    targets = experiment.protocol.targets_of(data)
    at_coordinator = targets if experiment.protocol.unseen and len(targets) == 1 else ()
    files = getattr(experiment.data, "sites", None)  # of arrays and tables: each site uses its own file unchanged
    if not isinstance(files, Mapping) or not all(isinstance(file, Path | Database) for file in files.values()):
        files = None

    def data_section(names: Sequence[str]) -> dict[str, object]:
        if files is not None:
            whole = experiment.data.model_dump(mode="json", exclude={"statistics_from"})
            whole["sites"] = {name: _whole(files[name]) for name in names}
            return whole
        return _arrays_section(data, names, folder)

    sites: dict[str, dict[str, object]] = {}
    threads = experiment.engine.threads or 1
    for name, domain in data.domains.items():
        if files is None:
            _write(folder / "data" / f"{name}.npz", domain)
        if name not in at_coordinator:
            sites[name] = {
                "site": name,
                "kit": ".",
                "data": data_section([name]),
                "classes": list(data.classes),
                "device": "auto" if cards_of(experiment.device) else experiment.device,
                "threads": threads,
                "policy": {
                    "send": [kind for kind in _SENT if kind not in experiment.engine.refuse_at.get(name, ())],
                    # These data lie on one machine, and an experiment shall run as it does in a simulation.
                    "smallest_group": 1,
                    "splits": "all",
                    "exposure": 1,
                    "rounds_per_day": None,
                    "measurements_per_day": None,
                },
            }
    engine = experiment.engine if isinstance(experiment.engine, FlareEngine) else FlareEngine(threads=threads)
    if isinstance(experiment.engine, LocalEngine):
        engine = engine.model_copy(
            update={
                name: getattr(experiment.engine, name) for name in ("refuse", "quorum", "on_refusal", "aggregation")
            }
        )
    whole = experiment.dump() | {
        "data": {"name": "sites", "unseen": data_section(at_coordinator) if at_coordinator else None},
        "engine": engine.model_dump(mode="json"),
    }
    return parse(json.loads(json.dumps(whole))), sites


def _write(path: Path, domain: Domain) -> None:
    if isinstance(domain.inputs, SparseRows) or (domain.train_rows is not None and not domain.fixed_split):
        raise UserError(f"data: '{domain.name}' cannot be written as an .npz file for a site; use another data set")
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"x": domain.inputs, "y": domain.labels}
    if domain.groups is not None:
        arrays["groups"] = domain.groups
    if domain.fixed_split:
        arrays["split"] = np.where(np.isin(np.arange(len(domain)), domain.described), TRAIN, TEST)
    np.savez(path, **arrays)


def _whole(held: Path | Database) -> str:
    return str(held.resolve() if isinstance(held, Path) else held)


def _arrays_section(data: DataSet, names: Sequence[str], folder: Path) -> dict[str, object]:
    files = {name: str((folder / "data" / f"{name}.npz").resolve()) for name in names}
    described: dict[str, object] = {"name": "arrays", "sites": files, "classes": list(data.classes)}
    if data.preprocessing.mean is not None and data.preprocessing.std is not None:
        described |= {"mean": list(data.preprocessing.mean), "std": list(data.preprocessing.std)}
    return described
