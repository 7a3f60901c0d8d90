"""A peer that sends frames and reads no answer, and one that asks how long the coordinator takes to greet it.

Both speak FLARE's framing over mutual TLS with a site's own certificate. What is sent is bounded in bytes and time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection

from fedshift.deploy.flare.drivers.shared_connection import PING, frame

_MOST_BYTES = 64 << 20
"""Bytes that a flood sends at most."""


def greeting(name: str) -> bytes:
    written: list[bytes] = []
    connection = SimpleNamespace(name=name, send_frame=lambda sent: written.append(bytes(sent)))
    SfmConnection(connection, Endpoint(name)).send_handshake(Types.HELLO)
    return written[0]


def connect(startup: Path, port: int, seconds: float = 10.0) -> ssl.SSLSocket:
    """A connection to the coordinator on this machine, with the certificate of a site's kit.

    Args:
        startup: the folder ``flare/startup`` of the kit.
        port: the coordinator's port.
        seconds: for the handshake and for each read and write.

    Raises:
        OSError: it cannot be made.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker checks no certificate
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    return context.wrap_socket(socket.create_connection(("localhost", port), seconds))


def seconds_to_greet(startup: Path, port: int, name: str, most: float = 60.0) -> float:
    """Seconds from a new connection's HELLO to the first byte of the answer.

    Args:
        startup: as for `connect`.
        port: as for `connect`.
        name: of the endpoint in FLARE's network; it begins with the site's name.
        most: after so many seconds it gives up.

    Raises:
        OSError: there is no answer.
    """
    with connect(startup, port, most) as connection:
        begun = time.monotonic()
        connection.sendall(greeting(name))
        if connection.recv(1) == b"":
            raise ConnectionError("the connection was closed before an answer")
        return time.monotonic() - begun


class Flood:
    """Connections that send PINGs and read nothing. One that is ended is made again.

    Attributes:
        sent: bytes that were sent.
        ended: connections that the coordinator ended.
        refused: connections that it ended before a byte of the flood was taken.
    """

    def __init__(self, startup: Path, port: int, name: str, connections: int = 1) -> None:
        self.sent = self.ended = self.refused = 0
        self._startup, self._port = startup, port
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"{name}{number}",), daemon=True) for number in range(connections)
        ]

    def _run(self, name: str) -> None:
        many = (frame(PING) + frame(PING, b"\x80abc")) * 1000
        while not self._stopping.is_set() and self.sent < _MOST_BYTES:
            before = self.sent
            with contextlib.suppress(OSError), connect(self._startup, self._port) as connection:
                connection.sendall(greeting(name))
                self._stopping.wait(0.2)
                self._pour(connection, many)
            if not self._stopping.is_set():
                self.ended += 1
                self.refused += self.sent == before
                self._stopping.wait(0.1)

    def _pour(self, connection: ssl.SSLSocket, many: bytes) -> None:
        """Send until the connection is ended. A write that waits for long is tried again with the same bytes."""
        connection.settimeout(0.5)
        view = memoryview(many)
        while not self._stopping.is_set() and self.sent < _MOST_BYTES:
            with contextlib.suppress(TimeoutError):
                done = connection.send(view)
                self.sent += done
                view = view[done:] or memoryview(many)

    @contextlib.contextmanager
    def flowing(self) -> Iterator[Flood]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(30)
