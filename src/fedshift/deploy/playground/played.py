"""Two sites and a coordinator on this machine: a process per role, mutual TLS over loopback, made-up data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedshift.deploy.coordinator import EXPERIMENT
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.errors import FedshiftError
from fedshift.experiment.config.experiment import parse
from fedshift.json_objects import write_object

SITES = ("north", "south")
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

    def deploy(self, name: str, method: str) -> tuple[Deployment, dict[str, Any]]:
        """Deploy a small experiment, as `fedshift deploy` does; the deployment and its state once it has ended."""
        deployment = Deployment(self.coordinator, name)
        experiment = parse(
            {
                "name": name,
                "data": {"name": "sites"},
                "protocol": {"targets": ["sites"], "seeds": [0], "test_fraction": 0.4},
                "model": {"name": "linear"},
                "training": {"rounds": 2, "batch_size": 16, "lr": 0.1},
                "methods": [{"name": method}],
                "device": "cpu",
                "engine": {"name": "flare", "threads": 1, "deadline": PATIENCE},
            }
        )
        write_object(deployment.folder / EXPERIMENT, experiment.dump())
        deployment.want("run")
        deadline = time.monotonic() + PATIENCE
        while not deployment.ended:
            if time.monotonic() > deadline:
                raise FedshiftError(f"the deployment did not end within {PATIENCE:g} s: {deployment.state}")
            time.sleep(0.1)
        return deployment, deployment.state


def _provision(folder: Path) -> Played:
    """Kits of a project, and data and a SITE.yaml for each site."""
    port = roles.free_port()
    file = folder / "project.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    options = {"name": "selftest", "contact": "selftest@example.org", "server": "localhost", "port": port}
    file.write_text(yaml.safe_dump({**options, "sites": list(SITES)}), encoding="utf-8")
    made = roles.provision(roles.load_project(file), folder / "kits", lambda new: None)
    draws = np.random.default_rng(0)
    for number, site in enumerate(SITES):
        labels = np.arange(96) % len(NASTY)
        np.savez(made.sites[site] / "data.npz", x=draws.normal(labels[:, None] + number, 1.0, (96, 6)), y=labels)
        options = {
            "site": site,
            "data": {"name": "arrays", "sites": {site: str(made.sites[site] / "data.npz")}, "classes": list(NASTY)},
            "device": "cpu",
            "threads": 1,
            "policy": POLICY,
        }
        (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    return Played(folder, made.coordinator, made.sites, port, file)


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[Played]:
    """Provision and start a federation below ``folder``; stop it at the end."""
    played = _provision(folder)
    with roles.running_services(played.coordinator, played.sites.values()):
        yield played
