"""A FLARE driver for TCP with mutual TLS whose port nobody can block, and whose frames have a bounded size.

FLARE's own driver waits for each TLS handshake where it accepts connections, so one silent connection keeps everybody
else out; and it reserves up to 2 GiB for a frame as soon as its header says so. The bytes on the wire are the
same, so the other side uses FLARE's ``tcp``.

Here one thread accepts connections and runs all their handshakes side by side. If there are too many, the oldest is
dropped, so old connections never lock out new ones. A connection counts as the coordinator's peer only
when its certificate is among those that the kit lists in ``certificates.json``; the list may change at any time.

FLARE handles the frames of all peers in 100 threads, behind a queue without a bound, and a thread that answers waits
until the peer reads. So one peer that sends and never reads takes all threads and any memory. Here each certificate has
its own few threads (`Peer`). A connection is read only while little that came from its certificate, and little that is
to go out on it, waits; meanwhile TCP has the peer wait. What goes out waits in a queue, so whoever sends never waits
(`GuardedConnection`). A peer that takes nothing for a while loses the connection; after a few of these its certificate
is refused for some minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import selectors
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.net_utils import get_ssl_context
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.f3.sfm.conn_manager import SfmFrameReceiver

from fedshift.deploy.flare.drivers.shared_connection import SharedConnection
from fedshift.deploy.flare.limits import CERTIFICATES, LISTENER, REFUSED_FOR
from fedshift.digests import Damaged
from fedshift.json_objects import read_object

HANDSHAKE_SECONDS = 10.0
"""Most seconds from a connection to the end of its handshake."""
HANDSHAKES, HANDSHAKES_PER_ADDRESS = 128, 16
"""Most handshakes under way, in all and from one address."""
CONNECTIONS_PER_CERTIFICATE = 8
"""A site needs one connection for its client, one for its job, and for a moment some of a job that ends."""
MOST_FRAMES, MOST_BYTES = 16, 16 << 20
"""Frames and bytes of one certificate that are handled or wait to be; then its connections are not read."""
FRAMES_PER_SECOND = 2000
"""Frames that one certificate may send in a second; a site sends a model in frames of 1 MiB."""
MOST_UNSENT, MOST_BYTES_UNSENT = 256, 16 << 20
"""Frames and bytes that wait to go out on one connection; then it is not read. Others may still send to it: FLARE does
not send more than 16 MiB of a message before it was acknowledged."""
OVERFULL = 16
"""Times as much that ends the connection."""
SEND_SECONDS = 10.0
"""Seconds in which a peer must take something of what is sent to it."""
STALLS, STALLS_WITHIN, REFUSED_SECONDS = 3, 60.0, 300.0
"""Connections that ended since the peer took nothing, within so many seconds, and for how long it is then refused."""
_PIECE = 1 << 14
"""Bytes of a TLS record: what is written at once."""
_LOOK_AGAIN = 0.5
"""Seconds between two looks at deadlines and at the list of certificates."""

_log = logging.getLogger("fedshift.listener")


class Peer:
    """What the connections of one certificate may take together: threads, frames and bytes, frames in a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self._workers = ThreadPoolExecutor(MOST_FRAMES, "peer")
        self._frames = self._bytes = 0
        self._second, self._in_second = 0.0, 0
        self._stalls: deque[float] = deque(maxlen=STALLS)
        self._refused_until = 0.0

    def handle(self, connection: GuardedConnection, frame: Any) -> None:
        """Have a frame handled by one of this peer's threads, once there is room for it; until then the caller waits.
        CommError if the connection ends meanwhile, or the system allows no further thread."""
        self._slow_down(connection)
        with self.changed:
            while not (connection.closing or (self._has_room() and connection.is_read())):
                self.changed.wait()
            if connection.closing:
                raise CommError(CommError.CLOSED, "the connection is ended")
            self._frames, self._bytes = self._frames + 1, self._bytes + len(frame)
        try:
            self._workers.submit(self._handle, connection, frame)
        except RuntimeError as error:
            self._give_room_back(len(frame))
            connection.close()
            raise CommError(CommError.ERROR, "there is no thread left to handle a frame") from error

    def _has_room(self) -> bool:
        return self._frames < MOST_FRAMES and self._bytes < MOST_BYTES

    def _handle(self, connection: GuardedConnection, frame: Any) -> None:
        try:
            if not connection.closing:
                connection.hand_over(frame)
        finally:
            self._give_room_back(len(frame))

    def _give_room_back(self, size: int) -> None:
        with self.changed:
            self._frames, self._bytes = self._frames - 1, self._bytes - size
            self.changed.notify_all()

    def _slow_down(self, connection: GuardedConnection) -> None:
        """Wait for the next second if there were too many frames in this one."""
        with self.changed:
            now = time.monotonic()
            if now - self._second >= 1:
                self._second, self._in_second = now, 0
            self._in_second += 1
            left = self._second + 1 - now if self._in_second > FRAMES_PER_SECOND else 0.0
        if left > 0 and not connection.closing:
            time.sleep(left)

    def count_stall(self, why: str) -> None:
        """Count a connection that was ended since the peer took nothing, and refuse the peer after a few."""
        now = time.monotonic()
        _log.warning(f"a connection of '{self.name}' is ended: {why}")
        self._stalls.append(now)
        if len(self._stalls) == STALLS and now - self._stalls[0] < STALLS_WITHIN and not self.is_refused():
            self._refused_until = now + REFUSED_SECONDS
            _log.error(f"'{self.name}' {REFUSED_FOR} {REFUSED_SECONDS / 60:.0f} minutes: it sends and reads no answers")

    def is_refused(self) -> bool:
        """Whether its connections are refused now."""
        return time.monotonic() < self._refused_until

    def forget(self) -> None:
        """End its threads, once the frames that they handle are done."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class GuardedConnection(SharedConnection):
    """A connection that bounds what its peer can take: memory, threads, and the time of those who send to it."""

    def __init__(self, sock: Any, connector: ConnectorInfo, peer: Peer) -> None:
        super().__init__(sock, connector, secure=True)
        self.peer, self.peer_name = peer, peer.name
        self._unsent: deque[Any] = deque()
        self._bytes_unsent, self._pieces = 0, 0
        self._waiting = threading.Condition()
        self._progress: tuple[Any, ...] = ()
        self._progress_at = time.monotonic()

    # What comes in ----------------------------------------------------------------------------------------------------

    def process_frame(self, frame: Any) -> None:
        """Have a frame handled; the next one is read afterwards."""
        self.peer.handle(self, frame)

    def hand_over(self, frame: Any) -> None:
        """Handle a frame in this thread, as FLARE does in one of its own."""
        receiver = self.frame_receiver
        if isinstance(receiver, SfmFrameReceiver):
            receiver.conn.last_activity = time.time()
            receiver.conn_manager.process_frame_task(receiver.conn, frame)
        else:
            super().process_frame(frame)

    def is_read(self) -> bool:
        """Whether so little waits to go out that more may come in."""
        return len(self._unsent) < MOST_UNSENT and self._bytes_unsent < MOST_BYTES_UNSENT

    # What goes out ----------------------------------------------------------------------------------------------------

    def send_frame(self, frame: Any) -> None:
        """Add a frame to those that go out. As with FLARE's, what is sent after the end is dropped."""
        with self._waiting:
            if self.closing:
                return
            self._unsent.append(frame)
            self._bytes_unsent += len(frame)
            self._waiting.notify()
            most = max(len(self._unsent) / MOST_UNSENT, self._bytes_unsent / MOST_BYTES_UNSENT)
        if most > OVERFULL:
            self._end_stalled("what waits for it fills its queue")

    def write_loop(self) -> None:
        """Write what goes out, in a thread of its own, until the connection ends."""
        while True:
            with self._waiting:
                while not self._unsent and not self.closing:
                    self._waiting.wait()
                if self.closing:
                    self._unsent.clear()
                    return
                frame = self._unsent[0]
            try:
                super().send_frame(frame)
            except CommError:
                self.close()
                continue
            with self._waiting:
                if self._unsent:
                    self._unsent.popleft()
                    self._bytes_unsent -= len(frame)
            with self.peer.changed:
                self.peer.changed.notify_all()

    def _send_with_timeout(self, frame: Any, timeout_sec: float) -> None:
        """Write a frame piece by piece. However slow the peer is, it goes on while the peer takes something."""
        view = memoryview(frame)
        while view:
            view = view[self.sock.send(view[:_PIECE]) :]
            self._pieces += 1

    def end_if_stalled(self) -> None:
        """End the connection if something waits to go out and the peer has taken nothing of it for long."""
        now, progress = time.monotonic(), (self._pieces, _unacknowledged_bytes(self.sock))
        if progress != self._progress or not self._unsent:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at > SEND_SECONDS:
            self._end_stalled(f"it has taken nothing for {SEND_SECONDS:g} s")

    def _end_stalled(self, why: str) -> None:
        with self._waiting:
            counted, self.closing = not self.closing, True
        self.close()
        if counted:
            self.peer.count_stall(why)

    def close(self) -> None:
        """End the conversation, also for those who wait to read or to write."""
        super().close()
        with self._waiting:
            self._waiting.notify_all()
        with self.peer.changed:
            self.peer.changed.notify_all()


def _unacknowledged_bytes(connection: ssl.SSLSocket) -> int:
    """Bytes that the system holds for a peer: fewer than before if it has taken some. 0 where it cannot be asked."""
    if sys.platform != "linux":
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (OSError, ValueError):  # it is closed already
        return 0


class GuardedTcpDriver(TcpDriver):  # type: ignore[misc]
    """Listens on ``guarded://host:port``. Whoever connects does so with FLARE's own ``tcp``, or as `dialling`."""

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
        self._list, self._names = Path(os.environ["FEDSHIFT_KIT"]) / CERTIFICATES, dict[str, str]()
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
        self._peers: dict[str, Peer] = {}

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
                    self._end_stalled()
        finally:
            for connection in list(self._greeted):
                self._drop(connection)
            with self._lock:
                admitted = list(self._admitted)
            for item in admitted:  # from here on nothing checks whether a certificate is revoked
                item.close()
            for peer in self._peers.values():
                peer.forget()
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
        mine = [key for key, (other, _) in self._greeted.items() if other == address]
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
            if digest not in self._accepted_names():
                _log.warning(f"{secure.getpeername()}: certificate {digest[:16]} is not accepted (any more)")
                secure.close()
                return
            peer = self._peers.get(digest) or self._peers.setdefault(digest, Peer(self._names[digest]))
            if peer.is_refused():
                secure.close()
                return
            secure.setblocking(True)
            connection = GuardedConnection(secure, self._connector, peer)
        except OSError:
            secure.close()
            return
        with self._lock:
            mine = [key for key, other in self._admitted.items() if other == digest]
            self._admitted[connection] = digest
        for key in mine[: max(0, len(mine) + 1 - CONNECTIONS_PER_CERTIFICATE)]:
            key.close()
        try:
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()
        except RuntimeError:  # the system allows no further thread
            _log.warning(f"{connection.get_conn_properties()}: there is no thread left for it")
            with self._lock:
                del self._admitted[connection]
            connection.release()

    def _carry(self, connection: GuardedConnection) -> None:
        try:
            threading.Thread(target=connection.write_loop, daemon=True).start()
            self._driver.add_connection(connection)
            connection.read_loop()
        finally:
            try:
                self._driver.close_connection(connection)
            finally:
                with self._lock:
                    self._admitted.pop(connection, None)
                connection.release()

    def _end_stalled(self) -> None:
        with self._lock:
            admitted = list(self._admitted)
        for connection in admitted:
            connection.end_if_stalled()
            if connection.peer.is_refused():
                connection.close()

    def _end_revoked(self) -> None:
        accepted = self._accepted_names()
        for digest in [digest for digest in self._peers if digest not in accepted]:
            self._peers.pop(digest).forget()
        with self._lock:
            revoked = [connection for connection, digest in self._admitted.items() if digest not in accepted]
        for connection in revoked:
            _log.warning(f"{connection.get_conn_properties()}: its certificate is not accepted any more")
            connection.close()

    def _accepted_names(self) -> dict[str, str]:
        """The certificates that are accepted now: digest → name. A list that cannot be read changes nothing."""
        try:
            entries = read_object(self._list, older=True).items()
        except Damaged as error:
            _log.error(f"{error}; what was accepted before is accepted still")
            return self._names
        if entries:
            accepted = ((name, entry) for name, entry in entries if not entry.get("revoked", True))
            self._names = {str(entry.get("certificate")): name for name, entry in accepted}
        else:
            _log.error(f"{self._list} cannot be read: what was accepted before is accepted still")
        return self._names
