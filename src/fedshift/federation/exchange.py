"""One exchange between the server and its sites: requests, answers, and the replies that a method goes over."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import Content, Number, Reply, pieces, reply_content
from fedshift.federation.site import Envelope

R = TypeVar("R", bound=Reply)

KEPT_IN_MEMORY = 256 << 20
"""Bytes of replies that `Replies.keep` holds in memory; what is beyond goes to a temporary folder."""


@dataclass(frozen=True)
class Request:
    """One site's part of an exchange, as an engine delivers it."""

    site: str
    envelope: Envelope
    content: Mapping[str, Content]


@dataclass(frozen=True)
class Answer(Generic[R]):
    """What an engine brings back from a site: the reply and how many mini-batches were trained for it."""

    site: str
    reply: R
    mini_batches: int
    crossed: Mapping[str, Content] | None = None
    """The reply's content as it crossed the network, where that differs."""


@dataclass(frozen=True)
class Missing:
    """A site without a reply that can be used in an exchange, and what happened there."""

    site: str
    error: TrainingDiverged | KindRefused


class Replies(Generic[R]):
    """The replies of an exchange, one per site in the order asked, whatever order they arrive in.

    They stream: a reply is gone once the next one is taken, so the server's memory does not grow with the number of
    sites. Who has to go over them more than once says so first with `keep`. Numbers are kept anyway, see `numbers`.
    """

    def __init__(self, sites: Sequence[str], answers: Generator[tuple[str, R], None, None]) -> None:
        self._sites = tuple(sites)
        self._answers = answers
        self._numbers: dict[str, dict[str, Number]] = {}
        self._kept: _Kept[R] | None = None
        self._begun = self._ended = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that were asked; once all has been gone over, those that answered (a network may lose some)."""
        return tuple(self._numbers) if self._ended else self._sites

    def items(self) -> Iterator[tuple[str, R]]:
        """``(site, reply)`` in the order asked. Raises FedshiftError on a second pass without `keep`."""
        if self._kept is not None:
            self.drain()  # passes may be broken off or nested, so the replies are all taken in before the first one
            yield from self._kept
            return
        if self._begun:
            raise FedshiftError("replies stream and can be gone over once: call .keep() before the first pass")
        yield from self._remaining()

    def _remaining(self) -> Iterator[tuple[str, R]]:
        self._begun = True
        for site, reply in self._answers:
            self._numbers[site] = {
                name: value
                for name, value in reply_content(reply).items()
                if isinstance(value, bool | int | float | str)
            }
            if self._kept is not None:
                self._kept.add(site, reply)
            yield site, reply
        self._ended = True

    def __iter__(self) -> Iterator[R]:
        return (reply for _, reply in self.items())

    def __len__(self) -> int:
        return len(self.sites)

    def keep(self) -> Replies[R]:
        """Allow any number of passes: replies stay in memory up to a limit and on the disk beyond it."""
        if self._begun and self._kept is None:
            raise FedshiftError("call .keep() before the first pass over the replies")
        self._kept = self._kept or _Kept()
        return self

    def only(self) -> R:
        """The reply of the one site that was asked. Raises FedshiftError when several were."""
        replies = list(self)
        if len(replies) != 1:
            raise FedshiftError(f"one reply was expected, {len(replies)} sites were asked")
        return replies[0]

    def numbers(self, name: str) -> dict[str, float]:
        """A number that every reply carries, by site. Takes in what has not been gone over yet."""
        self.drain()
        return {site: float(values[name]) for site, values in self._numbers.items()}

    def drain(self) -> None:
        """Take in the remaining replies (a reply that nobody reads was still trained, sent and counted)."""
        for _ in self._remaining():
            pass


class _Kept(Generic[R]):
    """Replies for several passes. The first ones stay in memory, the others lie in files that die with this object."""

    def __init__(self) -> None:
        self._memory: list[tuple[str, R]] = []
        self._files: list[tuple[str, type[R], Path]] = []
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, site: str, reply: R) -> None:
        content = reply_content(reply)
        size = sum(size for _, _, size in pieces(content))
        if self._bytes + size <= KEPT_IN_MEMORY:
            self._bytes += size
            self._memory.append((site, reply))
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedshift-replies-")
        path = Path(self._folder.name) / f"{len(self._files)}.safetensors"
        write_message(path, content)
        self._files.append((site, type(reply), path))

    def __iter__(self) -> Iterator[tuple[str, R]]:
        yield from self._memory
        for site, kind, path in self._files:
            content, _ = read_message(path)
            yield site, kind(**content)
