"""The roles of a deployed federation, for commands: make kits; start and stop a role's service; ask for its status.

Commands use FLARE only through this module.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedshift.deploy.flare import certificates, kits
from fedshift.deploy.flare.kit_checks import check_certificates, check_port, check_reachable, check_settings
from fedshift.deploy.flare.kits import Kit, check_installed, load_project
from fedshift.deploy.flare.provision import provision, reissue, relocate, remove
from fedshift.deploy.flare.service import holder
from fedshift.digests import Damaged
from fedshift.encryption import present_key
from fedshift.errors import FedshiftError, UserError
from fedshift.json_objects import read_object

__all__ = [
    "Kit",
    "check_installed",
    "check_reachable",
    "check_settings",
    "load_project",
    "provision",
    "reissue",
    "remove",
]
"""What commands use of the rooms below, beside the functions here."""
_START_SECONDS, _STOP_SECONDS = 120.0, 40.0


def set_revoked(folder: Path, site: str, revoked: bool) -> bool:
    """Refuse a site's kit at the coordinator, or accept it again; return whether this changed anything."""
    return certificates.set_revoked(kits.load_kit(folder, "coordinator"), site, revoked)


def load_kit(folder: Path, role: str) -> Kit:
    """Read the kit of a role and check its certificates."""
    check_installed()
    kit = kits.load_kit(folder, role)
    check_certificates(kit)
    return kit


def running(folder: Path) -> bool:
    """Whether the service of the kit in a folder runs."""
    return holder(kits.load_kit(folder)) is not None


def revoked_sites(kit: Kit) -> list[str]:
    """The sites whose kit the coordinator refuses."""
    return sorted(certificates.revoked_sites(kit))


def expiry(kit: Kit) -> str:
    """The date on which the kit's certificates expire."""
    return f"{check_certificates(kit):%Y-%m-%d}"


def free_port() -> int:
    """A port on which nothing listens now.

    It is outside the range that the system uses for outgoing connections. Otherwise a site that reconnects often
    could be given the coordinator's port for its own end and connect to itself.
    """
    for port in random.sample(range(20_000, 30_000), 200):  # no secret # nosec B311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise FedshiftError("no free port between 20000 and 30000; give one with --port")


_SERVICE = "fedshift.deploy.flare.service"


@dataclass(frozen=True)
class Status:
    """Status of a role's service."""

    state: str  # stopped, starting, connected, retrying, restarting or failed
    message: str
    pid: int | None
    begun: float | None = None  # when it was started, in seconds since 1970; None if none runs
    sites: tuple[str, ...] = ()  # at the coordinator, the sites that are registered


def status(kit: Kit) -> Status:
    """The status of a kit's service."""
    pid = holder(kit)
    try:
        result = read_object(kit.folder / "service.json", "restart the service", older=True)
    except Damaged as error:
        return Status("stopped" if pid is None else "starting", str(error), pid)
    if pid is not None and result.get("pid") != pid:  # it has said nothing yet
        return Status("starting", "", pid)
    if not result:
        return Status("stopped", "", None)
    state, message = str(result["state"]), str(result.get("message", ""))
    if state in ("stopped", "failed"):
        return Status(state, message, None)
    if pid is None:
        return Status("stopped", "it ended without a message: it was killed, or the machine stopped", None)
    begun, sites = result.get("begun"), result.get("sites")
    return Status(
        state,
        message,
        pid,
        float(begun) if isinstance(begun, int | float) else None,
        tuple(map(str, sites)) if isinstance(sites, list) else (),
    )


def start(kit: Kit, site_file: Path | None = None, *, foreground: bool = False, wait: float = _START_SECONDS) -> Status:
    """Start the service of a kit and wait until it is connected or reports a problem.

    UserError if the service runs already, or cannot start. ``foreground``: run the service in this process until it is
    told to stop; ``wait``: seconds to wait.
    """
    before = status(kit)
    if before.pid is not None:
        raise UserError(f"{kit.role} '{kit.name}' runs already (process {before.pid}); stop it first")
    present_key()  # a key that cannot be used is said now, and not in the middle of a run
    check_settings(kit)
    if kit.role == "coordinator":
        check_port(kit)
    relocate(kit)
    words = [str(kit.folder), *([str(site_file.resolve())] if site_file else [])]
    command = [sys.executable, "-m", _SERVICE, *words]
    if foreground:
        os.execv(sys.executable, command)  # our own interpreter # nosec B606
    with open(kit.folder / "service.err", "wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
        )
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        now = status(kit)
        if now.state in ("connected", "retrying") and now.pid == process.pid:
            return now
        if process.poll() is not None:
            text = (kit.folder / "service.err").read_text(errors="replace").strip().splitlines()
            raise UserError((text[-1] if text else "the service ended without a message").removeprefix("error: "))
        time.sleep(0.1)
    return status(kit)


def stop(kit: Kit) -> bool:
    """Stop the service of a kit; return whether it ran. FedshiftError if it does not end."""
    pid = holder(kit)
    if pid is None:
        return False
    if not _is_service(pid):
        raise FedshiftError(
            f"{kit.role} '{kit.name}' runs and is no process of this machine, or is one of another user: stop it where "
            "it was started, such as its container"
        )
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while holder(kit) is not None:
        if time.monotonic() > deadline:
            raise FedshiftError(f"process {pid} does not end; kill it by hand")
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def running_services(coordinator: Path, sites: Iterable[Path]) -> Iterator[None]:
    """Run a federation on this machine inside the block: the services of a coordinator's kit and of sites' kits.

    The coordinator is connected when the block begins; sites look for it until they are.
    """
    started: list[Kit] = []
    try:
        kit = load_kit(coordinator, "coordinator")
        start(kit)
        started.append(kit)
        for folder in sites:
            kit = load_kit(folder, "site")
            start(kit, folder / "SITE.yaml", wait=0)
            started.append(kit)
        yield
    finally:
        for kit in reversed(started):
            stop(kit)


def _is_service(pid: int) -> bool:
    """Whether a process here is a service. A number that a container's process gave may be another process's here."""
    import psutil

    try:
        return _SERVICE in psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        return False
