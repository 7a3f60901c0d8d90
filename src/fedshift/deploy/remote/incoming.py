"""Answers that have arrived and are not read yet, and how long an exchange waits for missing ones."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message
from fedshift.encryption import read_scratch, write_scratch
from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Answer
from fedshift.federation.replies import Layout
from fedshift.files import ScratchFolder

HELD_IN_MEMORY = 32 << 20
"""Bytes of answers that wait in memory. Others wait in files, so memory does not grow with the number of sites."""


@dataclass(frozen=True)
class Held:
    """An answer that waits. With ``paths``, its body is in these files, in this order, and not in ``message``."""

    message: Message
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Taken:
    """A usable reply."""

    answer: Answer[Any] | None  # the reply; None while its message is in a file
    memory: dict[str, str]  # names and checksums of what the site keeps after the call
    # names and shapes of the tensors that must be compared with other sites' replies; None: there are none
    layout: Layout | None
    held: Held | None = None  # where the message waits


class Spool:
    """Holds answers until they are read. Several threads may use it; its files go when it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: ScratchFolder | None = None
        self._bytes = self._files = 0
        self._closed = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            if self._folder is not None:
                self._folder.remove()

    def hold(self, message: Message) -> Held | None:
        """Hold a message; None once the spool is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._bytes + message.size <= HELD_IN_MEMORY:
                self._bytes += message.size
                return Held(message)
            return Held(Message(message.header, b"", message.digest), (self._write(message.body),))

    def write(self, part: bytes) -> Path | None:
        """Write a part of a body to a file; None once the spool is closed."""
        with self._lock:
            return None if self._closed else self._write(part)

    def _write(self, data: bytes) -> Path:
        if self._folder is None:
            self._folder = ScratchFolder("answers")
        self._files += 1
        path = self._folder.path / str(self._files)
        write_scratch(path, data)
        return path

    def take(self, held: Held) -> Message:
        """The message that was held, which is then forgotten."""
        if not held.paths:
            with self._lock:
                self._bytes -= held.message.size
            return held.message
        body = io.BytesIO()  # joining the parts would need room for all of them and the whole
        for path in held.paths:
            body.write(read_scratch(path))
            path.unlink()
        return Message(held.message.header, body.getvalue(), held.message.digest)


class Arriving:
    """The body of an answer that comes in parts. Each goes to a file of a spool. Several threads may use it."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._size = 0

    def add(self, begin: int, part: bytes) -> int:
        """Take a part that begins at a byte, unless it has come before; return where the next one begins."""
        with self._lock:
            if part and begin == self._size and (path := self._spool.write(part)) is not None:
                self._paths.append(path)
                self._size += len(part)
            return self._size

    def complete(self, header: str, digest: str, size: int) -> Held | None:
        """The answer whose body has come in parts; None unless ``size`` bytes have."""
        with self._lock:
            return Held(Message(header, b"", digest), tuple(self._paths)) if size == self._size else None


class Grace:
    """How long an exchange waits for the sites that are missing once enough have answered.

    A site that was lost before is not waited for, unless it fetched its request before enough had answered. So a site
    that is still busy with an old request delays no exchange, and one that has caught up counts again.

    Args:
        seconds: after so many sites answered; None: the whole deadline.
        quorum: sites that must answer for the run to go on; None: all, and there is no grace.
        asked: how many were asked.
        lost: sites that were lost in the exchange before.
    """

    def __init__(self, seconds: float | None, quorum: int | None, asked: int, lost: Collection[str]) -> None:
        self.seconds = None if quorum is None else seconds
        self.enough = min(quorum or asked, asked)
        self._lost = frozenset(lost)
        self._since: float | None = None

    @property
    def too_late(self) -> Lost:
        """Why a site is lost for which the exchange no longer waits."""
        return Lost(f"no reply within {self.seconds} s of those of a quorum (engine.grace)")

    def note_fetch(self, site: str) -> None:
        """A site has its request."""
        if self._since is None:
            self._lost -= {site}

    def note_answer(self, usable: bool) -> None:
        """An answer has come."""
        self.enough -= usable
        if self.enough <= 0 and self._since is None:
            self._since = time.monotonic()

    def over(self, missing: Collection[str]) -> bool:
        """Whether the exchange no longer waits for these sites."""
        if self.seconds is None or self._since is None:
            return False
        return self._lost.issuperset(missing) or time.monotonic() - self._since >= self.seconds


class Stop(FedshiftError):
    """Wraps an error that ends the run, so that the checks of a reply let it pass."""

    def __init__(self, reason: FedshiftError) -> None:
        super().__init__(str(reason))
        self.reason = reason
