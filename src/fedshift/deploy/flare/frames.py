"""FLARE's frames, as bytes: the only place that knows how they look. FLARE has no public interface for this."""

from __future__ import annotations

from types import SimpleNamespace

from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection

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


def greeting(name: str) -> bytes:
    """The frame with which an endpoint of FLARE's network names itself."""
    written: list[bytes] = []
    connection = SimpleNamespace(name=name, send_frame=lambda sent: written.append(bytes(sent)))
    SfmConnection(connection, Endpoint(name)).send_handshake(Types.HELLO)
    return written[0]
