"""A federation of processes on this machine, with mutual TLS over loopback, for tests that kill parts of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from site_yaml import SITES, UNSEEN, write_data

from fedshift import trust
from fedshift.deploy.cli.deploy import fetch, follow
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import ENDS, Deployment
from fedshift.deploy.flare.parts import IN_FLIGHT_MIB
from fedshift.experiment.config.experiment import parse
from fedshift.import_paths import package_source

PATIENCE = 240.0
"""Seconds that anything may take here: test machines are busy."""


class Network:
    """Kits, services and deployments of a small federation."""

    def __init__(self, folder: Path, sites: Mapping[str, int] = SITES, **project: Any) -> None:
        self.folder, self.names = folder, list(sites)
        self.watched = folder / "watched"
        self.files = write_data(folder / "data", {**sites, **UNSEEN})
        options = {
            "name": "test",
            "contact": "test@example.org",
            "server": "localhost",
            "port": roles.free_port(),
            "sites": self.names,
            **project,
        }
        (folder / "project.yaml").write_text(yaml.safe_dump(options))
        self.made = roles.provision(roles.load_project(folder / "project.yaml"), folder / "kits", lambda new: None)
        self.coordinator = self.made.coordinator
        # As fedshift deploy --trust and fedshift site check --trust write it down for the services.
        trust.remember(trust.Code("method 'slow_method:Slow'", *package_source("slow_method")))
        for name in self.names:
            self.write_site(name)

    def write_site(self, name: str, **changes: Any) -> Path:
        options = {
            "site": name,
            "kit": ".",
            "data": {"name": "arrays", "sites": {name: self.files[name]}},
            "classes": ["0", "1", "2"],
            "device": "cpu",
            "threads": 1,
            "policy": {
                "smallest_group": 1,
                "exposure": 1,
                "models": "all",
                "methods": ["fedavg", "csac", "kd3a", "shot", "copa", "slow_method:Slow"],
            },
            **changes,
        }
        site_yaml = self.made.sites[name] / "SITE.yaml"
        site_yaml.write_text(yaml.safe_dump(options))
        return site_yaml

    def start(self, *names: str) -> None:
        for name in names or ("coordinator", *self.names):
            if name == "coordinator":
                roles.start(roles.load_kit(self.coordinator, "coordinator"), wait=PATIENCE)
            else:
                kit = roles.load_kit(self.made.sites[name], "site")
                roles.start(kit, self.made.sites[name] / "SITE.yaml", wait=0 if not names else PATIENCE)

    def start_again(self, *names: str) -> None:
        """Start those of the sites that do not run, as another test may have killed them."""
        for name in names:
            if roles.status(roles.load_kit(self.made.sites[name], "site")).pid is None:
                self.start(name)

    def stop(self) -> None:
        for kit in (*self.made.sites.values(), self.coordinator):
            with contextlib.suppress(Exception):
                roles.stop(roles.load_kit(kit, "coordinator" if kit == self.coordinator else "site"))
            self.kill(kit)

    def processes(self, kit: Path) -> Iterator[psutil.Process]:
        """Every process that works in a kit's folder: service, FLARE's parent, jobs."""
        for process in psutil.process_iter(["cmdline"]):
            if any(word.startswith(str(kit)) for word in process.info["cmdline"] or []):
                yield process

    def jobs(self, kit: Path) -> list[psutil.Process]:
        ends = ("worker_process", "runner_process")
        return [
            process for process in self.processes(kit) if any(word.endswith(ends) for word in process.info["cmdline"])
        ]

    def kill(self, kit: Path, only: str = "") -> int:
        """kill -9 of a kit's processes whose command holds ``only``; how many."""
        killed = [process for process in self.processes(kit) if only in " ".join(process.info["cmdline"])]
        for process in killed:
            with contextlib.suppress(psutil.Error, OSError):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(killed, timeout=30)  # a busy machine takes a while to bury them
        return len(killed)

    def options(self, options: dict[str, Any], *, unseen: bool = True, **engine: Any) -> dict[str, Any]:
        unseen_section = {"name": "arrays", "sites": {name: self.files[name] for name in UNSEEN}} if unseen else None
        return {
            **options,
            "data": {"name": "sites", "unseen": unseen_section},
            "engine": {"name": "flare", "threads": 1, "deadline": PATIENCE, **engine},
        }

    def deploy(self, options: dict[str, Any], **more: Any) -> Deployment:
        follow(self.coordinator, parse(self.options(options, **more)), self.folder / "runs", detach=True)
        return Deployment(self.coordinator, options["name"])

    def wait(self, deployment: Deployment, until: Callable[[], bool]) -> None:
        """Wait until something holds; fails when the deployment ends badly before, or nothing happens for long."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            state = deployment.state
            assert state["state"] not in ("failed", "aborted"), state
            assert time.monotonic() < deadline, f"{state} {list(deployment.events())[-5:]}"
            time.sleep(0.05)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def reach(self, deployment: Deployment, state: str) -> None:
        self.until(lambda: deployment.state["state"] == state)

    def leave(self, deployment: Deployment, state: str) -> None:
        self.until(lambda: deployment.state["state"] != state)

    def finish(self, deployment: Deployment) -> Path:
        self.wait(deployment, lambda: deployment.state["state"] in ENDS)
        assert deployment.state["state"] == "finished", deployment.state
        return fetch(deployment, self.folder / "runs")


class Gates:
    """A method whose calls last until a gate is open: that of a round, or of a site in a round (``3-north``)."""

    def __init__(self, folder: Path, label: str, **options: Any) -> None:
        self.folder = folder / label
        self.folder.mkdir()
        self.method = {"name": "slow_method:Slow", "label": label, "gates": str(self.folder), **options}

    def open(self, *gates: int | str) -> None:
        for gate in gates:
            (self.folder / str(gate)).touch()

    def has_reached(self, round_number: int, *sites: str) -> bool:
        return all((self.folder / f"{round_number}-{site}-waits").exists() for site in sites)


def rounds(deployment: Deployment) -> int:
    return sum(event.get("what") == "round" for event in deployment.events())


IN_FLIGHT = 1
"""MiB: less than usual, so that a small network crosses in parts; the smallest ones still travel whole."""


@contextlib.contextmanager
def environment(network: Network) -> Iterator[None]:
    """What the federation's processes find: a method of these tests, and who notes what they dial."""
    here = Path(__file__).parent
    before = os.environ.get("PYTHONPATH")
    network.watched.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here / "watched"), *([before] if before else [])]))
        patch.setenv("FEDSHIFT_WATCHED", str(network.watched))
        patch.setenv(IN_FLIGHT_MIB, str(IN_FLIGHT))
        yield
