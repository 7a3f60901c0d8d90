"""Two sites and a coordinator on this machine: a process per role, mutual TLS over loopback, made-up data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedshift.deploy.coordinator import EXPERIMENT
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.digests import write_object
from fedshift.errors import FedshiftError
from fedshift.experiment.config.experiment import parse

SITES = ("north", "south")
FOUR = (*SITES, "east", "west")
NASTY = ("<script>alert(1)</script>", '=HYPERLINK("http://x")', "\x1b]0;owned\x07\x1b[2J")
"""Names of classes, as an attacker would choose them: for a page, a spreadsheet and a terminal."""
POLICY: dict[str, Any] = {
    "send": ["weights", "numbers", "accuracy", "metrics"],
    "smallest_group": 10,
    "methods": ["fedavg"],
    "requests_per_round": 8,
}
"""What the sites allow."""
PATIENCE = 120.0
"""Seconds that anything may take: the machine may be busy."""


@dataclass(frozen=True)
class Played:
    """A federation that runs, and the files of its roles."""

    folder: Path
    coordinator: Path
    sites: Mapping[str, Path]
    port: int
    project: Path

    def site_file(self, site: str) -> Path:
        """A site's SITE.yaml."""
        return self.sites[site] / "SITE.yaml"

    def experiment(self, name: str, method: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Options of a small experiment of the federation; ``changes`` replace sections, and options of the engine."""
        engine = {"name": "flare", "threads": 1, "deadline": PATIENCE, **changes.pop("engine", {})}
        return {
            "name": name,
            "data": {"name": "sites"},
            "protocol": {"targets": ["sites"], "seeds": [0], "test_fraction": 0.4},
            "model": {"name": "linear"},
            "training": {"rounds": 2, "batch_size": 16, "lr": 0.1},
            "methods": [dict(method)],
            "device": "cpu",
            "engine": engine,
            **changes,
        }

    def deploy(self, name: str, method: Mapping[str, Any]) -> tuple[Deployment, dict[str, Any]]:
        """Deploy a small experiment, as `fedshift deploy` does, and wait for its end; the deployment and its state.

        Raises:
            FedshiftError: it does not end.
        """
        deployment = Deployment(self.coordinator, name)
        experiment = parse(self.experiment(name, method))
        write_object(deployment.folder / EXPERIMENT, experiment.dump())
        deployment.want("run")
        deadline = time.monotonic() + PATIENCE
        while not deployment.ended:
            if time.monotonic() > deadline:
                raise FedshiftError(f"the deployment did not end within {PATIENCE:g} s: {deployment.state}")
            time.sleep(0.1)
        return deployment, deployment.state


def _provisioned(folder: Path, name: str, sites: Sequence[str], policy: Mapping[str, Any]) -> Played:
    """Kits of a project, and data and a SITE.yaml for each site."""
    port = roles.free_port()
    file = folder / "project.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    options = {"name": name, "contact": "selftest@example.org", "server": "localhost", "port": port}
    file.write_text(yaml.safe_dump({**options, "sites": list(sites)}), encoding="utf-8")
    made = roles.provision(roles.load_project(file), folder / "kits", lambda new: None)
    draws = np.random.default_rng(0)
    for number, site in enumerate(sites):
        labels = np.arange(96) % len(NASTY)
        np.savez(made.sites[site] / "data.npz", x=draws.normal(labels[:, None] + number, 1.0, (96, 6)), y=labels)
        described = {
            "site": site,
            "data": {"name": "arrays", "sites": {site: str(made.sites[site] / "data.npz")}, "classes": list(NASTY)},
            "device": "cpu",
            "threads": 1,
            "policy": dict(policy),
        }
        (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    return Played(folder, made.coordinator, made.sites, port, file)


def of_four(played: Played) -> Played:
    """Four sites of another project, for what takes more than two: they have kits, and run in this process only."""
    folder = played.folder / "four"
    if not folder.exists():
        _provisioned(folder, "four", FOUR, {**POLICY, "methods": ["fedavg", "kd3a"]})
    kits = folder / "kits" / "four"
    sites = {site: kits / "sites" / site for site in FOUR}
    return Played(folder, kits / "coordinator", sites, 0, folder / "project.yaml")


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[Played]:
    """Provision and start a federation below ``folder``; stop it at the end."""
    played = _provisioned(folder, "selftest", SITES, POLICY)
    started: list[tuple[Path, str]] = []
    try:
        for kit, role in ((played.coordinator, "coordinator"), *((kit, "site") for kit in played.sites.values())):
            site_file = kit / "SITE.yaml" if role == "site" else None
            roles.start(roles.load_kit(kit, role), site_file, wait=0)
            started.append((kit, role))
        yield played
    finally:
        for kit, role in reversed(started):
            roles.stop(roles.load_kit(kit, role))
