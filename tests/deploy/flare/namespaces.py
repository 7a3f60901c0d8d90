"""A federation on several machines, as far as one can play that: every role in its own network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from network import PATIENCE, Network

COORDINATOR = "10.97.0.1"
"""The one address that sites have a way to."""
PORT = 8002
START = """
import sys
from pathlib import Path
from fedshift.deploy.flare import roles
role, kit, *file = sys.argv[1:]
roles.start(roles.load_kit(Path(kit), role), *map(Path, file))
"""
"""Starts a role's service, in a third of the time of `fedshift site start`, which looks at the data first."""


def why_not() -> str:
    """Why network namespaces cannot be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not there"
    name = f"fedshift-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        made = subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"ip netns is not permitted here ({made.stderr!s:.100})" if made.returncode else ""


class Namespaces(Network):
    """Kits whose services run each in a namespace of its own: from a site's, only the coordinator can be reached."""

    def __init__(self, folder: Path, sites: Mapping[str, int]) -> None:
        super().__init__(folder, sites, server=COORDINATOR, port=PORT)

    def space(self, name: str) -> str:
        return f"fedshift-{os.getpid()}-{name}"

    def connect(self) -> None:
        """A namespace per role, a cable from each site to the coordinator, and no way further."""
        for name in ("coordinator", *self.names):
            ip("netns", "add", self.space(name))
            self._inside(name, "link", "set", "lo", "up")
        self._inside("coordinator", "address", "add", f"{COORDINATOR}/32", "dev", "lo")
        for number, site in enumerate(self.names, 1):
            far, near = f"10.97.{number}.1", f"10.97.{number}.2"
            ip(
                *("link", "add", "name", f"to-{site}", "netns", self.space("coordinator"), "type", "veth"),
                *("peer", "name", "out", "netns", self.space(site)),
            )
            self._inside("coordinator", "address", "add", f"{far}/30", "dev", f"to-{site}")
            self._inside("coordinator", "link", "set", f"to-{site}", "up")
            self._inside(site, "address", "add", f"{near}/30", "dev", "out")
            self._inside(site, "link", "set", "out", "up")
            self._inside(site, "route", "add", f"{COORDINATOR}/32", "via", far)

    def disconnect(self) -> None:
        for name in ("coordinator", *self.names):
            subprocess.run(["ip", "netns", "delete", self.space(name)], capture_output=True)

    def start(self, *names: str) -> None:
        for name in names or ("coordinator", *self.names):
            site = self.made.sites.get(name)
            words = ["site", str(site), str(site / "SITE.yaml")] if site else ["coordinator", str(self.coordinator)]
            command = ["ip", "netns", "exec", self.space(name), sys.executable, "-c", START, *words]
            subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True)

    def sockets(self, name: str) -> list[tuple[str, str, bool]]:
        """Every TCP and UDP socket of a role's namespace, as the kernel lists them: (near, far, whether it listens)."""
        tables = ("tcp", "tcp6", "udp", "udp6")
        text = self._run(name, "cat", *(f"/proc/net/{table}" for table in tables))
        rows = [line.split() for line in text.splitlines() if "local_address" not in line]
        return [(address(row[1]), address(row[2]), row[3] == "0A") for row in rows]

    def _inside(self, name: str, *words: str) -> None:
        ip("-netns", self.space(name), *words)

    def _run(self, name: str, *words: str) -> str:
        command = ["ip", "netns", "exec", self.space(name), *words]
        return subprocess.run(command, check=True, timeout=30, capture_output=True, text=True).stdout


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True)


def address(text: str) -> str:
    """An address of the kernel's table, ``0100007F:1F42``, as people write it."""
    numbers, _, port = text.partition(":")
    parts: Sequence[int] = bytes.fromhex(numbers)[::-1] if len(numbers) == 8 else bytes.fromhex(numbers)
    return f"{'.'.join(map(str, parts))}:{int(port, 16)}"
