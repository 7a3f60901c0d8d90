"""A FLARE driver for messages between the processes of one role: a unix socket in a folder that only its user can read.

FLARE's own drivers for this channel either open a TCP port on loopback, which every user of the machine can reach, or
write each message to a shared disk. FLARE imports each file of this folder by itself (``comm_driver_path``), so this
file imports nothing of fedshift.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import quote, unquote

from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverCap, DriverParams
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection

SCHEME = "unix"
LONGEST = 100
"""Bytes of a socket's path that every system accepts (Linux 107, macOS 103)."""


class UnixSocketDriver(BaseDriver):  # type: ignore[misc]
    """Listens on ``unix://0/path`` or connects to it. A listener's resources name its ``folder``."""

    def __init__(self) -> None:
        super().__init__()
        self._server: _Server | None = None

    @staticmethod
    def supported_transports() -> list[str]:
        return [SCHEME]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {DriverCap.SEND_HEARTBEAT.value: True, DriverCap.SUPPORT_SSL.value: False}

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        """A new name in the folder, so that a job whose parent died never reaches the next parent."""
        url = f"{SCHEME}://0{quote(str(Path(resources['folder']) / secrets.token_hex(4)))}"
        return url, url

    def listen(self, connector: ConnectorInfo) -> None:
        self.connector = connector
        self._server = _Server(self, connector)
        self._server.serve_forever()

    def connect(self, connector: ConnectorInfo) -> None:
        self.connector = connector
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short(_path(connector)) as name:
            plain.connect(name)
        connection = SocketConnection(plain, connector)
        self.add_connection(connection)
        connection.read_loop()
        self.close_connection(connection)

    def shutdown(self) -> None:
        self.close_all()
        if self._server is not None:
            self._server.shutdown()


class _Server(ThreadingUnixStreamServer):
    daemon_threads = True
    ssl_context = None  # FLARE's connection handler reads it

    def __init__(self, driver: UnixSocketDriver, connector: ConnectorInfo) -> None:
        self.driver, self.connector = driver, connector
        path = _path(connector)
        path.unlink(missing_ok=True)  # after a fault, FLARE listens on the same name again
        with short(path) as name:
            super().__init__(name, ConnectionHandler)
        path.chmod(0o600)


def _path(connector: ConnectorInfo) -> Path:
    return Path(unquote(connector.params[DriverParams.PATH.value]))


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """A form of a socket's path that the system accepts. On Linux, a long path goes through its opened folder."""
    if len(os.fsencode(path)) <= LONGEST or sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
