"""`Transport`, which carries messages to sites on other machines: its interface, lost sites, keys of requests.

`ask_plain` asks sites questions before there is a federation.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from fedshift.deploy.remote.wire import LARGEST_CARD, LARGEST_HEADER, Message, body_of, seal, unseal
from fedshift.errors import FedshiftError, KindRefused, ReplyRefused, TrainingDiverged
from fedshift.federation.messages import Content
from fedshift.federation.plain_values import Frozen, parsed

PROTOCOL = 3
"""The version of requests and replies. A site refuses any other. Requests of version 1 named a call ``step``."""


class NewJobNeeded(FedshiftError):
    """The run must continue in a new job: a site is back that the present job cannot reach."""


@dataclass(frozen=True)
class Lost:
    """Why a site gave no usable reply in an exchange.

    Attributes:
        reason: what happened, in words.
        error: the name of the error that the site answered with, if it answered.
    """

    reason: str
    error: str = ""

    @property
    def refused(self) -> bool:
        """Whether the site answered that its policy refuses a kind."""
        return self.error == KindRefused.__name__

    def missing(self) -> KindRefused | TrainingDiverged | None:
        """The error of a site that answered but gave nothing; None for a site that did not answer."""
        kinds: tuple[type[KindRefused | TrainingDiverged], ...] = (KindRefused, TrainingDiverged)
        return next((kind(self.reason) for kind in kinds if kind.__name__ == self.error), None)


class Sign(Enum):
    """What a transport may yield besides answers: a site has its request, or nothing has come for a moment."""

    FETCHED = "fetched"
    QUIET = "quiet"


class Transport(Protocol):
    """Carries one message to each of some sites and brings back their answers."""

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost | Sign], None, None]:
        """Send the messages; yield answers in the order of arrival.

        While it waits, a transport yields `Sign.QUIET`, with any name, so that the receiver can end the exchange.
        Requests to sites that have not answered by then are withdrawn.

        Args:
            messages: site and message. The transport has the only reference to a message's bytes.
            deadline: seconds after which a site without an answer is `Lost`.
            patience: seconds within which sites that were lost before must fetch their message.

        Raises:
            NewJobNeeded: a site is back that this job cannot reach.
        """
        ...


def opened(
    message: Message, key: str, most_tensors: int = 0, largest_header: int = LARGEST_HEADER
) -> tuple[dict[str, Any], dict[str, Content], dict[str, Content]]:
    """Open the answer to the request ``key``. The answer may be an ``error``.

    Args:
        message: the answer.
        key: of the request.
        most_tensors: an answer with more tensors is refused before they are read.
        largest_header: an answer whose header has more characters is refused before it is read.

    Returns:
        Header, content, and the content as it crossed the network.

    Raises:
        FedshiftError: the message cannot be read, or answers another request.
    """
    header, content, crossed = unseal(message, most_tensors, largest_header)
    if "error" not in header and header.get("answers") != key:
        raise FedshiftError("it answers another request")
    return header, content, crossed


def request_key(header: Mapping[str, Any], body_sha256: str) -> str:
    """A digest of a request. A site that gets the same request again repeats its answer and does not work again.

    The checkpoint's number and files are left out, since they differ when a round is repeated.
    """
    own = {name: value for name, value in header.items() if name not in ("key", "kept", "checkpoint")}
    return hashlib.sha256(f"{json.dumps(own, sort_keys=True)}\n{body_sha256}".encode()).hexdigest()


def drained(messages: list[tuple[str, Message]]) -> Iterator[tuple[str, Message]]:
    """The messages of a list, which forgets them: the transport may have their bytes elsewhere than in memory."""
    messages.reverse()
    while messages:
        yield messages.pop()


A = TypeVar("A", bound=Frozen)


@dataclass(frozen=True)
class Heard(Generic[A]):
    """What a site answered, and when that arrived by this machine's clock."""

    answer: A
    arrived: float


class Done(Frozen):
    """An answer that says nothing but that the request was met."""


def ask_plain(
    transport: Transport,
    what: str,
    run: str,
    headers: Mapping[str, Mapping[str, Any]],
    deadline: float,
    kind: type[A],
) -> dict[str, Heard[A] | Lost]:
    """Ask sites for plain values, outside a federation.

    Args:
        transport: carries the messages.
        what: the request, such as ``hello``.
        run: name of the run or experiment.
        headers: what each site is asked, by site.
        deadline: seconds to wait.
        kind: what an answer says.

    Returns:
        Each site's answer, by site; a site whose answer says something else is lost, with the error `ReplyRefused`.

    Raises:
        NewJobNeeded: as the transport.
    """
    body = body_of({})
    outgoing: list[tuple[str, Message]] = []
    keys: dict[str, str] = {}
    for site, header in headers.items():
        whole = {"do": what, "protocol": PROTOCOL, "run": run, **header}
        keys[site] = whole["key"] = request_key(whole, body.sha256)
        outgoing.append((site, seal(whole, body)))
    largest = LARGEST_CARD if what == "hello" else LARGEST_HEADER
    found: dict[str, Heard[A] | Lost] = {}
    for site, message in transport.exchange(iter(outgoing), deadline, {}):
        if isinstance(message, Lost):
            found[site] = message
        elif isinstance(message, Message):
            found[site] = _heard(kind, site, message, keys.get(site, ""), largest)
    return found


def _heard(kind: type[A], site: str, message: Message, key: str, largest_header: int) -> Heard[A] | Lost:
    try:
        header, _, _ = opened(message, key, largest_header=largest_header)
    except FedshiftError as error:
        return Lost(str(error))
    if "error" in header:
        return Lost(str(header.get("message"))[:2000], str(header["error"]))
    try:
        return Heard(parsed(kind, message.header, f"site '{site}': its answer"), time.time())
    except FedshiftError as error:
        return Lost(str(error), ReplyRefused.__name__)
