"""FLARE's connection over a socket, ended by any thread and freed by one, with frames of a bounded size.

How a frame looks as bytes is known here alone; FLARE has no public interface for this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from fedshift.deploy.flare.limits import LARGEST_FRAME

HEADER = int(PREFIX_LEN)
"""Bytes of a frame's header."""
PING = int(Types.PING)
"""The kind of a frame that is answered."""


def size_of(header: bytes | bytearray) -> int:
    """The bytes of the whole frame, as its header says."""
    return int(Prefix.from_bytes(header).length)


def frame(kind: int, payload: bytes = b"", size: int | None = None) -> bytes:
    """A frame. ``size``: what its header says of its length; None: the truth."""
    whole = bytearray(HEADER)
    Prefix(length=HEADER + len(payload) if size is None else size, type=kind).to_buffer(whole, 0)
    return bytes(whole) + payload


_log = logging.getLogger("fedshift.connection")


class SharedConnection(SocketConnection):  # type: ignore[misc]
    """Only the thread that reads from the connection frees its socket.

    Any thread may end a connection: a listener for a newer one, FLARE after a send that took too long. If that closed
    the socket while another thread still reads from it, the system would give the same descriptor to what is opened
    next, and the reader would take bytes from there. So ``close`` only ends the conversation.
    """

    peer_name = "the coordinator"

    def __init__(self, sock: Any, connector: ConnectorInfo, secure: bool = False) -> None:
        super().__init__(sock, connector, secure)
        self._sending, self._descriptor = threading.Lock(), threading.Lock()

    def close(self) -> None:
        """End the conversation: whoever reads or writes is told so. The socket stays open until it is released."""
        self.closing = True
        with self._descriptor, contextlib.suppress(OSError):
            # Not SSLSocket's own method, which takes the TLS session away from the thread that reads.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def read_loop(self) -> None:
        """Hand on frames until the connection ends, then free it."""
        try:
            super().read_loop()
        finally:
            self.release()

    def read_into(self, buffer: Any, offset: int, length: int) -> None:
        """Read into a buffer. FLARE reads a frame's header by itself, and then reserves what the header says."""
        super().read_into(buffer, offset, length)
        if offset == 0 and length == HEADER and (size := size_of(buffer)) > LARGEST_FRAME:
            _log.warning(f"a frame of {size} bytes from '{self.peer_name}' is refused, and its connection is ended")
            raise CommError(CommError.BAD_DATA, f"a frame of {size} bytes, of at most {LARGEST_FRAME}")

    def release(self) -> None:
        """Close the socket. Only the thread that reads may do so, when it reads no more."""
        self.close()
        with self._sending, self._descriptor:
            self.sock.close()

    def send_frame(self, frame: Any) -> None:
        """Send a frame. As with FLARE's, what is sent after the end is dropped."""
        with self._sending:
            super().send_frame(frame)
