"""What a stranger on the network tries, and another user of the machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.deploy.chained_log import lines_of
from fedshift.deploy.flare import roles
from fedshift.deploy.log_export import export_log, verify_export
from fedshift.deploy.playground.flooding import Flood, seconds_to_greet
from fedshift.deploy.playground.in_process import rehearse
from fedshift.deploy.playground.played import PATIENCE, Played
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message
from fedshift.encryption import KEY, KEY_FILE, MAGIC, new_key, read_private
from fedshift.errors import FedshiftError, UserError


def goes_on(played: Played, certificate: Path | None) -> bool:
    """Whether the coordinator's port goes on speaking to a peer that shows this certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker checks no certificate
    if certificate is not None:
        context.load_cert_chain(certificate / "client.crt", certificate / "client.key")
    try:
        with (
            socket.create_connection(("localhost", played.port), 10) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.settimeout(1.5)
            return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def _without_certificate(played: Played) -> str:
    own = next(iter(played.sites.values())) / "flare" / "startup"
    expect(goes_on(played, own), "not even a site's own certificate opens a connection")
    expect(not goes_on(played, None), "the coordinator goes on speaking to a stranger without a certificate")
    return "the connection is closed; a site's own certificate opens it"


def _foreign_certificate(played: Played) -> str:
    foreign = roles.provision(roles.load_project(played.project), played.folder / "foreign", lambda new: None)
    site = next(iter(foreign.sites))
    startup = foreign.sites[site] / "flare" / "startup"
    expect(not goes_on(played, startup), "a certificate of another authority is accepted")
    try:
        roles.unreachable(roles.load_kit(foreign.sites[site], "site"))
    except UserError as error:
        return str(error).partition(":")[0]
    raise Broken("a site with a kit of another authority is not told so")


def _held_port(played: Played) -> str:
    """A hundred connections that say nothing, from one address."""
    own = next(iter(played.sites.values())) / "flare" / "startup"
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(("localhost", played.port), 10))
        expect(goes_on(played, own), "a site's certificate opens no connection while a stranger holds the port")
    return "a site's certificate opens a connection all the same"


def _processes(kit: Path) -> Iterator[Any]:
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(kit)) for word in process.info["cmdline"] or []):
            yield process


def _other_ports(played: Played) -> str:
    import psutil

    listening = set()
    for kit in (played.coordinator, *played.sites.values()):
        for process in _processes(kit):
            for held in process.net_connections(kind="inet"):
                if held.status == psutil.CONN_LISTEN:
                    listening.add((kit == played.coordinator, held.laddr.ip, held.laddr.port))
    expect((True, "127.0.0.1", played.port) in listening, "the coordinator does not listen on its port")
    others = listening - {(True, "127.0.0.1", played.port)}
    expect(not others, f"a process listens on another port: {sorted(others)}")
    return f"of all processes one listens, on the coordinator's port {played.port}"


def _phones_home(played: Played) -> str:

    dialled, looked = set(), 0
    for kit in (played.coordinator, *played.sites.values()):
        for process in _processes(kit):
            looked += 1
            for held in process.net_connections(kind="inet"):
                if held.raddr and held.laddr.port != played.port:
                    dialled.add((held.raddr.ip, held.raddr.port))
    expect(bool(dialled), "no site is connected to the coordinator")
    others = {address for address in dialled if address not in (("127.0.0.1", played.port), ("::1", played.port))}
    expect(not others, f"a process is connected to something else: {sorted(others)}")
    return f"the connections of {looked} processes all lead to the coordinator's port"


def _watched_page(played: Played) -> str:
    """Requests to `fedshift page --live` from a browser that has a stranger's page open."""
    import psutil

    port, folder = roles.free_port(), played.coordinator / "deployments" / "honest" / "runs"
    command = [sys.executable, "-m", "fedshift", "page", str(folder), "--live", "--port", str(port)]
    watching = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def asked(method: str, host: str, path: str = "/") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, headers={"Host": f"{host}:{port}"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, text

    try:
        deadline = time.monotonic() + PATIENCE
        while not (listening := [held.laddr.ip for held in watching.net_connections("inet") if not held.raddr]):
            expect(watching.poll() is None, f"fedshift page --live ends with {watching.returncode}")
            expect(time.monotonic() < deadline, f"fedshift page --live does not start within {PATIENCE:g} s")
            time.sleep(0.2)
        expect(listening == ["127.0.0.1"], f"it listens on {listening}")
        status, text = asked("GET", "127.0.0.1")
        expect(status == 200 and "<script" not in text, f"its own user gets {status}")
        expect(asked("GET", "evil.example")[0] == 403, "it answers to another name")
        expect(asked("GET", "127.0.0.1", "/../../etc/passwd")[0] == 404, "it gives other files")
        expect(asked("POST", "127.0.0.1")[0] == 501, "it takes what is posted")
    finally:
        watching.terminate()
        watching.wait(30)
    return "it listens on 127.0.0.1, answers GET and its own name only, and holds no script"


def _large_frame(played: Played) -> str:
    """Sixteen bytes, from a site with a valid certificate, that announce almost 2 GiB."""
    from fedshift.deploy.flare.frames import frame

    header = frame(0, size=(2 << 30) - (3 << 20))
    startup = next(iter(played.sites.values())) / "flare" / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(startup / "client.crt", startup / "client.key")

    def taken() -> int:
        return sum(process.memory_info().rss for process in _processes(played.coordinator))

    before = taken()
    with (
        socket.create_connection(("localhost", played.port), 10) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.settimeout(10)
        connection.sendall(header)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
    grown = taken() - before
    expect(grown < 256 << 20, f"the coordinator takes {grown >> 20} MiB for it")
    return "the connection is closed before memory is taken"


def _flood(played: Played) -> str:
    """PINGs on two connections of one site, whose answers nobody reads, while another site greets the coordinator.

    It lasts less than the time after which the listener counts a connection, since the site itself takes part in what
    is tried afterwards.
    """
    (flooding, kit), (honest, other) = list(played.sites.items())[:2]

    def taken() -> int:
        return sum(process.memory_info().rss for process in _processes(played.coordinator))

    before, waits, most = taken(), [], 0
    with Flood(kit / "flare" / "startup", played.port, f"{flooding}.flood", connections=2).flowing() as flood:
        for _ in range(12):
            time.sleep(0.3)
            waits.append(seconds_to_greet(other / "flare" / "startup", played.port, f"{honest}.greeting"))
            most = max(most, taken() - before)
    expect(flood.sent > 100_000, "the flood does not reach the coordinator")
    expect(max(waits) < 0.5, f"another site is answered after {max(waits):.1f} s")
    expect(most < 100 << 20, f"the coordinator takes {most >> 20} MiB for it")
    return "another site is answered within 0.5 s, and the coordinator takes less than 100 MiB for it"


def _private_files(played: Played) -> str:
    looked = 0
    for kit in (played.coordinator, *played.sites.values()):
        for path in (*kit.rglob("*.key"), *kit.rglob("*.safetensors"), *kit.rglob("*.jsonl"), kit / "channel"):
            looked += 1
            mode = stat.S_IMODE(path.stat().st_mode)
            expect(not mode & 0o077, f"{path.relative_to(played.folder)} has the mode {mode:o}")
    expect(looked > 6, "there are no keys")
    return f"keys, logs, models and sockets of all roles ({looked}) are for their user only"


def _changed_log(played: Played) -> str:
    """On copies of a site's log; the export is signed with the key of its kit."""
    site, folder = next(iter(played.sites)), played.folder / "log"
    folder.mkdir()
    copy, export = folder / "audit.jsonl", folder / "export"
    lines = lines_of(played.sites[site] / "memory" / "audit.jsonl")
    expect(len(lines) > 3, "the site has not logged what it did")
    copy.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    kit = roles.load_kit(played.sites[site], "site")
    authority = kit.flare / "startup" / "rootCA.pem"
    export_log(copy, kit, "audit", export)
    verify_export(export, authority, copy)
    changed = json.dumps({**json.loads(lines[1]), "coordinator": "somebody else"})
    text = ""
    added = [*lines[:2], lines[0], *lines[2:]]
    for spoiled in ([lines[0], changed, *lines[2:]], [lines[0], *lines[2:]], added, lines[:-1]):
        copy.write_text("".join(f"{line}\n" for line in spoiled), encoding="utf-8")
        try:
            verify_export(export, authority, copy)
        except FedshiftError as error:
            text = text or str(error).partition(": ")[2]
        else:
            raise Broken("a changed, removed, added or cut line is not noticed")
    return text


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Without the keys that the user has set; they are set again at the end."""
    before = {name: os.environ.pop(name, None) for name in (KEY_FILE, KEY)}
    try:
        yield
    finally:
        os.environ.pop(KEY, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _taken_disk(played: Played) -> str:
    """The disks of all roles in the middle of a run, with a key in their environment."""

    class Stopped(Exception):
        """Ends the run where the machine would be switched off."""

    def stop(_: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if header.get("envelope", {}).get("round") == 2:
            raise Stopped
        return answer

    with _own_environment():
        os.environ[KEY] = new_key()
        with contextlib.suppress(Stopped):
            rehearse(played, "disk", stop)
        result = list((played.folder / "in process" / "disk").rglob("*.safetensors"))
        expect(any(path.name == "checkpoint.safetensors" for path in result), "there is no checkpoint")
        for path in result:
            expect(path.read_bytes().startswith(MAGIC), f"{path.name} is not encrypted")
        os.environ[KEY] = new_key()
        for path in result:
            try:
                read_private(path)
            except UserError:
                continue
            raise Broken(f"{path.name} opens with another key")
    return f"checkpoint and kept answers ({len(result)} files) are encrypted, and another key opens none"


PROMISES = (
    Promise("a stranger without a certificate", "connects to the coordinator", _without_certificate),
    Promise("a stranger with a kit of another project", "connects to the coordinator", _foreign_certificate),
    Promise("a stranger on the network", "holds the coordinator's port with silent connections", _held_port),
    Promise("a stranger on the network", "looks for another open port", _other_ports),
    Promise("a stranger on the network", "waits for a role to report home", _phones_home),
    Promise("a stranger on the network", "reads the page of fedshift page --live, or gets a browser to", _watched_page),
    Promise("a site that lies", "announces a frame of 2 GiB", _large_frame),
    Promise("a site that lies", "sends many frames and reads no answers", _flood),
    Promise("another user of the machine", "reads keys, logs and models", _private_files),
    Promise("whoever takes the disks during a run", "reads models where a key is set", _taken_disk),
    Promise("whoever can write to a site's disk", "changes the audit log after it was signed", _changed_log),
)
