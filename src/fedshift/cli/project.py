"""``fedshift project``: the project file, its start-up kits, and a trial federation on one machine."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console

from fedshift.data.domain import DataSet, Domain, SparseRows
from fedshift.deployment.flare import roles
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.experiment.config.sections import FlareEngine, LeaveOneOut, LocalEngine
from fedshift.experiment.protocol import taking_part, targets_of

_SENT = ("weights", "numbers", "accuracy", "statistics", "styles", "spectra", "features")
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
    Console().print(
        f"wrote {path}: check it, then call fedshift project provision {path}", highlight=False, markup=False
    )


def provision_project(path: Path, out: Path, renew: bool) -> None:
    """Make the kits and print what to do with each."""
    console = Console()
    made = roles.provision(roles.load_project(path), out, renew=renew)
    console.print(f"coordinator: {made.coordinator}", highlight=False, markup=False)
    for site, kit in made.sites.items():
        new = "" if site in made.new else " (unchanged)"
        console.print(f"site {site}: {kit}{new}: give it to {site} only; it holds a private key", highlight=False)
    console.print(
        f"keep {made.folder / 'authority'} secret: with it anyone can add sites", highlight=False, markup=False
    )


def try_project(path: Path | None, overrides: Sequence[str], runs: Path, port: int | None, keep: Path | None) -> None:
    """Run a whole federation on this machine: one process per role, TLS over loopback, a data file per site."""
    experiment = load(path, overrides) if path else load(Path(__file__).with_name("try.yaml"), overrides)
    roles.installed()
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
    from fedshift.cli.deploy import check_place, follow

    console = Console(stderr=True)
    folder.mkdir(parents=True, exist_ok=True)
    deployed, sites = spread(experiment, folder)
    check_place(deployed, runs / deployed.name)  # fails before anything starts
    project = {
        "name": "try",
        "contact": "try@fedshift.example.org",
        "server": "localhost",
        "port": port or free_port(),
        "sites": list(sites),
    }
    file = folder / "project.yaml"
    file.write_text(yaml.safe_dump(project))
    made = roles.provision(roles.load_project(file), folder)
    started: list[tuple[Path, str]] = []
    try:
        console.print(f"starting a coordinator and {len(sites)} sites on this machine …", highlight=False)
        roles.start(roles.load_kit(made.coordinator, "coordinator"))
        started.append((made.coordinator, "coordinator"))
        for site, options in sites.items():
            path = made.sites[site] / "SITE.yaml"
            path.write_text(yaml.safe_dump(options))
            roles.start(roles.load_kit(made.sites[site], "site"), path, wait=0)
            started.append((made.sites[site], "site"))
        return follow(made.coordinator, deployed, runs)
    finally:
        for kit, role in reversed(started):
            roles.stop(roles.load_kit(kit, role))


def spread(experiment: Experiment, folder: Path) -> tuple[Experiment, dict[str, dict[str, object]]]:
    """Write each site's data below ``folder``.

    Returns:
        The experiment to deploy, and the content of each site's SITE.yaml.
    """
    data = taking_part(experiment.protocol, experiment.data.build())
    targets = targets_of(experiment.protocol, data)
    own = targets if isinstance(experiment.protocol, LeaveOneOut) and len(targets) == 1 else ()
    files = getattr(experiment.data, "sites", None)  # of arrays and tables: each site uses its own file unchanged

    def described(names: Sequence[str]) -> dict[str, object]:
        if isinstance(files, Mapping):
            whole = experiment.data.model_dump(mode="json", exclude={"statistics_from"})
            whole["sites"] = {name: str(Path(files[name]).resolve()) for name in names}
            return whole
        return _described(data, names, folder)

    sites: dict[str, dict[str, object]] = {}
    threads = experiment.engine.threads or 1
    for name, domain in data.domains.items():
        if not isinstance(files, Mapping):
            _write(folder / "data" / f"{name}.npz", domain)
        if name not in own:
            sites[name] = {
                "site": name,
                "kit": ".",
                "data": described([name]),
                "classes": list(data.classes),
                "device": experiment.device,
                "threads": threads,
                "policy": {
                    "send": [kind for kind in _SENT if kind not in experiment.engine.refuse_at.get(name, ())],
                    "smallest_group": 1,
                },
            }
    engine = experiment.engine if isinstance(experiment.engine, FlareEngine) else FlareEngine(threads=threads)
    if isinstance(experiment.engine, LocalEngine):
        engine = engine.model_copy(
            update={name: getattr(experiment.engine, name) for name in ("refuse", "quorum", "on_refusal")}
        )
    whole = experiment.dump() | {
        "data": {"name": "sites", "unseen": described(own) if own else None},
        "engine": engine.model_dump(mode="json"),
    }
    return parse(json.loads(json.dumps(whole))), sites


def _write(path: Path, domain: Domain) -> None:
    if isinstance(domain.inputs, SparseRows) or domain.train_rows is not None:
        raise UserError(f"data: '{domain.name}' cannot be written as an .npz file for a site; use another data set")
    path.parent.mkdir(parents=True, exist_ok=True)
    if domain.groups is None:
        np.savez(path, x=domain.inputs, y=domain.labels)
    else:
        np.savez(path, x=domain.inputs, y=domain.labels, groups=domain.groups)


def _described(data: DataSet, names: Sequence[str], folder: Path) -> dict[str, object]:
    files = {name: str((folder / "data" / f"{name}.npz").resolve()) for name in names}
    described: dict[str, object] = {"name": "arrays", "sites": files, "classes": list(data.classes)}
    if data.preprocessing.mean is not None and data.preprocessing.std is not None:
        described |= {"mean": list(data.preprocessing.mean), "std": list(data.preprocessing.std)}
    return described


def free_port() -> int:
    """A port on which nothing listens now.

    It is outside the range that the system uses for outgoing connections. Otherwise a site that reconnects often
    could be given the coordinator's port for its own end and connect to itself.
    """
    for port in random.sample(range(20_000, 30_000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise FedshiftError("project try: no free port between 20000 and 30000; give one with --port")
