"""The coordinator's listener against strangers who hold it and peers who cheat: real sockets, no processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import yaml
from flooding import Flood, seconds_to_greet
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.sfm.prefix import Prefix

from fedshift.deploy.flare import dialling, roles
from fedshift.deploy.flare.drivers import guarded_tcp, shared_connection
from fedshift.deploy.flare.provision import Provisioned
from fedshift.deploy.flare.roles import free_port
from tried import case

SOON = 5.0
"""Seconds within which a peer must be answered here: test machines are busy."""


def provision(folder: Path, name: str, sites: Sequence[str] = ("north", "south"), **more: Any) -> Provisioned:
    options = {"name": name, "contact": "team@example.org", "server": "localhost", "sites": [*sites], **more}
    (folder / "project.yaml").write_text(yaml.safe_dump(options))
    return roles.provision(roles.load_project(folder / "project.yaml"), folder, lambda new: None)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision(tmp_path_factory.mktemp("kits"), "door")


class Echo:
    """Sends each frame of a connection back."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def process_frame(self, frame: Any) -> None:
        self.connection.send_frame(frame)


class Listening:
    """A listener in this process whose connections echo."""

    def __init__(self, kit: Path, driver: Any = None, monitor: Any = None) -> None:
        startup = kit / "flare" / "startup"
        self.port = free_port()
        self.driver = driver or guarded_tcp.GuardedTcpDriver()
        self.driver.register_conn_monitor(monitor or self)
        params = {
            DriverParams.SCHEME.value: "guarded",
            DriverParams.SECURE.value: True,
            DriverParams.HOST.value: "",
            DriverParams.PORT.value: str(self.port),
            DriverParams.CA_CERT.value: str(startup / "rootCA.pem"),
            DriverParams.SERVER_CERT.value: str(startup / "server.crt"),
            DriverParams.SERVER_KEY.value: str(startup / "server.key"),
        }
        connector = ConnectorInfo("CH1", self.driver, params, Mode.PASSIVE, 0, 0, False, threading.Event())
        self.thread = threading.Thread(target=self.driver.listen, args=(connector,), daemon=True)
        self.thread.start()

    @property
    def admitted(self) -> set[guarded_tcp.GuardedConnection]:
        return set(self.driver._listener._admitted)

    def state_change(self, connection: Any) -> None:
        """FLARE's monitor of connections."""
        connection.register_frame_receiver(Echo(connection))

    def plain(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection on which nothing was said yet."""
        return socket.create_connection(("127.0.0.1", self.port), SOON, source_address=(source, 0))

    def peer(self, startup: Path, plain: socket.socket | None = None) -> ssl.SSLSocket:
        """A connection with a kit's certificate."""
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.check_hostname = False
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
        return context.wrap_socket(plain or self.plain())

    def is_heard(self, startup: Path) -> bool:
        """Whether a frame that a kit sends is answered."""
        with contextlib.suppress(OSError), self.peer(startup) as connection:
            return speaks(connection)
        return False

    def greets(self, startup: Path, name: str) -> bool:
        """Whether FLARE answers a kit's greeting."""
        with contextlib.suppress(OSError):
            return seconds_to_greet(startup, self.port, name, SOON) < SOON
        return False

    def end(self) -> None:
        self.driver.shutdown()
        self.thread.join(SOON)
        assert not self.thread.is_alive()


def speaks(connection: ssl.SSLSocket) -> bool:
    """Whether a frame is answered on this connection."""
    try:
        connection.sendall(frame_of(20))
        return len(connection.recv(20)) == 20
    except OSError:
        return False


def has_ended(connection: socket.socket) -> bool:
    connection.settimeout(SOON)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def startup(made: Provisioned, site: str) -> Path:
    return made.sites[site] / "flare" / "startup"


@pytest.fixture
def north(kits: Provisioned) -> Path:
    return startup(kits, "north")


@pytest.fixture
def south(kits: Provisioned) -> Path:
    return startup(kits, "south")


@pytest.fixture
def door(kits: Provisioned, north: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setenv("FEDSHIFT_KIT", str(kits.coordinator))
    monkeypatch.setattr(guarded_tcp, "_LOOK_AGAIN", 0.1)
    listening = Listening(kits.coordinator)
    try:
        assert eventually(lambda: listening.is_heard(north))
        yield listening
    finally:
        listening.end()


HELLO = bytes.fromhex("16030100c8010000c40303")
"""The first bytes of a ClientHello of 200 bytes."""


@pytest.mark.threat("held_port")
@pytest.mark.parametrize("sent", [b"", HELLO, b"GET / HTTP/1.1\r\n"], ids=["nothing", "half a ClientHello", "no TLS"])
def test_strangers_who_hold_the_port_keep_nobody_out(sent: bytes, door: Listening, north: Path) -> None:
    """Nor those who reset their connections at once."""
    with contextlib.ExitStack() as stack:
        for connection in [stack.enter_context(door.plain()) for _ in range(60)]:
            with contextlib.suppress(ConnectionError):  # the oldest have given way
                connection.sendall(sent)
        assert door.is_heard(north)
        assert sent not in (b"", HELLO) or door.driver._listener._greeted, "they hold it still"
    with door.peer(north) as before:
        for _ in range(60):
            with door.plain() as rude:
                rude.sendall(sent)
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert door.is_heard(north)
        assert speaks(before)


@pytest.mark.threat("held_port")
def test_a_handshake_has_a_time_limit_for_bytes_that_drip(door: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tcp, "HANDSHAKE_SECONDS", 0.5)
    begun = time.monotonic()
    with door.plain() as silent, door.plain() as slow:
        with contextlib.suppress(ConnectionError):
            for byte in HELLO + bytes(200):
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert has_ended(silent)
    assert time.monotonic() - begun < SOON


@pytest.mark.threat("held_port")
def test_handshakes_are_bounded_for_an_address_and_in_all(door: Listening, north: Path) -> None:
    greeted = door.driver._listener._greeted
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(door.plain())
        assert eventually(lambda: len(greeted) == guarded_tcp.HANDSHAKES_PER_ADDRESS)
        for number in range(2, 14):
            for _ in range(15):
                stack.enter_context(door.plain(f"127.0.0.{number}"))
        assert eventually(lambda: len(greeted) == guarded_tcp.HANDSHAKES)
        assert door.is_heard(north)
        assert len(greeted) <= guarded_tcp.HANDSHAKES
    assert eventually(lambda: not greeted), "who goes is forgotten"


@pytest.mark.threat("large_frame")
def test_a_site_has_a_bounded_number_of_connections(door: Listening, north: Path, south: Path) -> None:
    with contextlib.ExitStack() as stack:
        assert speaks(stack.enter_context(door.peer(south)))
        mine = []
        for _ in range(guarded_tcp.CONNECTIONS_PER_CERTIFICATE + 2):
            mine.append(stack.enter_context(door.peer(north)))
            assert speaks(mine[-1])
        assert all(has_ended(connection) for connection in mine[:2]), "the oldest give way"
        assert eventually(lambda: len(door.admitted) == guarded_tcp.CONNECTIONS_PER_CERTIFICATE + 1)
        assert door.is_heard(south), "no other site's"


def test_who_reads_keeps_the_descriptor(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next connection gets the same descriptor, and two threads read one stream."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        busy.set()
        assert go_on.wait(2 * SOON)

    monkeypatch.setattr(guarded_tcp.Peer, "handle", hold)
    with door.peer(north) as connection:
        connection.sendall(frame_of(20))
        assert busy.wait(SOON)
        (mine,) = door.admitted
        mine.close()
        mine.close()  # a second look may find it again
        assert has_ended(connection)
        assert mine.sock.fileno() != -1
        go_on.set()
        assert eventually(lambda: mine.sock.fileno() == -1)
        mine.close()
        mine.send_frame(bytearray(frame_of(20)))
        assert not door.admitted


def none_left(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_connection_ends(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert not door.is_heard(north)
        assert eventually(lambda: not door.admitted)
    assert door.is_heard(north)


@pytest.mark.threat("large_frame")
def test_a_frame_is_refused_before_memory_is_reserved_for_it(door: Listening, north: Path) -> None:
    """Sixteen bytes, from a site with a valid certificate, that announce almost 2 GiB."""
    header = bytearray(16)
    Prefix(length=(2 << 30) - (3 << 20)).to_buffer(header, 0)
    before, most = psutil.Process().memory_info().rss, 0
    with door.peer(north) as connection:
        connection.sendall(header)
        connection.settimeout(0.05)
        deadline, over = time.monotonic() + SOON, False
        while not over and time.monotonic() < deadline:
            most = max(most, psutil.Process().memory_info().rss)
            with contextlib.suppress(TimeoutError):
                over = connection.recv(1) == b""
    assert over
    assert most - before < 64 << 20
    assert door.is_heard(north)


@contextlib.contextmanager
def revoked(kits: Provisioned) -> Iterator[None]:
    assert roles.set_revoked(kits.coordinator, "north", True)
    try:
        yield
    finally:
        roles.set_revoked(kits.coordinator, "north", False)


@pytest.mark.threat("revoked_kit")
@pytest.mark.case("floods", "a revoked certificate's threads end; accepted again it is heard")
def test_a_revoked_kit_is_refused_and_the_others_go_on(
    door: Listening, kits: Provisioned, north: Path, south: Path
) -> None:
    peers = door.driver._listener._peers
    with door.peer(north) as of_north, door.peer(south) as of_south:
        assert speaks(of_north)
        assert speaks(of_south)
        before = next(peer for peer in peers.values() if peer.name == "north")
        with revoked(kits):
            assert has_ended(of_north), "also the connection that it had"
            assert not door.is_heard(north)
            assert speaks(of_south)
            assert not roles.set_revoked(kits.coordinator, "north", True)
            assert eventually(lambda: before not in peers.values())
            assert before._workers._shutdown
        assert door.is_heard(north)


def test_a_list_that_cannot_be_read_locks_nobody_out(
    door: Listening, kits: Provisioned, north: Path, south: Path
) -> None:
    file = kits.coordinator / "certificates.json"
    whole = file.read_text()
    with door.peer(north) as connection:
        assert speaks(connection)
        try:
            file.write_text("")
            assert door.is_heard(south)
            time.sleep(0.3)  # it looks again meanwhile
            assert speaks(connection)
        finally:
            file.write_text(whole)


@pytest.mark.threat("revoked_kit", "poses_as_site")
def test_who_is_not_known_is_refused(door: Listening, kits: Provisioned, north: Path, tmp_path: Path) -> None:
    """The kit before, once another was issued; and one of the same authority: whoever has the authority's key cannot
    pose as a site to this coordinator.
    """
    stolen, twin, folder = tmp_path / "stolen", tmp_path / "twin", kits.folder.parent
    shutil.copytree(startup(kits, "south"), stolen)
    assert door.is_heard(stolen)
    roles.set_revoked(kits.coordinator, "south", True)
    project = roles.load_project(folder / "project.yaml")
    assert roles.reissue(project, folder, "south", lambda new: None).new == ("south",)
    assert door.is_heard(startup(kits, "south")), "a new kit is accepted, though the old one was revoked"
    assert not door.is_heard(stolen)
    shutil.copytree(folder, twin)
    roles.reissue(roles.load_project(twin / "project.yaml"), twin, "north", lambda new: None)
    assert not door.is_heard(twin / "door" / "sites" / "north" / "flare" / "startup")
    assert door.is_heard(north)


def frame_of(size: int, content: bytes = b"") -> bytes:
    whole = bytearray(size)
    Prefix(length=size).to_buffer(whole, 0)
    whole[16 : 16 + len(content)] = content
    return bytes(whole)


@contextlib.contextmanager
def deaf(door: Listening, kit: Path) -> Iterator[ssl.SSLSocket]:
    """A peer whose system takes few bytes that it does not read."""
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", door.port))
        with door.peer(kit, plain) as connection:
            yield connection


def only(door: Listening) -> guarded_tcp.GuardedConnection:
    assert eventually(lambda: len(door.admitted) == 1)
    return next(iter(door.admitted))


def pour(connection: ssl.SSLSocket, frame: bytes, seconds: float) -> int:
    """Send frames until the other side takes no more, or ends the connection; how many bytes were taken."""
    connection.settimeout(0.3)
    done, deadline = 0, time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            done += connection.send(memoryview(frame)[done % len(frame) :])
    return done


def stalls(door: Listening, kit: Path) -> bool:
    """Whether a peer that reads nothing of what is sent to it is ended."""
    before = set(door.admitted)
    with deaf(door, kit) as connection:
        assert eventually(lambda: bool(door.admitted - before))
        (mine,) = door.admitted - before
        for _ in range(16):
            mine.send_frame(bytearray(frame_of(1 << 20)))
        return eventually(lambda: mine not in door.admitted) and connection.fileno() != -1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tcp, "SEND_SECONDS", 0.2)


@pytest.mark.threat("flood")
@pytest.mark.case("floods", "reads no answers: is ended, and refused after three times")
@pytest.mark.usefixtures("impatient")
def test_a_peer_that_reads_nothing_is_ended_and_then_refused(
    door: Listening, north: Path, south: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarded_tcp, "REFUSED_SECONDS", 1.5)
    with door.peer(south) as honest:
        for _ in range(guarded_tcp.STALLS):
            assert door.is_heard(north)
            assert stalls(door, north)
            assert speaks(honest)
        refused_at = time.monotonic()
        assert not door.is_heard(north)
        assert door.is_heard(south)
        (line,) = [record.getMessage() for record in caplog.records if "is refused for" in record.getMessage()]
        assert "'north'" in line
        assert eventually(lambda: door.is_heard(north)), "it is not refused for ever"
        assert time.monotonic() - refused_at > 1


@pytest.mark.case("floods", "reads no answers twice in a minute: is not refused")
@pytest.mark.usefixtures("impatient")
def test_two_breaks_refuse_nobody(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tcp, "STALLS_WITHIN", 0.3)
    for _ in range(guarded_tcp.STALLS + 1):
        assert stalls(door, north)
    assert door.is_heard(north)


@pytest.mark.case("floods", "reads slowly: gets every byte in order and is not ended")
@pytest.mark.usefixtures("impatient")
def test_a_slow_peer_is_not_ended_while_it_takes_something(door: Listening, north: Path) -> None:
    with deaf(door, north) as connection:
        mine = only(door)
        connection.settimeout(SOON)
        frames = [frame_of(100_000, bytes([number]) * 50_000) for number in range(100)]
        for frame in frames:
            mine.send_frame(bytearray(frame))
        read = bytearray()
        while len(read) < 100_000 * len(frames):
            read += (piece := connection.recv(1 << 14))
            assert piece, "the connection was ended"
            time.sleep(0.0005)
        assert bytes(read) == b"".join(frames)
        assert speaks(connection)


def holding(patch: pytest.MonkeyPatch) -> tuple[list[int], threading.Event]:
    """Sizes of the frames that wait until the event is set; only those that begin with ``h`` do."""
    sizes, go_on = [], threading.Event()

    def hold(echo: Echo, frame: Any) -> None:
        if frame[16:17] == b"h":
            sizes.append(len(frame))
            assert go_on.wait(10 * SOON)
        else:
            echo.connection.send_frame(frame)

    patch.setattr(Echo, "process_frame", hold)
    return sizes, go_on


@pytest.mark.threat("flood")
@pytest.mark.case("floods", "many small frames on two connections of one certificate")
def test_few_frames_are_handled_at_once(
    door: Listening, north: Path, south: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all its connections together; what it sends beyond waits at the peer."""
    held, go_on = holding(monkeypatch)
    with door.peer(north) as first, door.peer(north) as two:
        for peer in (first, two):
            assert pour(peer, frame_of(20, b"h") * 100, 1.0) > 20 * guarded_tcp.MOST_FRAMES
        assert eventually(lambda: len(held) == guarded_tcp.MOST_FRAMES)
        time.sleep(0.3)
        assert len(held) == guarded_tcp.MOST_FRAMES
        peer = next(link.peer for link in door.admitted if link.peer.name == "north")
        assert peer._workers._work_queue.qsize() == 0, "nothing waits here: it waits at the peer"
        begun = time.monotonic()
        assert door.is_heard(south)
        assert time.monotonic() - begun < 0.5
        go_on.set()
        assert eventually(lambda: len(held) > 10 * guarded_tcp.MOST_FRAMES), "they are handled later"


@pytest.mark.threat("flood")
@pytest.mark.case("floods", "frames of 1 MiB that wait to be handled")
def test_bytes_that_wait_are_bounded(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tcp, "MOST_BYTES", 4 << 20)
    held, go_on = holding(monkeypatch)
    with door.peer(north) as first, door.peer(north) as two:
        for peer in (first, two):
            pour(peer, frame_of(1 << 20, b"h"), 0.6)
        time.sleep(0.3)
        assert sum(held) == 4 << 20
        go_on.set()


@pytest.mark.threat("flood")
@pytest.mark.case("floods", "whoever sends to a peer that does not read")
def test_who_sends_to_the_deaf_does_not_wait(door: Listening, north: Path) -> None:
    """FLARE sends from threads that serve all peers. A queue that grows beyond any use ends the connection."""
    with deaf(door, north) as connection:
        mine = only(door)
        begun, most = time.monotonic(), guarded_tcp.MOST_UNSENT * guarded_tcp.OVERFULL
        for _ in range(100):
            mine.send_frame(bytearray(frame_of(100_000)))
        assert time.monotonic() - begun < 0.5
        assert not mine.closing
        for _ in range(most + 100):
            mine.send_frame(bytearray(frame_of(20)))
        assert mine.closing
        assert time.monotonic() - begun < 2
        assert eventually(lambda: not mine._unsent), "memory is given back"
        assert has_ended(connection) or connection.recv(1 << 20)


@pytest.mark.case("floods", "frames are sent on while a peer has much to read: it is not read")
def test_who_has_much_to_read_is_not_read(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tcp, "MOST_UNSENT", 8)
    with deaf(door, north) as connection:
        mine = only(door)
        pour(connection, frame_of(200_000), 0.5)
        assert len(mine._unsent) <= 8 + guarded_tcp.MOST_FRAMES
        connection.settimeout(SOON)
        assert len(connection.recv(1 << 14)) > 0


@pytest.mark.case("floods", "more frames in a second than a site needs")
def test_frames_in_a_second_are_bounded(
    door: Listening, north: Path, south: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_tcp, "FRAMES_PER_SECOND", 40)
    with door.peer(north) as connection:
        begun, got = time.monotonic(), 0
        connection.sendall(frame_of(20) * 60)
        while got < 20 * 60:
            got += len(connection.recv(1 << 14))
        assert time.monotonic() - begun > 0.5
        assert door.is_heard(south)


@pytest.mark.case("floods", "a frame whose handling fails gives its room back")
def test_frames_that_fail_free_their_room(door: Listening, north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(echo: Echo, frame: Any) -> None:
        if frame[16:17] == b"f":
            raise ValueError("no frame of FLARE's")
        echo.connection.send_frame(frame)

    monkeypatch.setattr(Echo, "process_frame", fail)
    with door.peer(north) as connection:
        connection.sendall(frame_of(20, b"f") * (3 * guarded_tcp.MOST_FRAMES))
        assert speaks(connection)


@pytest.mark.case("floods", "no thread is left to handle a frame")
def test_without_a_thread_a_frame_ends_it(
    door: Listening, north: Path, south: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with door.peer(south) as honest:
        assert speaks(honest)
        with door.peer(north) as connection, monkeypatch.context() as patch:
            assert speaks(connection)
            peer = next(link.peer for link in door.admitted if link.peer.name == "north")
            assert eventually(lambda: peer._frames == 0)
            patch.setattr(peer._workers, "submit", none_left)
            connection.sendall(frame_of(20))
            assert has_ended(connection)
            assert peer._frames == peer._bytes == 0
        assert speaks(honest)
        assert door.is_heard(north)


@pytest.fixture
def flares(kits: Provisioned, south: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listening, Any]]:
    """A listener in this process whose frames FLARE's own manager handles, and that manager."""
    from nvflare.fuel.f3.endpoint import Endpoint
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager

    monkeypatch.setenv("FEDSHIFT_KIT", str(kits.coordinator))
    manager, driver = ConnManager(Endpoint("server")), guarded_tcp.GuardedTcpDriver()
    listening = Listening(kits.coordinator, driver, manager)
    try:
        assert eventually(lambda: listening.greets(south, "south"))
        yield listening, manager
    finally:
        listening.end()


@pytest.mark.case("floods", "through FLARE's own handling of frames: PINGs, nothing read")
def test_flares_threads_are_not_taken_by_the_deaf(flares: tuple[Listening, Any], north: Path, south: Path) -> None:
    listening, manager = flares
    with Flood(north, listening.port, "north.", connections=2).flowing() as flood:
        waits = []
        for _ in range(10):
            time.sleep(0.2)
            waits.append(seconds_to_greet(south, listening.port, "south"))
        assert flood.sent > 20_000
        assert max(waits) < 0.5
        assert not manager.frame_mgr_executor._threads, "no frame of a peer takes a thread of FLARE's"


FRAMES = int(os.environ.get("FEDSHIFT_FUZZED_FRAMES", "1500"))


def strange_frame(draws: random.Random) -> bytes:
    """A frame of random kind, lengths and content; now and then a greeting or headers that are almost right."""
    choices = (b"", draws.randbytes(draws.randrange(200)), b"\x81" * 500, b"\x91" * 3000, b"\xdf\xff\xff\xff\xff")
    names = ("north", "north.job", "south", "server", "a" * 300, "", "north..x", "../north", "north\x1b[2J")
    named = msgpack.packb({draws.choice(["endpoint_name", "x"]): draws.choice(names), "timestamp": 0.0})
    payload = draws.choice([*choices, named, named[: draws.randrange(len(named))]])
    whole = bytearray(16 + len(payload))
    prefix = Prefix(
        length=len(whole),
        header_len=draws.choice([0, 0, len(payload), draws.randrange(65536)]),
        type=draws.choice([1, 1, 2, 3, 4, 4, 5, 6, 7, draws.randrange(256)]),
        flags=draws.randrange(65536),
        app_id=draws.choice([0, 1, 2, draws.randrange(65536)]),
        stream_id=draws.randrange(65536),
    )
    prefix.to_buffer(whole, 0)
    whole[16:] = payload
    return bytes(whole)


@pytest.mark.case("fuzz", "frames of random kind, length, headers and payload")
def test_no_frame_harms_anybody(
    flares: tuple[Listening, Any], north: Path, south: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends them loses a connection now and then; the other site is greeted within a moment all the time."""
    monkeypatch.setattr(guarded_tcp, "FRAMES_PER_SECOND", 10**6)
    (listening, manager), draws = flares, random.Random(0)
    sent, waits = 0, []
    while sent < FRAMES:
        with listening.peer(north) as connection, contextlib.suppress(OSError):
            connection.settimeout(0.001)
            for _ in range(min(500, FRAMES - sent)):
                connection.sendall(strange_frame(draws))
                sent += 1
                with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                    if draws.random() < 0.05 and connection.recv(1 << 16) == b"":
                        break
        waits.append(seconds_to_greet(south, listening.port, "south"))
    print(f"{sent} frames, {len(waits)} connections, slowest greeting {max(waits):.3f} s")
    assert max(waits) < 0.5
    assert listening.greets(north, "north")
    peers = listening.driver._listener._peers.values()
    assert eventually(lambda: all(peer._frames == peer._bytes == 0 for peer in peers)), "all room is given back"
    assert not manager.stopped


@pytest.mark.threat("flood")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("floods", "connections", "seconds"),
    [
        case("floods", "the coordinator's process, one connection for 40 s", ["north"], 1, 40),
        case(
            "floods",
            "the coordinator's process, four certificates with eight connections each",
            ["north", "east", "west", "up"],
            8,
            20,
        ),
    ],
)
def test_the_coordinator_answers_the_others_during_a_flood(
    floods: list[str], connections: int, seconds: float, tmp_path: Path
) -> None:
    made = provision(tmp_path, "flood", [*floods, "south"], port=free_port())
    kit = roles.load_kit(made.coordinator, "coordinator")

    def memory_of_coordinator() -> int:
        processes = psutil.process_iter(["cmdline"])
        mine = [process for process in processes if str(kit.flare) in (process.info["cmdline"] or [])]
        return sum(process.memory_info().rss for process in mine)

    roles.start(kit)
    try:
        south, port = startup(made, "south"), kit.project.port
        for _ in range(3):
            assert seconds_to_greet(south, port, "south") < 0.5
        before, most, waits = memory_of_coordinator(), 0, []
        with contextlib.ExitStack() as stack:
            for site in floods:
                stack.enter_context(Flood(startup(made, site), port, f"{site}.", connections).flowing())
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.3)
                waits.append(seconds_to_greet(south, port, "south"))
                most = max(most, memory_of_coordinator() - before)
        print(f"slowest answer {max(waits):.3f} s of {len(waits)}, +{most >> 20} MB")
        assert max(waits) < 0.5
        assert most < 100 << 20
    finally:
        roles.stop(kit)


class Dialling:
    """A site's end in this process: it greets with a frame, and keeps what it is answered."""

    def __init__(self, startup: Path, port: int) -> None:
        self.answers: list[bytes] = []
        self.driver = dialling.DiallingTcpDriver()
        self.driver.register_conn_monitor(self)
        params = {
            DriverParams.SCHEME.value: "stcp",
            DriverParams.SECURE.value: True,
            DriverParams.HOST.value: "localhost",
            DriverParams.PORT.value: str(port),
            DriverParams.CA_CERT.value: str(startup / "rootCA.pem"),
            DriverParams.CLIENT_CERT.value: str(startup / "client.crt"),
            DriverParams.CLIENT_KEY.value: str(startup / "client.key"),
        }
        self.connector = ConnectorInfo("CH2", self.driver, params, Mode.ACTIVE, 0, 0, False, threading.Event())
        self.thread = threading.Thread(target=self.driver.connect, args=(self.connector,), daemon=True)
        self.thread.start()

    def state_change(self, connection: Any) -> None:
        connection.register_frame_receiver(self)
        if connection.name in self.driver.connections and not connection.closing:
            connection.send_frame(shared_connection.frame(0, b"here"))

    def process_frame(self, frame: Any) -> None:
        self.answers.append(bytes(frame))

    def end(self) -> bool:
        """Whether it ends when it is told to."""
        self.connector.stopped.set()
        self.driver.shutdown()
        self.thread.join(SOON)
        return not self.thread.is_alive()


def test_a_site_dials_until_the_coordinator_is_there(
    kits: Provisioned, north: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_KIT", str(kits.coordinator))
    monkeypatch.setattr(dialling, "RECONNECT", 0.1)
    port = free_port()
    site = Dialling(north, port)
    time.sleep(0.3)
    assert site.thread.is_alive()
    with monkeypatch.context() as patch:
        patch.setattr("test_listener.free_port", lambda: port)
        door = Listening(kits.coordinator)
    try:
        assert eventually(lambda: site.answers == [shared_connection.frame(0, b"here")])
    finally:
        door.driver.shutdown()
    site.thread.join(SOON)  # FLARE calls connect again when it returns
    assert not site.thread.is_alive()
    assert site.end()


def test_a_site_speaks_to_its_authority_only(north: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = provision(tmp_path, "other")
    monkeypatch.setenv("FEDSHIFT_KIT", str(other.coordinator))
    monkeypatch.setattr(dialling, "RECONNECT", 0.1)
    door = Listening(other.coordinator)
    try:
        assert eventually(lambda: door.is_heard(startup(other, "north")))
        site = Dialling(north, door.port)
        time.sleep(0.5)
        assert (site.driver.connections, site.answers) == ({}, [])
        assert site.end()
    finally:
        door.driver.shutdown()
