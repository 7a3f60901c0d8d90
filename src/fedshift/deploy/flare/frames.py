"""FLARE's frames, as bytes: the only place that knows how they look. FLARE has no public interface for this."""

from __future__ import annotations

from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

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
