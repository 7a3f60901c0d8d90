"""Large messages in parts: what FLARE carries at once does not grow with the number of sites, and no byte is lost."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import fobs_initialize

from fedshift.deploy.flare import engine, parts
from fedshift.deploy.flare.drivers.unix_socket import UnixSocketDriver
from fedshift.deploy.flare.parts import Parcel, Parcels, SiteParts
from fedshift.deploy.remote import incoming
from fedshift.deploy.remote.incoming import Arriving, Spool
from fedshift.deploy.remote.transport import Lost, Sign
from fedshift.deploy.remote.wire import Message
from fedshift.encryption import KEY, MAGIC, new_key
from fedshift.errors import FedshiftError


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Played:
    """FLARE between a coordinator's transport and sites in this process; ``carried`` says what it carries how often.

    As over a network, the sites answer all at once, before the coordinator reads the first reply.
    """

    def __init__(self, patch: pytest.MonkeyPatch, sites: int, answer: bytes) -> None:
        fobs_initialize()
        self.names = [f"site-{number}" for number in range(sites)]
        self.carried: dict[str, list[int]] = {"tasks": [], "results": [], "parts": []}
        self.tasks: list[tuple[str, Any]] = []
        self.asked: list[tuple[int, int]] = []
        self.signal, self.lost_parts = Signal(), 0
        kit: Any = SimpleNamespace(project=SimpleNamespace(largest_message=1))
        patch.setattr(engine, "own_kit", lambda: kit)
        patch.setattr(engine, "open_site", lambda file, in_service: SimpleNamespace(handle=self.handle))
        patch.setattr(parts, "_AGAIN_SECONDS", 0.0)
        patch.setenv(engine.SITE, "SITE.yaml")
        patch.setattr(engine.FlareSite, "__init__", lambda site: setattr(site, "_program", None))
        self.answered = answer
        controller: Any = SimpleNamespace(send=self.send, cancel_task=lambda task: None)
        self.transport = engine.FlareTransport(controller, None, Signal(), lambda: None, 1)

    def send(self, task: Any, context: Any, targets: list[str]) -> None:
        self.carried["tasks"].append(len(fobs.dumps(task.data)))
        self.tasks.append((targets[0], task))

    def handle(self, message: Message, sender: str) -> Message:
        self.asked.append((len(message.body), crc32(message.body)))
        return Message("answer", bytes(bytearray(self.answered)), "digest")  # each site has its own

    def send_aux_request(self, targets: Any, topic: str, request: Shareable, *_: Any, **__: Any) -> dict[str, Any]:
        reply = self.transport.parcels.answer(topic, request, None)
        self.carried["parts"] += [len(parcel.get("part") or b"") for parcel in (request, reply)]
        self.lost_parts += 1
        if self.lost_parts % 3 == 0:
            return {"server": make_reply("TIMEOUT")}  # it arrived, and its answer was lost
        return {"server": reply}

    def work(self) -> None:
        context = SimpleNamespace(get_peer_context=lambda: None, get_job_id=lambda: "job", get_engine=lambda: self)
        for name, task in self.tasks:
            result = engine.FlareSite().execute(engine.TASK, task.data, context, self.signal)
            self.carried["results"].append(len(fobs.dumps(result)))
            task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=name), result=result), None)

    def exchange(self, request: bytes) -> Iterator[tuple[str, Message | Lost]]:
        message = Message("request", request, "digest")
        arrivals = self.transport.exchange(iter([(name, message) for name in self.names]), 60.0, {})
        assert next(arrivals)[1] is Sign.QUIET
        self.work()
        return ((name, arrival) for name, arrival in arrivals if not isinstance(arrival, Sign))


@pytest.mark.parametrize("sites", [2, 16])
def test_what_is_carried_at_once_does_not_grow_with_sites(sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests and all answers of an exchange together stay below a bound, and so do all parts under way."""
    monkeypatch.setattr(parts, "IN_FLIGHT", 1 << 17)
    monkeypatch.setattr(incoming, "HELD_IN_MEMORY", 0)
    request, answer = noise(20_000, 1), noise(15_001, 2)
    played = Played(monkeypatch, sites, answer)
    arrived = list(played.exchange(request))
    assert [name for name, _ in arrived] == played.names
    assert {arrival for _, arrival in arrived} == {Message("answer", answer, "digest")}
    assert played.asked == [(len(request), crc32(request))] * sites
    around = 1000 * sites  # what FLARE writes around each message
    assert sum(played.carried["tasks"]) < (1 << 17) + around
    assert sum(played.carried["results"]) < (1 << 17) + around
    assert max(played.carried["parts"], default=0) * sites <= 1 << 16


def test_the_coordinator_can_set_how_much_may_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.IN_FLIGHT_MIB, "40")
    assert parts.room_of(20) == 2 << 20
    monkeypatch.setenv(parts.IN_FLIGHT_MIB, "much")
    with pytest.raises(FedshiftError, match=parts.IN_FLIGHT_MIB):
        parts.room_of(20)


def test_with_a_key_what_waits_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "IN_FLIGHT", 8000)
    monkeypatch.setenv(KEY, new_key())
    written: list[bytes] = []
    write = Spool._write
    monkeypatch.setattr(Spool, "_write", lambda spool, data: note(write(spool, data)))

    def note(path: Path) -> Path:
        written.append(path.read_bytes())
        return path

    played = Played(monkeypatch, 1, noise(9000))
    assert [part_data for _, part_data in played.exchange(noise(9000, 1))] == [Message("answer", noise(9000), "digest")]
    assert len(written) == 18, "parts of 1000 bytes"
    assert all(part_data.startswith(MAGIC) for part_data in written)


def test_small_messages_travel_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, 3, b"small")
    assert [item for _, item in played.exchange(noise(50_000))] == [Message("answer", b"small", "digest")] * 3
    assert not played.carried["parts"], "which would cost a round trip"


def test_answers_that_wait_are_in_files_and_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "IN_FLIGHT", 1 << 18)
    peaks = []
    for sites in (2, 10):
        played = Played(monkeypatch, sites, noise(1 << 17))
        tracemalloc.start()
        try:
            for _ in played.exchange(noise(1 << 17, 3)):
                pass
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 18), "8 more answers of 128 KiB each"


def test_an_answer_that_came_in_part_is_the_sites_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "IN_FLIGHT", 1000)
    monkeypatch.setattr(parts.SiteParts, "bring", lambda site_parts, body: None)
    played = Played(monkeypatch, 1, noise(5000))
    ((_, lost),) = played.exchange(b"")
    assert isinstance(lost, Lost)


def test_a_message_that_is_larger_than_agreed_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "IN_FLIGHT", 1 << 18)
    monkeypatch.setattr(engine, "check_size", lambda message, largest: None)
    played = Played(monkeypatch, 1, b"")
    ((_, answer),) = played.exchange(bytes((1 << 20) + 1))
    assert "largest_message" in answer.header or "too large" in answer.header
    assert not played.asked
    assert not played.carried["parts"]


@pytest.fixture
def parcels() -> Iterator[tuple[Parcels, str, Arriving]]:
    with Spool() as spool:
        arriving, whole = Arriving(spool), Parcels(1 << 20)
        files = parts.written_in_parts(noise(300_000), 100_000, spool)
        yield whole, whole.open(Parcel(files, 100_000, arriving)), arriving


def test_nothing_that_a_site_asks_does_harm(parcels: tuple[Parcels, str, Arriving]) -> None:
    """Wrong tickets, places, sizes and parts are refused or change nothing; no more than a part is given away."""
    whole, ticket, arriving = parcels
    strange: list[Any] = [
        None,
        "",
        "x",
        -1,
        0,
        1,
        2**70,
        0.5,
        True,
        [],
        {},
        b"",
        b"part",
        bytes(parts.LARGEST_PART + 1),
    ]
    draw = random.Random(0)
    for _ in range(2000):
        request = Shareable()
        request.update(ticket=draw.choice([*strange, ticket, ticket]), begin=draw.choice([0, *strange]))
        request.update(part=draw.choice([None, *strange[:-2]]), size=draw.choice(strange))
        reply = whole.answer("", request, None)
        assert "refused" in reply or "next" in reply or len(reply["part"]) <= 100_000
    assert arriving.complete("", "", 0) is not None, "nothing has come"
    for begin, part in ((1 << 20, b"x"), (0, bytes(parts.LARGEST_PART + 1))):
        request = Shareable()
        request.update(ticket=ticket, begin=begin, part=part)
        assert "refused" in whole.answer("", request, None)


def test_a_part_that_comes_twice_counts_once(parcels: tuple[Parcels, str, Arriving]) -> None:
    _, _, arriving = parcels
    assert [arriving.add(*part) for part in ((0, b"ab"), (0, b"ab"), (5, b"no"), (2, b"cd"))] == [2, 2, 2, 4]
    assert arriving.complete("", "", 3) is None
    assert arriving.complete("", "", 4) is not None


def test_a_site_gives_up(parcels: tuple[Parcels, str, Arriving], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the exchange is over it hears so at once; when nobody answers it asks for a while, unless its job ends."""
    whole, ticket, _ = parcels
    monkeypatch.setattr(parts, "_AGAIN_SECONDS", 0.0)
    whole.close(ticket)
    with pytest.raises(FedshiftError, match="refuses"):
        SiteParts(lambda request, seconds: whole.answer("", request, None), ticket, 1000, Signal()).bring(b"body")
    monkeypatch.setattr(parts, "_GIVE_UP_SECONDS", 0.01)
    with pytest.raises(FedshiftError, match="does not answer"):
        SiteParts(lambda request, seconds: None, ticket, 1000, Signal()).fetch(10)
    monkeypatch.setattr(parts, "_GIVE_UP_SECONDS", 1e9)
    over = Signal()
    threading.Timer(0.02, over.trigger, (True,)).start()
    with pytest.raises(FedshiftError, match="does not answer"):
        SiteParts(lambda request, seconds: None, ticket, 1000, over).fetch(10)


def test_every_parent_has_a_socket_of_its_own(tmp_path: Path) -> None:
    urls = {UnixSocketDriver.get_urls("unix", {"folder": str(tmp_path)}) for _ in range(20)}
    assert len(urls) == 20
    assert all(listening == dialled and listening.startswith(f"unix://0{tmp_path}/") for listening, dialled in urls)
