"""`Transport`, which carries messages to sites on other machines, and how requests and answers become messages.

`ask_sites` asks sites questions before there is a federation.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from fedshift.deploy.remote.requests import PROTOCOL, Request, request_key
from fedshift.deploy.remote.wire import LARGEST_CARD, LARGEST_HEADER, Body, Message, body_of, seal, unseal
from fedshift.errors import FedshiftError, KindRefused, ReplyRefused, TrainingDiverged
from fedshift.federation.messages import Content
from fedshift.federation.plain_values import Frozen, Unreadable, parse_json


class NewJobNeeded(FedshiftError):
    """The run must continue in a new job: a site is back that the present job cannot reach."""


@dataclass(frozen=True)
class Lost:
    """Why a site gave no usable reply in an exchange."""

    reason: str  # what happened, in words
    error: str = ""  # the name of the error that the site answered with, if it answered

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
        Requests to sites that have not answered by then are withdrawn. NewJobNeeded if a site is back that this job
        cannot reach.

        Args:
            messages: site and message. The transport has the only reference to a message's bytes.
            deadline: seconds after which a site without an answer is `Lost`.
            patience: seconds within which sites that were lost before must fetch their message.
        """
        ...


A = TypeVar("A", bound=Frozen)


class SiteError(Frozen):
    """The error that a site answers with: the name of its class, and its text for people."""

    error: str
    message: str

    def as_lost(self) -> Lost:
        """Why the site gave no answer."""
        return Lost(self.message[:2000], self.error[:100])


@dataclass(frozen=True)
class Opened(Generic[A]):
    """An answer: what it says, its content, and the content as it crossed the network."""

    answer: A | SiteError
    content: dict[str, Content]
    crossed: dict[str, Content]


def open_answer(
    kind: type[A], message: Message, key: str, most_tensors: int = 0, largest_header: int = LARGEST_HEADER
) -> Opened[A]:
    """Open the answer to the request ``key``, which may be an error; FedshiftError if it is no answer to it."""
    header, content, crossed = unseal(message, most_tensors, largest_header)
    if "error" in header:
        return Opened(parse_json(SiteError, message.header, "its answer"), content, crossed)
    if header.get("answers") != key:
        raise FedshiftError("it answers another request")
    return Opened(parse_json(kind, message.header, "its answer"), content, crossed)


def stamp(request: Request, body: Body) -> tuple[str, Message]:
    """The key of a request, and the message that is sent."""
    header = {"protocol": PROTOCOL, **request.plain()}
    key = request_key(header, body.sha256)
    return key, seal({**header, "key": key}, body)


def answer_of(key: str, answer: Frozen, body: Body | None = None) -> Message:
    """The answer to a request, with its content if it has any."""
    return seal({**answer.model_dump(mode="json", exclude_unset=True), "answers": key}, body or body_of({}))


def drain(messages: list[tuple[str, Message]]) -> Iterator[tuple[str, Message]]:
    """The messages of a list, which forgets them: the transport may have their bytes elsewhere than in memory."""
    messages.reverse()
    while messages:
        yield messages.pop()


@dataclass(frozen=True)
class Heard(Generic[A]):
    """What a site answered, when that arrived by this machine's clock, and the content that came with it."""

    answer: A
    arrived: float
    content: Mapping[str, Content]


class Done(Frozen):
    """An answer that says nothing but that the request was met."""


def ask_sites(
    transport: Transport,
    requests: Mapping[str, Request],
    deadline: float,
    kind: type[A],
    content: Mapping[str, Mapping[str, Content]] | None = None,
    most_tensors: int = 0,
) -> dict[str, Heard[A] | Lost]:
    """Ask sites outside a federation; raises `NewJobNeeded` as the transport.

    Returns the answer of each site that was asked; one that says something else is lost, with the error `ReplyRefused`.
    ``content``: that goes with each request, by site; ``most_tensors``: of an answer.
    """
    largest = LARGEST_CARD if any(request.do == "hello" for request in requests.values()) else LARGEST_HEADER
    nothing = body_of({})
    outgoing = {
        site: stamp(request, nothing if content is None else body_of(content[site]))
        for site, request in requests.items()
    }
    keys = {site: key for site, (key, _) in outgoing.items()}
    result: dict[str, Heard[A] | Lost] = dict.fromkeys(requests, Lost("did not answer"))
    messages = drain([(site, message) for site, (_, message) in outgoing.items()])
    del outgoing
    for site, answer in transport.exchange(messages, deadline, {}):
        if site in keys and not isinstance(answer, Sign):
            result[site] = heard(kind, site, answer, keys[site], most_tensors, largest)
    return result


def heard(
    kind: type[A],
    site: str,
    message: Message | Lost,
    key: str,
    most_tensors: int = 0,
    largest_header: int = LARGEST_HEADER,
) -> Heard[A] | Lost:
    """What a site answered to the request ``key``, or why there is no answer of this kind."""
    if isinstance(message, Lost):
        return message
    try:
        opened = open_answer(kind, message, key, most_tensors, largest_header)
    except Unreadable as error:
        return Lost(f"site '{site}': {error}", ReplyRefused.__name__)
    except FedshiftError as error:
        return Lost(str(error))
    if isinstance(opened.answer, SiteError):
        return opened.answer.as_lost()
    return Heard(opened.answer, time.time(), opened.content)
