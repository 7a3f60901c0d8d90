"""The coordinator's listener against strangers who hold it and peers who cheat: real sockets, no processes."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.sfm.prefix import Prefix

from fedshift.deployment.flare import roles
from fedshift.deployment.flare.drivers import guarded_tcp
from fedshift.deployment.flare.provision import Provisioned
from fedshift.deployment.flare.roles import free_port

SOON = 5.0
"""Seconds within which a peer must be answered here: test machines are busy."""


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    folder = tmp_path_factory.mktemp("kits")
    options = {"name": "door", "contact": "team@example.org", "server": "localhost", "sites": ["north", "south"]}
    (folder / "project.yaml").write_text(yaml.safe_dump(options))
    return roles.provision(roles.load_project(folder / "project.yaml"), folder, lambda new: None)


class Echo:
    """Sends each frame of a connection back."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def process_frame(self, frame: Any) -> None:
        self.connection.send_frame(frame)


class Listening:
    """A listener in this process whose connections echo."""

    def __init__(self, kit: Path, driver: Any = None) -> None:
        startup = kit / "flare" / "startup"
        self.port = free_port()
        self.driver = driver or guarded_tcp.GuardedTcpDriver()
        self.driver.register_conn_monitor(self)
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

    def state_change(self, connection: Any) -> None:
        """FLARE's monitor of connections."""
        connection.register_frame_receiver(Echo(connection))

    def plain(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection on which nothing was said yet."""
        return socket.create_connection(("127.0.0.1", self.port), SOON, source_address=(source, 0))

    def peer(self, startup: Path) -> ssl.SSLSocket:
        """A connection with a kit's certificate."""
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.check_hostname = False
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
        return context.wrap_socket(self.plain())

    def is_heard(self, startup: Path) -> bool:
        """Whether a frame that a kit sends is answered."""
        with contextlib.suppress(OSError), self.peer(startup) as one:
            return speaks(one)
        return False


def speaks(one: ssl.SSLSocket) -> bool:
    """Whether a frame is answered on this connection."""
    whole = bytearray(20)
    Prefix(length=20).to_buffer(whole, 0)
    try:
        one.sendall(whole)
        return len(one.recv(20)) == 20
    except OSError:
        return False


def ended(one: socket.socket) -> bool:
    """Whether the other side ends a connection soon."""
    one.settimeout(SOON)
    with contextlib.suppress(ConnectionError):
        return one.recv(1) == b""
    return True


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def startup(made: Provisioned, site: str) -> Path:
    return made.sites[site] / "flare" / "startup"


@pytest.fixture
def door(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setenv("FEDSHIFT_KIT", str(kits.coordinator))
    monkeypatch.setattr(guarded_tcp, "_LOOK_AGAIN", 0.1)
    listening = Listening(kits.coordinator)
    try:
        assert eventually(lambda: listening.is_heard(startup(kits, "north")))
        yield listening
    finally:
        listening.driver.shutdown()
        listening.thread.join(SOON)
        assert not listening.thread.is_alive()


HELLO = bytes.fromhex("16030100c8010000c40303")
"""The first bytes of a ClientHello of 200 bytes."""


@pytest.mark.parametrize("said", [b"", HELLO, b"GET / HTTP/1.1\r\n"], ids=["nothing", "half a ClientHello", "no TLS"])
def test_strangers_who_hold_the_port_keep_nobody_out(said: bytes, door: Listening, kits: Provisioned) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(door.plain()) for _ in range(60)]
        for one in held:
            with contextlib.suppress(ConnectionError):  # the oldest have given way
                one.sendall(said)
        assert door.is_heard(startup(kits, "north"))
        if said in (b"", HELLO):
            assert door.driver._listener._greeted, "they hold it still"


def test_a_handshake_has_a_time_limit_also_for_bytes_that_drip_in(
    door: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_tcp, "HANDSHAKE_SECONDS", 0.5)
    begun = time.monotonic()
    with door.plain() as silent, door.plain() as slow:
        with contextlib.suppress(ConnectionError):
            for byte in HELLO + bytes(200):
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert ended(silent)
    assert time.monotonic() - begun < SOON


def test_connections_that_are_reset_at_once_harm_nobody(door: Listening, kits: Provisioned) -> None:
    with door.peer(startup(kits, "north")) as before:
        for said in (b"", HELLO) * 100:
            with door.plain() as rude:
                rude.sendall(said)
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert door.is_heard(startup(kits, "north"))
        assert speaks(before)


def test_handshakes_are_bounded_for_an_address_and_in_all(door: Listening, kits: Provisioned) -> None:
    greeted = door.driver._listener._greeted
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(door.plain())
        assert eventually(lambda: len(greeted) == guarded_tcp.HANDSHAKES_PER_ADDRESS)
        for number in range(2, 14):
            for _ in range(15):
                stack.enter_context(door.plain(f"127.0.0.{number}"))
        assert eventually(lambda: len(greeted) == guarded_tcp.HANDSHAKES)
        assert door.is_heard(startup(kits, "north"))
        assert len(greeted) <= guarded_tcp.HANDSHAKES
    assert eventually(lambda: not greeted), "who goes is forgotten"


def test_a_site_has_a_bounded_number_of_connections(door: Listening, kits: Provisioned) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(door.peer(startup(kits, "south")))
        assert speaks(other)
        mine = []
        for _ in range(guarded_tcp.CONNECTIONS_PER_CERTIFICATE + 2):
            mine.append(stack.enter_context(door.peer(startup(kits, "north"))))
            assert speaks(mine[-1])
        assert all(ended(one) for one in mine[:2]), "the oldest give way"
        admitted = door.driver._listener._admitted
        assert eventually(lambda: len(admitted) == guarded_tcp.CONNECTIONS_PER_CERTIFICATE + 1)
        assert door.is_heard(startup(kits, "south")), "no other site's"


def test_a_connection_that_is_ended_keeps_its_descriptor_until_nobody_reads_from_it(
    door: Listening, kits: Provisioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next connection gets the same descriptor, and two threads read one stream."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(echo: Echo, frame: Any) -> None:
        busy.set()
        assert go_on.wait(2 * SOON)

    monkeypatch.setattr(Echo, "process_frame", hold)
    with door.peer(startup(kits, "north")) as one:
        whole = bytearray(20)
        Prefix(length=20).to_buffer(whole, 0)
        one.sendall(whole)
        assert busy.wait(SOON)
        (mine,) = door.driver._listener._admitted
        mine.close()
        mine.close()  # a second look may find it again
        assert ended(one)
        assert mine.sock.fileno() != -1
        go_on.set()
        assert eventually(lambda: mine.sock.fileno() == -1)
        mine.close()
        mine.send_frame(whole)
        assert not door.driver._listener._admitted


def test_a_connection_for_which_there_is_no_thread_is_ended(
    door: Listening, kits: Provisioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert not door.is_heard(startup(kits, "north"))
        assert eventually(lambda: not door.driver._listener._admitted)
    assert door.is_heard(startup(kits, "north"))


def test_a_frame_is_refused_before_memory_is_reserved_for_it(door: Listening, kits: Provisioned) -> None:
    """Sixteen bytes, from a site with a valid certificate, that announce almost 2 GiB."""
    header = bytearray(16)
    Prefix(length=(2 << 30) - (3 << 20)).to_buffer(header, 0)
    before, most = psutil.Process().memory_info().rss, 0
    with door.peer(startup(kits, "north")) as one:
        one.sendall(header)
        one.settimeout(0.05)
        deadline, over = time.monotonic() + SOON, False
        while not over and time.monotonic() < deadline:
            most = max(most, psutil.Process().memory_info().rss)
            with contextlib.suppress(TimeoutError):
                over = one.recv(1) == b""
    assert over
    assert most - before < 64 << 20
    assert door.is_heard(startup(kits, "north"))


def test_a_revoked_kit_is_refused_and_the_others_go_on(door: Listening, kits: Provisioned) -> None:
    with door.peer(startup(kits, "north")) as north, door.peer(startup(kits, "south")) as south:
        assert speaks(north)
        assert speaks(south)
        assert roles.set_revoked(kits.coordinator, "north", True)
        try:
            assert ended(north), "also the connection that it had"
            assert not door.is_heard(startup(kits, "north"))
            assert speaks(south)
            assert not roles.set_revoked(kits.coordinator, "north", True)
        finally:
            roles.set_revoked(kits.coordinator, "north", False)
        assert door.is_heard(startup(kits, "north"))


def test_a_list_that_cannot_be_read_locks_nobody_out(door: Listening, kits: Provisioned) -> None:
    place = kits.coordinator / "certificates.json"
    whole = place.read_text()
    with door.peer(startup(kits, "north")) as north:
        assert speaks(north)
        try:
            place.write_text("")
            assert door.is_heard(startup(kits, "south"))
            time.sleep(0.3)  # it looks again meanwhile
            assert speaks(north)
        finally:
            place.write_text(whole)


def test_the_kit_before_is_refused_once_another_was_issued(door: Listening, kits: Provisioned, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    shutil.copytree(startup(kits, "south"), stolen)
    assert door.is_heard(stolen)
    roles.set_revoked(kits.coordinator, "south", True)
    project = roles.load_project(kits.folder.parent / "project.yaml")
    assert roles.reissue(project, kits.folder.parent, "south", lambda new: None).new == ("south",)
    assert door.is_heard(startup(kits, "south")), "a new kit is accepted, though the old one was revoked"
    assert not door.is_heard(stolen)
    assert door.is_heard(startup(kits, "north"))


def test_a_certificate_that_the_coordinator_does_not_know_is_refused(
    door: Listening, kits: Provisioned, tmp_path: Path
) -> None:
    """Of the same authority: whoever has the authority's key cannot pose as a site to this coordinator."""
    twin = tmp_path / "twin"
    shutil.copytree(kits.folder.parent, twin)
    roles.reissue(roles.load_project(twin / "project.yaml"), twin, "north", lambda new: None)
    assert not door.is_heard(twin / "door" / "sites" / "north" / "flare" / "startup")
    assert door.is_heard(startup(kits, "north"))
