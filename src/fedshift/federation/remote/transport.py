"""How messages reach sites on other machines, whatever carries them: `Transport`, who was lost on it, what makes two
requests the same, and questions before there is a federation.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged
from fedshift.federation.messages import Content
from fedshift.federation.remote.wire import Message, body_of, seal, unseal

PROTOCOL = 1
"""The version of requests and replies. A site refuses another one."""


class Again(FedshiftError):
    """The run has to go on in a new job: a site is back that the present one cannot reach."""


@dataclass(frozen=True)
class Lost:
    """Why no reply of a site can be used in an exchange. ``error``: the name of the error that the site answered."""

    reason: str
    error: str = ""

    @property
    def refused(self) -> bool:
        """Whether the site is there, and its policy does not let out what was asked for."""
        return self.error == KindRefused.__name__

    def missing(self) -> KindRefused | TrainingDiverged | None:
        """Why a site that is there has nothing to give in this exchange; None for one that is not there."""
        kinds: tuple[type[KindRefused | TrainingDiverged], ...] = (KindRefused, TrainingDiverged)
        return next((kind(self.reason) for kind in kinds if kind.__name__ == self.error), None)


class Transport(Protocol):
    """What an engine does: carry one message to each of some sites and bring back what they answer."""

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        """Answers as they come; a site without one within ``deadline`` seconds is `Lost`.

        patience: seconds that a site has to fetch its message, for those that were lost before. Raises Again.
        """
        ...


def opened(message: Message, key: str) -> tuple[dict[str, Any], dict[str, Content], dict[str, Content]]:
    """``(header, content, content as it crossed)`` of the answer to the request ``key``, which may be an ``error``.

    Raises FedshiftError for anything else.
    """
    header, content, crossed = unseal(message)
    if "error" not in header and header.get("answers") != key:
        raise FedshiftError("it answers another request")
    return header, content, crossed


def request_key(header: Mapping[str, Any], body_sha256: str) -> str:
    """What makes two requests the same request: a site answers it again without doing it again.

    Not the checkpoint's place, which differs when a round is done again.
    """
    own = {name: value for name, value in header.items() if name not in ("key", "kept", "checkpoint")}
    return hashlib.sha256(f"{json.dumps(own, sort_keys=True)}\n{body_sha256}".encode()).hexdigest()


def ask_plain(
    transport: Transport, what: str, run: str, headers: Mapping[str, Mapping[str, Any]], deadline: float
) -> dict[str, dict[str, Any] | Lost]:
    """Ask sites for plain values before there is a federation: ``headers`` by site, their replies' headers by site.

    ``arrived`` in a reply: the time of this machine's clock when it came. Raises Again as the transport does.
    """
    body = body_of({})
    outgoing: list[tuple[str, Message]] = []
    keys: dict[str, str] = {}
    for site, header in headers.items():
        whole = {"do": what, "protocol": PROTOCOL, "run": run, **header}
        keys[site] = whole["key"] = request_key(whole, body.sha256)
        outgoing.append((site, seal(whole, body)))
    return _plain(transport.exchange(iter(outgoing), deadline, {}), keys)


def _plain(arrivals: Iterator[tuple[str, Message | Lost]], keys: Mapping[str, str]) -> dict[str, dict[str, Any] | Lost]:
    found: dict[str, dict[str, Any] | Lost] = {}
    for site, message in arrivals:
        if isinstance(message, Lost):
            found[site] = message
            continue
        try:
            header, _, _ = opened(message, keys.get(site, ""))
        except FedshiftError as error:
            found[site] = Lost(str(error))
            continue
        if "error" in header:
            found[site] = Lost(str(header.get("message"))[:2000], str(header["error"]))
        else:
            found[site] = {**header, "arrived": time.time()}
    return found
