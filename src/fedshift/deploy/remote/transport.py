"""`Transport`, which carries messages to sites on other machines, and how requests and answers become messages.

`ask_plain` asks sites questions before there is a federation.
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
    """What a site answered, and when that arrived by this machine's clock."""

    answer: A
    arrived: float


class Done(Frozen):
    """An answer that says nothing but that the request was met."""


def ask_plain(
    transport: Transport, requests: Mapping[str, Request], deadline: float, kind: type[A]
) -> dict[str, Heard[A] | Lost]:
    """Ask sites for plain values, outside a federation.

    Returns:
        Each site's answer, by site; a site whose answer says something else is lost, with the error `ReplyRefused`.

    Raises:
        NewJobNeeded: as the transport.
    """
    largest = LARGEST_CARD if any(request.do == "hello" for request in requests.values()) else LARGEST_HEADER
    body = body_of({})
    outgoing = {site: stamp(request, body) for site, request in requests.items()}
    return {
        site: answer if isinstance(answer, Lost) else _heard(kind, site, answer, outgoing.get(site, ("",))[0], largest)
        for site, answer in _answers(transport, outgoing, deadline)
    }


def _answers(
    transport: Transport, outgoing: Mapping[str, tuple[str, Message]], deadline: float
) -> Iterator[tuple[str, Message | Lost]]:
    """What sites answer to messages, as it arrives; ``outgoing``: key and message by site."""
    messages = ((site, message) for site, (_, message) in outgoing.items())
    for site, answer in transport.exchange(messages, deadline, {}):
        if not isinstance(answer, Sign):
            yield site, answer


def ask_for_content(
    transport: Transport,
    requests: Mapping[str, tuple[Request, Mapping[str, Content]]],
    deadline: float,
    most_tensors: int,
) -> dict[str, dict[str, Content] | Lost]:
    """As `ask_plain`, with content in requests and answers."""
    outgoing = {site: stamp(request, body_of(content)) for site, (request, content) in requests.items()}
    return {
        site: answer if isinstance(answer, Lost) else _content(site, answer, outgoing.get(site, ("",))[0], most_tensors)
        for site, answer in _answers(transport, outgoing, deadline)
    }


def _content(site: str, message: Message, key: str, most_tensors: int) -> dict[str, Content] | Lost:
    try:
        answer = open_answer(Done, message, key, most_tensors)
    except FedshiftError as error:
        return Lost(f"site '{site}': {error}")
    return answer.answer.as_lost() if isinstance(answer.answer, SiteError) else answer.content


def _heard(kind: type[A], site: str, message: Message, key: str, largest_header: int) -> Heard[A] | Lost:
    try:
        answer = open_answer(kind, message, key, largest_header=largest_header).answer
    except Unreadable as error:
        return Lost(f"site '{site}': {error}", ReplyRefused.__name__)
    except FedshiftError as error:
        return Lost(str(error))
    return answer.as_lost() if isinstance(answer, SiteError) else Heard(answer, time.time())
