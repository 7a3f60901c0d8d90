"""Every promise that depends on an installation, tried: ports, certificates, files, kits, processes.

It plays two sites and a coordinator on this machine: a process per role, mutual TLS over loopback, made-up data. To add
a promise, write a function that tries it, and a `Promise` in `PROMISES`. Its ``tries`` goes under ``selftest`` of the
row that it shows, in tests/threats.yaml (docs/threats.md). An attack that comes out alike on every machine is a test,
which carries the mark of its row.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedshift.deploy.chained_log import lines_of
from fedshift.deploy.coordinator import EXPERIMENT
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.jobs import job_folder
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.log_export import export_log, verify_export
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.json_objects import write_object
from fedshift.text import one_line

SITES = ("north", "south")
NASTY = ("<script>alert(1)</script>", '=HYPERLINK("http://x")', "\x1b]0;owned\x07\x1b[2J")
"""Names of classes, as an attacker would choose them: for a page, a spreadsheet and a terminal."""
POLICY: dict[str, Any] = {
    "send": ["weights", "numbers", "accuracy", "metrics"],
    "smallest_group": 10,
    "methods": ["fedavg"],
    "requests_per_round": 8,
}
"""What the sites allow."""
PATIENCE = 120.0
"""Seconds that anything may take: the machine may be busy."""


@dataclass(frozen=True)
class Played:
    """A federation that runs, and the files of its roles."""

    folder: Path
    coordinator: Path
    sites: Mapping[str, Path]
    port: int
    project: Path

    def deploy(self, name: str, method: str) -> tuple[Deployment, dict[str, Any]]:
        """Deploy a small experiment, as `fedshift deploy` does; the deployment and its state once it has ended."""
        deployment = Deployment(self.coordinator, name)
        experiment = parse(
            {
                "name": name,
                "data": {"name": "sites"},
                "protocol": {"targets": ["sites"], "seeds": [0], "test_fraction": 0.4},
                "model": {"name": "linear"},
                "training": {"rounds": 2, "batch_size": 16, "lr": 0.1},
                "methods": [{"name": method}],
                "device": "cpu",
                "engine": {"name": "flare", "threads": 1, "deadline": PATIENCE},
            }
        )
        write_object(deployment.folder / EXPERIMENT, experiment.dump())
        deployment.want("run")
        deadline = time.monotonic() + PATIENCE
        while not deployment.ended:
            if time.monotonic() > deadline:
                raise FedshiftError(f"the deployment did not end within {PATIENCE:g} s: {deployment.state}")
            time.sleep(0.1)
        return deployment, deployment.state


def _provision(folder: Path) -> Played:
    """Kits of a project, and data and a SITE.yaml for each site."""
    port = roles.free_port()
    file = folder / "project.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    options = {"name": "selftest", "contact": "selftest@example.org", "server": "localhost", "port": port}
    file.write_text(yaml.safe_dump({**options, "sites": list(SITES)}), encoding="utf-8")
    made = roles.provision(roles.load_project(file), folder / "kits", lambda new: None)
    draws = np.random.default_rng(0)
    for number, site in enumerate(SITES):
        labels = np.arange(96) % len(NASTY)
        np.savez(made.sites[site] / "data.npz", x=draws.normal(labels[:, None] + number, 1.0, (96, 6)), y=labels)
        options = {
            "site": site,
            "data": {"name": "arrays", "sites": {site: str(made.sites[site] / "data.npz")}, "classes": list(NASTY)},
            "device": "cpu",
            "threads": 1,
            "policy": POLICY,
        }
        (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    return Played(folder, made.coordinator, made.sites, port, file)


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[Played]:
    """Provision and start a federation below ``folder``; stop it at the end."""
    played = _provision(folder)
    with roles.running_services(played.coordinator, played.sites.values()):
        yield played


class Broken(Exception):
    """A promise that does not hold. The message says what happened instead."""


@dataclass(frozen=True)
class Promise:
    """Something that must not work."""

    who: str  # who tries it
    tries: str  # what they try
    # tries it on a played federation and says in words what came of it. Raises Broken, or any other error, if the
    # promise does not hold.
    attempt: Callable[[Played], str]


@dataclass(frozen=True)
class Outcome:
    """What came of trying a promise."""

    promise: Promise
    holds: bool
    what: str


def expect(holds: bool, otherwise: str) -> None:
    """Raise Broken with ``otherwise`` unless a condition holds."""
    if not holds:
        raise Broken(otherwise)


def attempt(promise: Promise, played: Played) -> Outcome:
    """Try a promise."""
    try:
        return Outcome(promise, True, one_line(promise.attempt(played), 160))
    except Broken as error:
        return Outcome(promise, False, one_line(str(error)))
    except Exception as error:
        return Outcome(promise, False, one_line(f"it could not be tried: {type(error).__name__}: {error}"))


# Strangers and other users --------------------------------------------------------------------------------------------


def _connect(played: Played, startup: Path | None) -> ssl.SSLSocket:
    """A connection to the coordinator with the certificate in a kit's ``flare/startup``, or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker checks no certificate
    if startup is not None:
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    return context.wrap_socket(socket.create_connection(("localhost", played.port), 10))


def goes_on(played: Played, certificate: Path | None) -> bool:
    """Whether the coordinator's port goes on speaking to a peer that shows this certificate, or none."""
    try:
        with _connect(played, certificate) as connection:
            connection.settimeout(1.5)
            return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def _without_certificate(played: Played) -> str:
    startup = next(iter(played.sites.values())) / "flare" / "startup"
    expect(goes_on(played, startup), "not even a site's own certificate opens a connection")
    expect(not goes_on(played, None), "the coordinator goes on speaking to a stranger without a certificate")
    return "the connection is closed; a site's own certificate opens it"


def _foreign_certificate(played: Played) -> str:
    foreign = roles.provision(roles.load_project(played.project), played.folder / "foreign", lambda new: None)
    site = next(iter(foreign.sites))
    startup = foreign.sites[site] / "flare" / "startup"
    expect(not goes_on(played, startup), "a certificate of another authority is accepted")
    try:
        roles.check_reachable(roles.load_kit(foreign.sites[site], "site"))
    except UserError as error:
        return str(error).partition(":")[0]
    raise Broken("a site with a kit of another authority is not told so")


def _held_port(played: Played) -> str:
    """A hundred connections that say nothing, from one address."""
    startup = next(iter(played.sites.values())) / "flare" / "startup"
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(("localhost", played.port), 10))
        expect(goes_on(played, startup), "a site's certificate opens no connection while a stranger holds the port")
    return "a site's certificate opens a connection all the same"


def _processes(kit: Path) -> Iterator[Any]:
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(kit)) for word in process.info["cmdline"] or []):
            yield process


def _connections(played: Played) -> list[tuple[Path, Any]]:
    """All connections of the processes of all roles, with the kit of each."""
    kits = (played.coordinator, *played.sites.values())
    return [(kit, item) for kit in kits for process in _processes(kit) for item in process.net_connections(kind="inet")]


def _other_ports(played: Played) -> str:
    import psutil

    listening = {
        (kit == played.coordinator, item.laddr.ip, item.laddr.port)
        for kit, item in _connections(played)
        if item.status == psutil.CONN_LISTEN
    }
    expect((True, "127.0.0.1", played.port) in listening, "the coordinator does not listen on its port")
    others = listening - {(True, "127.0.0.1", played.port)}
    expect(not others, f"a process listens on another port: {sorted(others)}")
    return f"of all processes one listens, on the coordinator's port {played.port}"


def _phones_home(played: Played) -> str:
    connections = [item for _, item in _connections(played) if item.raddr and item.laddr.port != played.port]
    expect(bool(connections), "no site is connected to the coordinator")
    addresses = {(item.raddr.ip, item.raddr.port) for item in connections}
    others = addresses - {("127.0.0.1", played.port), ("::1", played.port)}
    expect(not others, f"a process is connected to something else: {sorted(others)}")
    return f"{len(connections)} connections all lead to the coordinator's port"


def _watched_page(played: Played) -> str:
    """Requests to `fedshift page --live` from a browser that has a stranger's page open."""
    import psutil

    port, folder = roles.free_port(), played.coordinator / "deployments" / "honest" / "runs"
    command = [sys.executable, "-m", "fedshift", "page", str(folder), "--live", "--port", str(port)]
    watching = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(method: str, host: str, path: str = "/") -> tuple[int, str]:
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
        status, text = ask("GET", "127.0.0.1")
        expect(status == 200 and "<script" not in text, f"its own user gets {status}")
        expect(ask("GET", "evil.example")[0] == 403, "it answers to another name")
        expect(ask("GET", "127.0.0.1", "/../../etc/passwd")[0] == 404, "it gives other files")
        expect(ask("POST", "127.0.0.1")[0] == 501, "it takes what is posted")
    finally:
        watching.terminate()
        watching.wait(30)
    return "it listens on 127.0.0.1, answers GET and its own name only, and holds no script"


def _large_frame(played: Played) -> str:
    """Sixteen bytes, from a site with a valid certificate, that announce almost 2 GiB."""
    from fedshift.deploy.flare.drivers.shared_connection import frame

    header = frame(0, size=(2 << 30) - (3 << 20))
    startup = next(iter(played.sites.values())) / "flare" / "startup"

    def memory() -> int:
        return sum(process.memory_info().rss for process in _processes(played.coordinator))

    before = memory()
    with _connect(played, startup) as connection:
        connection.sendall(header)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
    grown = memory() - before
    expect(grown < 256 << 20, f"the coordinator takes {grown >> 20} MiB for it")
    return "the connection is closed before memory is taken"


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


# The coordinator ------------------------------------------------------------------------------------------------------


def _method_not_allowed(played: Played) -> str:
    _, state = played.deploy("not-allowed", "csac")
    expect(state["state"] == "failed" and "policy.methods" in state["message"], f"the deployment: {state}")
    return str(state["message"])


def _job_with_code(played: Played) -> str:
    """With the coordinator's own administrator of FLARE."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    job = job_folder("code", 1, played.folder / "job")
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "mine.py").write_text("print('mine')\n", encoding="utf-8")
    contact = load_kit(played.coordinator).project.contact
    with contextlib.redirect_stdout(io.StringIO()):  # FLARE says that it connects
        session = new_secure_session(contact, str(played.coordinator / "admin"), timeout=30.0)
    try:
        number = session.submit_job(str(job))
        deadline = time.monotonic() + 60
        while not (status := str(session.get_job_meta(number)["status"])).startswith("FINISHED"):
            expect(time.monotonic() < deadline, f"the job is {status}")
            time.sleep(0.2)
    finally:
        session.close()
    landed = [path for kit in played.sites.values() for path in kit.rglob("mine.py")]
    expect(status == "FINISHED:FAILED_TO_RUN" and not landed, f"the job is {status}, its code at {landed}")
    return "FLARE does not deploy the job, and no site has its code"


# Holders of a kit or of the authority ---------------------------------------------------------------------------------


def _unlisted_certificate(played: Played) -> str:
    """With the authority's key: a certificate in a site's name that the coordinator's kit does not list."""
    twin, project = played.folder / "twin", roles.load_project(played.project)
    shutil.copytree(played.folder / "kits", twin, ignore=shutil.ignore_patterns("channel*", "*.sock"))
    site = next(iter(played.sites))
    roles.reissue(project, twin, site, lambda new: None)
    startup = twin / project.name / "sites" / site / "flare" / "startup"
    expect(not goes_on(played, startup), "a certificate that the coordinator does not list is accepted")
    expect(goes_on(played, played.sites[site] / "flare" / "startup"), "the site's own is refused, too")
    return "the connection is closed; the site's own certificate opens it"


def _copied_authority(played: Played) -> str:
    from fedshift.deploy.flare.certificates import KEY as AUTHORITY_KEY

    kits, project = played.folder / "with passphrase", roles.load_project(played.project)
    made = roles.provision(project, kits, lambda new: "a passphrase")
    site = next(iter(made.sites))
    expect(b"ENCRYPTED" in (made.folder / "authority" / AUTHORITY_KEY).read_bytes(), "the key is not encrypted")
    try:
        roles.reissue(project, kits, site, lambda new: "another passphrase")
    except UserError as error:
        return f"the key is encrypted: {str(error).rpartition('/')[2]}"
    raise Broken("a certificate is signed with a wrong passphrase")


def _two_machines(played: Played) -> str:
    """The copy is started while the site itself is connected."""
    site = next(iter(played.sites))
    twin, text = played.folder / "stolen", f"the kit of site '{site}' is in use on two machines"
    shutil.copytree(played.sites[site], twin, ignore=shutil.ignore_patterns("channel", "service.*"))
    coordinator, deadline = roles.load_kit(played.coordinator, "coordinator"), time.monotonic() + 120
    try:
        roles.start(roles.load_kit(twin, "site"), twin / "SITE.yaml", wait=0)
        while text not in roles.status(coordinator).message:
            expect(time.monotonic() < deadline, "the coordinator does not say that two machines use one kit")
            time.sleep(0.5)
    finally:
        roles.stop(roles.load_kit(twin, "site"))
    return text


def _revoked_kit(played: Played) -> str:
    *others, site = played.sites
    roles.set_revoked(played.coordinator, site, True)
    try:
        deadline = time.monotonic() + 10
        while goes_on(played, played.sites[site] / "flare" / "startup"):
            expect(time.monotonic() < deadline, "a revoked kit opens a connection")
            time.sleep(0.2)
        expect(goes_on(played, played.sites[others[0]] / "flare" / "startup"), "another site is refused, too")
    finally:
        roles.set_revoked(played.coordinator, site, False)
    return f"the kit of '{site}' opens no connection, that of '{others[0]}' does"


def _honest(played: Played) -> str:
    deployment, state = played.deploy("honest", "fedavg")
    expect(state["state"] == "finished", f"the deployment: {state}")
    rounds = sum(event.get("what") == "round" for event in deployment.events())
    return f"{len(played.sites)} sites train for {rounds} rounds"


PROMISES = (
    Promise("an honest coordinator", "trains with honest sites, which must work", _honest),
    Promise("a stranger without a certificate", "connects to the coordinator", _without_certificate),
    Promise("a stranger with a kit of another project", "connects to the coordinator", _foreign_certificate),
    Promise("a stranger on the network", "holds the coordinator's port with silent connections", _held_port),
    Promise("a stranger on the network", "looks for another open port", _other_ports),
    Promise("a stranger on the network", "waits for a role to report home", _phones_home),
    Promise("a stranger on the network", "reads the page of fedshift page --live, or gets a browser to", _watched_page),
    Promise("a site that lies", "announces a frame of 2 GiB", _large_frame),
    Promise("another user of the machine", "reads keys, logs and models", _private_files),
    Promise("whoever can write to a site's disk", "changes the audit log after it was signed", _changed_log),
    Promise("a curious coordinator", "deploys a method that the site does not allow", _method_not_allowed),
    Promise("a curious coordinator", "submits a job that brings code", _job_with_code),
    Promise("the holder of authority", "poses as a site at the coordinator", _unlisted_certificate),
    Promise("whoever copied authority", "signs certificates without the passphrase", _copied_authority),
    Promise("whoever copied a site's kit", "uses it after it was revoked", _revoked_kit),
    Promise("whoever copied a site's kit", "uses it while the site does", _two_machines),
)
"""The honest run comes first: without it, whatever is refused shows nothing. What disturbs a site comes last."""


def selftest(folder: Path) -> Iterator[Outcome]:
    """Play a federation below ``folder`` and try every promise; what came of each, as it comes."""
    with playing(folder) as played:
        for promise in PROMISES:
            yield attempt(promise, played)
