"""Large messages in parts: a site fetches its request piece by piece, and brings its answer in the same way.

FLARE itself carries a message as a whole, with several copies for each site: 20 sites with a model of 45 MB took
3 GB at the coordinator. Here the sites ask and the coordinator answers, one part at a time for each site. So what it
holds of all the messages of an exchange is bounded, a slow site keeps no other waiting, and what a site brings goes to
files as it comes. Parts cross as FLARE's auxiliary messages, from a site's job to the coordinator's.
"""

from __future__ import annotations

import gc
import io
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedshift.deploy.remote.incoming import Arriving, Spool
from fedshift.encryption import read_scratch
from fedshift.errors import FedshiftError
from fedshift.text import one_line

TOPIC = "fedshift.part"
IN_FLIGHT = 160 << 20
"""Bytes of all sites' messages that may be on their way at once, in each direction. The environment variable
`IN_FLIGHT_MIB` at the coordinator sets another number of MiB. If all messages of an exchange fit, each travels as a
whole, which is faster. If not, they travel in parts, which together take up to an eighth of these bytes. FLARE's own
copies come on top."""
IN_FLIGHT_MIB = "FEDSHIFT_IN_FLIGHT"
LARGEST_PART = 8 << 20
_COLLECT = 32 << 20
"""Bytes of parts after which the garbage collector runs, see `Parcels`."""
_REQUEST_SECONDS, _GIVE_UP_SECONDS = 30.0, 120.0
"""Seconds after which a site asks for a part again, and after which it gives up."""
_AGAIN_SECONDS = 0.5


def room_of(sites: int) -> int:
    """Bytes of a message that travels as a whole when so many sites are asked; those of a part have no more."""
    given = os.environ.get(IN_FLIGHT_MIB)
    if given is None:
        return IN_FLIGHT // max(1, sites)
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= 1 << 20:
        raise FedshiftError(f"{IN_FLIGHT_MIB}: '{one_line(given)}' is no number of MiB; leave it out for 160")
    return (int(given) << 20) // max(1, sites)


def part_of(room: int) -> int:
    """Bytes of a part of a message that has no room to travel as a whole."""
    return max(1, min(LARGEST_PART, room // 8))


def written_in_parts(body: bytes, room: int, spool: Spool) -> list[Path]:
    """Write a body to a spool, each part to a file of its own."""
    size, view = part_of(room), memoryview(body)
    paths = [spool.write(bytes(view[begin : begin + size])) for begin in range(0, len(body), size)]
    return [path for path in paths if path is not None]


@dataclass(frozen=True)
class Parcel:
    """The large messages of one site in an exchange."""

    request: Sequence[Path]  # files with the body of its request, each with one part
    part: int  # bytes of a part
    arriving: Arriving  # what the site has brought of its answer

    def at(self, begin: int, size: int) -> bytes:
        """The request's next bytes, at most ``size`` and none beyond the end of a part."""
        number, begin = divmod(begin, self.part)
        return read_scratch(self.request[number])[begin : begin + size] if number < len(self.request) else b""


class Parcels:
    """The coordinator's side. FLARE calls `answer` in several threads. A site names its parcel by a secret ticket.
    ``largest``: bytes of the largest message that is accepted."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._lock = threading.Lock()
        self._open: dict[str, Parcel] = {}
        self._since_collected = 0

    def open(self, parcel: Parcel) -> str:
        """Let a site fetch its request and bring its answer; the ticket for both."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._open[ticket] = parcel
        return ticket

    def close(self, ticket: str) -> None:
        """Nobody may fetch or bring anything any more."""
        with self._lock:
            self._open.pop(ticket, None)

    def answer(self, topic: str, request: Shareable, fl_ctx: Any) -> Shareable:
        """Answer a site that fetches or brings a part. FLARE calls this, and passes these parameters by name."""
        reply = make_reply(ReturnCode.OK)
        ticket, begin, part = request.get("ticket"), request.get("begin"), request.get("part")
        with self._lock:
            parcel = self._open.get(ticket) if isinstance(ticket, str) else None
        if parcel is None:
            reply["refused"] = "the exchange is over"
        elif type(begin) is not int or begin < 0:
            reply["refused"] = "no part begins there"
        elif part is None:
            size = request.get("size")
            reply["part"] = parcel.at(begin, size if type(size) is int and size > 0 else 0)
            self._count_bytes(len(reply["part"]))
        elif not isinstance(part, bytes) or len(part) > LARGEST_PART or begin + len(part) > self._largest:
            reply["refused"] = "that is no part of a message, or the message is too large"
        else:
            reply["next"] = parcel.arriving.add(begin, part)
            self._count_bytes(len(part))
        return reply

    def _count_bytes(self, size: int) -> None:
        """Collect garbage after many parts: FLARE keeps each part in objects that refer to each other in a circle."""
        with self._lock:
            self._since_collected += size
            if self._since_collected < _COLLECT:
                return
            self._since_collected = 0
        gc.collect()


class SiteParts:
    """A site's side: fetches and brings parts. ``send``: sends a request to the coordinator and waits for so many
    seconds; None if no answer came."""

    def __init__(
        self, send: Callable[[Shareable, float], Shareable | None], ticket: str, part: int, stop: Signal
    ) -> None:
        self._send, self._ticket, self._part, self._stop = send, ticket, part, stop

    def fetch(self, size: int) -> bytes:
        """Fetch the body of the request, which has ``size`` bytes."""
        body = io.BytesIO()
        while (left := size - body.tell()) > 0:
            part = self._ask(begin=body.tell(), size=min(self._part, left)).get("part")
            if not isinstance(part, bytes) or not 0 < len(part) <= left:
                raise FedshiftError("the coordinator sent something else than the part that was asked for")
            body.write(part)
        return body.getvalue()

    def bring(self, body: bytes) -> None:
        """Bring the body of the answer."""
        begin = 0
        while begin < len(body):
            begun, begin = begin, self._ask(begin=begin, part=body[begin : begin + self._part]).get("next")
            if type(begin) is not int or begin <= begun:
                raise FedshiftError("the coordinator did not take a part of the answer")

    def _ask(self, **what: Any) -> Shareable:
        """Send a request until it is answered."""
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while True:
            request = Shareable()
            request.update(what, ticket=self._ticket)
            reply = self._send(request, _REQUEST_SECONDS)
            if reply is not None:
                if "refused" in reply:
                    raise FedshiftError(f"the coordinator refuses a part of a message: {reply['refused']}")
                return reply
            if self._stop.triggered or time.monotonic() > deadline:
                raise FedshiftError("the coordinator does not answer, so a part of a message did not cross")
            time.sleep(_AGAIN_SECONDS)


def parts_at_site(shareable: Shareable, fl_ctx: Any, stop: Signal) -> SiteParts | None:
    """How a site fetches the body of a task and brings its answer; None if both travel as a whole."""
    ticket, room = shareable.get("ticket"), shareable.get("room")
    if not isinstance(ticket, str) or type(room) is not int or room <= 0:
        return None
    engine = fl_ctx.get_engine()

    def send(request: Shareable, seconds: float) -> Shareable | None:
        result = engine.send_aux_request(None, TOPIC, request, seconds, fl_ctx, optional=True)
        reply = next(iter((result or {}).values()), None)
        return reply if isinstance(reply, Shareable) and reply.get_return_code() == ReturnCode.OK else None

    return SiteParts(send, ticket, part_of(room), stop)
