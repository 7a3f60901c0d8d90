"""A FLARE driver for TCP with mutual TLS whose port nobody can block, and whose frames have a bounded size.

FLARE's own driver waits for each TLS handshake where it accepts connections, so one silent connection keeps everybody
else out; and it reserves up to 2 GiB for a frame as soon as its header says so. The bytes on the wire are the
same, so the other side uses FLARE's ``tcp``.

Here one thread accepts connections and runs all their handshakes side by side. If there are too many, the oldest is
dropped, so old connections never lock out new ones. A connection counts as the coordinator's peer only
when its certificate is among those that the kit lists in ``certificates.json``; the list may change at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.net_utils import get_ssl_context
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from fedshift.deployment.flare.drivers.shared_connection import SharedConnection
from fedshift.deployment.flare.limits import CERTIFICATES, LARGEST_FRAME, LISTENER
from fedshift.deployment.json_files import read_object

HANDSHAKE_SECONDS = 10.0
"""Most seconds from a connection to the end of its handshake."""
HANDSHAKES, HANDSHAKES_PER_ADDRESS = 128, 16
"""Most handshakes under way, in all and from one address."""
CONNECTIONS_PER_CERTIFICATE = 8
"""A site needs one connection for its client, one for its job, and for a moment some of a job that ends."""
_LOOK_AGAIN = 0.5
"""Seconds between two looks at deadlines and at the list of certificates."""

_log = logging.getLogger("fedshift.listener")


class GuardedConnection(SharedConnection):
    """A connection that ends before it reserves memory for a frame that is too large."""

    def read_into(self, buffer: Any, offset: int, length: int) -> None:
        """Read into a buffer. FLARE reads a frame's header by itself, and then reserves what the header says."""
        super().read_into(buffer, offset, length)
        if offset == 0 and length == PREFIX_LEN:
            size = Prefix.from_bytes(buffer).length
            if size > LARGEST_FRAME:
                _log.warning(f"{self.get_conn_properties()}: a frame of {size} bytes is refused")
                raise CommError(CommError.BAD_DATA, f"a frame of {size} bytes, of at most {LARGEST_FRAME}")


class GuardedTcpDriver(TcpDriver):  # type: ignore[misc]
    """Listens on ``guarded://host:port``. Whoever connects does so with FLARE's own ``tcp``."""

    def __init__(self) -> None:
        super().__init__()
        self._listener: _Listener | None = None

    @staticmethod
    def supported_transports() -> list[str]:
        return [LISTENER]

    def listen(self, connector: ConnectorInfo) -> None:
        self.connector = connector
        self._listener = _Listener(self, connector)
        self._listener.serve()

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.closing.set()
        super().shutdown()


class _Listener:
    """The coordinator's port: handshakes that are under way, and the connections that they became."""

    def __init__(self, driver: GuardedTcpDriver, connector: ConnectorInfo) -> None:
        self.closing = threading.Event()
        self._driver, self._connector = driver, connector
        params = connector.params
        context = get_ssl_context(params, ssl_server=True)
        if context is None:
            raise CommError(CommError.BAD_CONFIG, f"{LISTENER} needs certificates")
        self._context = context
        self._list, self._known = Path(os.environ["FEDSHIFT_KIT"]) / CERTIFICATES, set[str]()
        address = (params.get(DriverParams.HOST.value) or "", int(params[DriverParams.PORT.value]))
        self._door = socket.create_server(address, backlog=HANDSHAKES)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._greeted: dict[ssl.SSLSocket, tuple[str, float]] = {}
        """Handshakes under way, the oldest first: address and deadline."""
        self._lock = threading.Lock()
        self._admitted: dict[GuardedConnection, str] = {}
        """Connections, the oldest first: the digest of the certificate."""

    def serve(self) -> None:
        """Accept connections until told to stop."""
        look_again = 0.0
        try:
            while not self.closing.is_set():
                for key, _ in self._selector.select(_LOOK_AGAIN):
                    try:
                        if key.fileobj is self._door:
                            self._accept()
                        elif key.fileobj in self._greeted:  # it may have been dropped a moment ago, for a newer one
                            self._greet(key.fileobj)
                    except Exception:  # whatever one connection does, the others must not suffer for it
                        _log.exception("a connection failed in an unexpected way")
                if time.monotonic() > look_again:
                    look_again = time.monotonic() + _LOOK_AGAIN
                    self._end_late_handshakes()
                    self._end_revoked()
        finally:
            for connection in list(self._greeted):
                self._drop(connection)
            with self._lock:
                admitted = list(self._admitted)
            for one in admitted:  # from here on nothing checks whether a certificate is revoked
                one.close()
            self._selector.close()
            self._door.close()

    # Handshakes -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            plain, (address, _) = self._door.accept()
        except OSError:  # the peer has gone again, or this process has no more files
            time.sleep(0.01)
            return
        plain.setblocking(False)
        try:
            secure = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):  # it was reset meanwhile
            plain.close()
            return
        mine = [one for one, (other, _) in self._greeted.items() if other == address]
        if len(mine) >= HANDSHAKES_PER_ADDRESS:
            self._drop(mine[0])
        elif len(self._greeted) >= HANDSHAKES:
            self._drop(next(iter(self._greeted)))
        self._greeted[secure] = (address, time.monotonic() + HANDSHAKE_SECONDS)
        self._selector.register(secure, selectors.EVENT_READ)

    def _greet(self, connection: ssl.SSLSocket) -> None:
        """Do the part of a handshake that is possible now."""
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE)
        except (OSError, ValueError):
            self._drop(connection)
        else:
            del self._greeted[connection]
            self._selector.unregister(connection)
            self._admit(connection)

    def _end_late_handshakes(self) -> None:
        now = time.monotonic()
        for connection, (_, deadline) in list(self._greeted.items()):
            if now > deadline:
                self._drop(connection)

    def _drop(self, connection: ssl.SSLSocket) -> None:
        """End a handshake."""
        del self._greeted[connection]
        self._selector.unregister(connection)
        connection.close()

    # Connections ------------------------------------------------------------------------------------------------------

    def _admit(self, secure: ssl.SSLSocket) -> None:
        """Hand a connection to FLARE, if its certificate is accepted."""
        try:
            digest = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").hexdigest()
            if digest not in self._accepted():
                _log.warning(f"{secure.getpeername()}: certificate {digest[:16]} is not accepted (any more)")
                secure.close()
                return
            secure.setblocking(True)
            connection = GuardedConnection(secure, self._connector, secure=True)
        except OSError:
            secure.close()
            return
        with self._lock:
            mine = [one for one, other in self._admitted.items() if other == digest]
            self._admitted[connection] = digest
        for one in mine[: max(0, len(mine) + 1 - CONNECTIONS_PER_CERTIFICATE)]:
            one.close()
        try:
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()
        except RuntimeError:  # the system allows no further thread
            _log.warning(f"{connection.get_conn_properties()}: there is no thread left for it")
            with self._lock:
                del self._admitted[connection]
            connection.release()

    def _carry(self, connection: GuardedConnection) -> None:
        try:
            self._driver.add_connection(connection)
            connection.read_loop()
        finally:
            try:
                self._driver.close_connection(connection)
            finally:
                with self._lock:
                    self._admitted.pop(connection, None)
                connection.release()

    def _end_revoked(self) -> None:
        accepted = self._accepted()
        with self._lock:
            revoked = [connection for connection, digest in self._admitted.items() if digest not in accepted]
        for connection in revoked:
            _log.warning(f"{connection.get_conn_properties()}: its certificate is not accepted any more")
            connection.close()

    def _accepted(self) -> set[str]:
        """The digests of the certificates that are accepted now. A list that cannot be read changes nothing."""
        entries = read_object(self._list).values()
        if entries:
            self._known = {str(entry.get("certificate")) for entry in entries if not entry.get("revoked", True)}
        else:
            _log.error(f"{self._list} cannot be read: what was accepted before is accepted still")
        return self._known
