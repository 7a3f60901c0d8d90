"""One exchange between the server and its sites: requests, answers, and the replies that a method reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from fedshift.encryption import write_scratch
from fedshift.errors import FedshiftError
from fedshift.federation.message_files import mapped_message
from fedshift.federation.messages import Content, Number, PerSite, Reply, encode, pieces, reply_content
from fedshift.federation.site import Envelope
from fedshift.files import ScratchFolder
from fedshift.functional.averaging import MeanAccumulator
from fedshift.weights import NamedTensors, Weights

R = TypeVar("R", bound=Reply)

KEPT_IN_MEMORY = 64 << 20
"""Bytes of replies that `Replies.keep` holds in memory. Further replies go to files in a temporary folder."""


@dataclass(frozen=True)
class Request:
    """What one site is asked in an exchange."""

    site: str
    envelope: Envelope
    content: Mapping[str, Content]


def content_for(site: str, name: str, value: Content | PerSite) -> Content:
    """What ``site`` is sent of ``value``, the argument ``name`` of a call."""
    if not isinstance(value, PerSite):
        return value
    if site not in value.of:
        raise FedshiftError(
            f"'{name}' differs between sites and has nothing for '{site}'; it is for {sorted(value.of)}"
        )
    return value.of[site]


@dataclass(frozen=True)
class Answer(Generic[R]):
    """What an engine brings back from a site: its reply, and how many mini-batches it trained on."""

    site: str
    reply: R
    mini_batches: int
    crossed: Mapping[str, Content] | None = None
    """The reply's content as it crossed the network, where that differs (rounded weights)."""


@dataclass(frozen=True)
class Missing:
    """A site that gave no usable reply in an exchange.

    Attributes:
        site: its name.
        error: why.
        advice: what the user can do if this ends the run, as the end of a sentence.
    """

    site: str
    error: FedshiftError
    advice: str = ""

    def ending(self, *more: str) -> FedshiftError:
        """The error that ends the run: the site's own error, ``more``, then the advice."""
        answer = [text for text in (*more, self.advice) if text]
        return type(self.error)("; ".join([str(self.error), *answer])) if answer else self.error


@dataclass(frozen=True)
class Routed:
    """Models in the replies to a call that the server does not read: it hands them on, or keeps them for others.

    Attributes:
        field: of the reply: a model, or several by site.
        to: call → its argument that is given the models, by site.
        readers: who may read them: the target, the sender alone (which gets them back), or all sites of the run.
        in_model: whether they are parts of the trained model, which is then sealed, too; the server hands on any others
            in the next exchange.
    """

    field: str
    to: Mapping[str, str] = dataclasses.field(default_factory=dict)
    readers: Literal["target", "sender", "all"] = "target"
    in_model: bool = False


class Screening(Protocol):
    """Screens the replies of an exchange before the method reads them: robust aggregation."""

    def screen(
        self, call: str, content: Mapping[str, Content | PerSite], answers: Generator[tuple[str, R], None, None]
    ) -> Generator[tuple[str, R], None, None]:
        """The replies that the method reads: some may be left out, or have other models."""
        ...


@dataclass(frozen=True)
class Mean:
    """Weighted means over the replies of an exchange.

    Attributes:
        tensors: the mean of each field of tensors, by field.
        numbers: each number of the replies by site, by field; under secure aggregation its mean under one name.
        shares: every site's share; empty under secure aggregation.
        answered: how many sites answered.
    """

    tensors: Mapping[str, NamedTensors]
    numbers: Mapping[str, dict[str, float]]
    shares: dict[str, float]
    answered: int

    def model(self, field: str = "weights") -> Weights:
        """The mean of a field that holds models."""
        return Weights(self.tensors[field])


class Replies(Generic[R]):
    """The replies of an exchange, one per site, in the order asked and not the order of arrival.

    Replies stream: each one is dropped when the next is read, so the server's memory does not grow with the number of
    sites. Call `keep` first to read them more than once. The numbers in replies are always kept, see `numbers`.
    """

    def __init__(self, sites: Sequence[str], answers: Generator[tuple[str, R], None, None]) -> None:
        self._sites = tuple(sites)
        self._answers = answers
        self._numbers: dict[str, dict[str, Number]] = {}
        self._kept: _Kept[R] | None = None
        self._begun = self._ended = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites asked; after the last reply was read, the sites that answered (a network may lose some)."""
        return tuple(self._numbers) if self._ended else self._sites

    def items(self) -> Iterator[tuple[str, R]]:
        """Iterate over ``(site, reply)`` in the order asked.

        Raises:
            FedshiftError: this is a second pass, and `keep` was not called.
        """
        if self._kept is not None:
            self.drain()  # a caller may stop early or nest passes, so read all replies before the first pass
            yield from self._kept
            return
        if self._begun:
            raise FedshiftError("replies can be read only once: call .keep() before the first pass")
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
            del reply  # before the next is read
        self._ended = True

    def __iter__(self) -> Iterator[R]:
        return (reply for _, reply in self.items())

    def __len__(self) -> int:
        return len(self.sites)

    def keep(self) -> Replies[R]:
        """Allow any number of passes. Replies stay in memory up to `KEPT_IN_MEMORY`, and on disk beyond it.

        Raises:
            FedshiftError: the first pass has begun.
        """
        if self._begun and self._kept is None:
            raise FedshiftError("call .keep() before the first pass over the replies")
        self._kept = self._kept or _Kept()
        return self

    def mean(self, by: str | Mapping[str, float] = "samples") -> Mean:
        """The mean over the replies, taken in one streaming pass: the only way to read sums alone.

        Args:
            by: ``samples`` weighs sites by N_k/ΣN (FedAvg), ``uniform`` by 1/K, a mapping by what it gives each site.

        Raises:
            FedshiftError: no site answered.
        """
        means: dict[str, tuple[type[NamedTensors], MeanAccumulator]] = {}
        raw: dict[str, float] = {}
        numbers: dict[str, dict[str, float]] = {}
        for site, reply in self.items():
            content = reply_content(reply)
            raw[site] = by[site] if isinstance(by, Mapping) else float(content["samples"]) if by == "samples" else 1.0  # type: ignore[arg-type]
            for name in content:
                if isinstance(content[name], NamedTensors):
                    _, mean = means.setdefault(name, (type(content[name]), MeanAccumulator()))  # type: ignore[arg-type]
                    mean.add(content[name], raw[site], f"site '{site}'")  # type: ignore[arg-type]
                elif isinstance(content[name], int | float):
                    numbers.setdefault(name, {})[site] = content[name]  # type: ignore[assignment]
            del reply, content  # before the next is read
        if not raw:
            raise FedshiftError("no site answered")
        total = sum(raw.values())
        tensors = {name: kind(mean.result()) for name, (kind, mean) in means.items()}
        return Mean(tensors, numbers, {site: share / total for site, share in raw.items()}, len(raw))

    def only(self) -> R:
        """The reply of the one site that was asked.

        Raises:
            FedshiftError: several sites were asked, or none answered.
        """
        replies = list(self)
        if len(replies) != 1:
            raise FedshiftError(f"one reply was expected, {len(replies)} sites were asked")
        return replies[0]

    def numbers(self, name: str) -> dict[str, float]:
        """A number that every reply carries, by site. Reads the remaining replies first."""
        self.drain()
        return {site: float(values[name]) for site, values in self._numbers.items()}

    def drain(self) -> None:
        """Read the remaining replies. A reply that the method ignores was still trained, sent and counted."""
        for _ in self._remaining():
            pass


class _Kept(Generic[R]):
    """Replies for several passes: the first in memory, the others in temporary files, deleted with this object."""

    def __init__(self) -> None:
        self._memory: list[tuple[str, R]] = []
        self._files: list[tuple[str, type[R], Path]] = []
        self._bytes = 0
        self._folder: ScratchFolder | None = None

    def add(self, site: str, reply: R) -> None:
        content = reply_content(reply)
        size = sum(size for _, _, size in pieces(content))
        if self._bytes + size <= KEPT_IN_MEMORY:
            self._bytes += size
            self._memory.append((site, reply))
            return
        if self._folder is None:
            self._folder = ScratchFolder("replies")
        path = self._folder.path / f"{len(self._files)}.safetensors"
        write_scratch(path, encode(content))
        self._files.append((site, type(reply), path))

    def __iter__(self) -> Iterator[tuple[str, R]]:
        yield from self._memory
        for site, kind, path in self._files:
            yield site, kind(**mapped_message(path))
