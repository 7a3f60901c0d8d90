"""Three sites and a coordinator as processes, with mutual TLS: the bits of the local engine, whatever dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback import ADAPT, Without, options_of, simulate
from network import IN_FLIGHT, PATIENCE, Gates, Network, environment, rounds
from outcomes import alike, model, same
from safetensors.torch import load_file
from site_yaml import SITES

from fedshift.deploy.cli.site import open_model
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.kits import load_kit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    started = Network(tmp_path_factory.mktemp("network"))
    before = os.umask(0)  # what the roles write must be theirs alone all the same
    with environment(started):
        try:
            started.start()
            yield started
        finally:
            os.umask(before)
            started.stop()


@contextlib.contextmanager
def silent_connections(network: Network) -> Iterator[None]:
    """Strangers hold the coordinator's port all the time: silent connections, and halves of a ClientHello."""
    port, over = load_kit(network.coordinator).project.port, threading.Event()

    def hold() -> None:
        held: list[socket.socket] = []
        while not over.wait(0.2):
            with contextlib.suppress(OSError):  # the coordinator is down
                while len(held) < 200:
                    held.append(socket.create_connection(("127.0.0.1", port), 1.0))
                    held[-1].setblocking(False)
                    if len(held) % 2:
                        held[-1].sendall(bytes.fromhex("16030100c8010000c40303"))
            held = [connection for connection in held if not has_ended(connection)]
        for connection in held:
            connection.close()

    strangers = threading.Thread(target=hold, daemon=True)
    strangers.start()
    try:
        yield
    finally:
        over.set()
        strangers.join()


def has_ended(connection: socket.socket) -> bool:
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


SLOW = {"name": "slow_method:Slow", "label": "slow"}
SOURCES = ("north", "south")
"""Who trains where east is the target."""
OTHERS = ["fedavg", {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}, "kd3a"]
SEALED = ["kd3a", {"name": "shot", "bottleneck": 4}, {"name": "copa", "local_epochs": 1, "adaptation": True}]


@dataclass
class Played:
    """A deployment in which everything was killed, while strangers held the port."""

    options: dict[str, Any]
    deployment: Deployment
    folder: Path
    """Its results."""
    aborted: int = 0
    """Rounds that were done when it was aborted."""
    sockets: list[tuple[bool, list[str], Any]] = field(default_factory=list)
    """What every process held: whether it is the coordinator's, its command, the socket."""
    commands: list[list[str]] = field(default_factory=list)
    modes: list[tuple[int, list[int]]] = field(default_factory=list)
    """Permissions of each role's folder of sockets, and of the files in it."""

    def look(self, network: Network) -> None:
        """Write down what the processes hold now."""
        for kit in (network.coordinator, *network.made.sites.values()):
            for process in network.processes(kit):
                self.commands.append(process.cmdline())
                held = process.net_connections(kind="inet")
                self.sockets += [(kit == network.coordinator, self.commands[-1], connection) for connection in held]
            files = [stat.S_IMODE(path.stat().st_mode) for path in (kit / "channel").iterdir()]
            self.modes.append((stat.S_IMODE((kit / "channel").stat().st_mode), files))


@pytest.fixture(scope="module")
def whole_run(network: Network) -> Played:
    """One deployment for several tests, as each job starts four processes.

    A whole site dies in mid-call, then the whole coordinator, each killed with -9; then the deployment is aborted, and
    resumed. Every time the sites wait in their calls. `test_network_apart` kills the job of a site alone.
    """
    gates = Gates(network.folder, "slow")
    options = options_of({}, name="played", protocol=ADAPT, methods=[gates.method, *OTHERS])
    options["training"] = {**options["training"], "rounds": 4}  # six of the slow method: as much work as CSAC's
    gates.open(1)
    deployment = network.deploy(options, unseen=False)
    network.wait(deployment, lambda: gates.has_reached(2, *SOURCES))
    whole_run = Played(options, deployment, Path())
    whole_run.look(network)
    with silent_connections(network):
        assert network.kill(network.made.sites["south"]) >= 2
        gates.open(2)
        network.start("south")

        network.wait(deployment, lambda: gates.has_reached(3, *SOURCES))
        assert network.kill(network.coordinator) >= 2
        gates.open(3)
        network.start("coordinator")

        network.wait(deployment, lambda: gates.has_reached(4, *SOURCES))
        deployment.want("abort")
        network.reach(deployment, "aborted")
        network.until(lambda: not network.jobs(network.coordinator))
        whole_run.aborted = rounds(deployment)
        gates.open(4, 5, 6)
        deployment.want("run")
        network.leave(deployment, "aborted")
        whole_run.folder = network.finish(deployment)
    return whole_run


@pytest.mark.threat("held_port")
def test_every_method_ends_in_the_bits_of_the_local_engine(whole_run: Played, tmp_path: Path) -> None:
    """Whatever was killed, and although the run was aborted and resumed, while strangers held the port."""
    here = simulate(tmp_path, {**whole_run.options, "methods": [SLOW, *OTHERS]}, unseen={})
    for name in ("slow", "fedavg", "csac", "kd3a"):
        assert alike(here, whole_run.folder, name, "east"), name
    assert (whole_run.folder / "order.json").read_text() == (here / "order.json").read_text()


def test_sealed_models_end_in_the_same_bits(network: Network, tmp_path: Path) -> None:
    options = options_of({}, name="sealed", protocol=ADAPT, methods=SEALED)
    there = network.finish(network.deploy(options, unseen=False, routing="sealed"))
    here = simulate(tmp_path, options, unseen={}, routing="sealed")
    assert alike(here, there, "kd3a", "east")
    for name in ("shot", "copa"):
        open_model(there / name / "east/seed-0", network.made.sites["east"] / "SITE.yaml", tmp_path / name)
        assert same(model(here, name, "east"), load_file(tmp_path / name)), name


def test_what_was_killed_or_aborted_is_gone_on_with(network: Network, whole_run: Played) -> None:
    back = {"what": "site", "site": "south", "is": "back"}
    assert any(back.items() <= event.items() for event in whole_run.deployment.events())
    lines = [json.loads(line) for line in (whole_run.folder / "slow/east/seed-0/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
    assert whole_run.aborted == 3 < len(lines), "it was aborted in the middle of a run"
    for name in SITES:
        assert not list((network.made.sites[name] / "memory").glob("played-*")), "a finished run is forgotten at sites"


@pytest.mark.threat("another_way_in")
def test_only_the_coordinators_port_listens_and_nobody_dials_another(network: Network, whole_run: Played) -> None:
    """While a job runs: the sockets that every process of the federation holds."""
    port = load_kit(network.coordinator).project.port
    listening = set()
    for coordinator, command, held in whole_run.sockets:
        if held.status == psutil.CONN_LISTEN:
            listening.add((coordinator, held.laddr.ip, held.laddr.port))
        elif held.raddr:
            ports = [held.raddr.port] + [held.laddr.port] * coordinator
            assert held.raddr.ip == "127.0.0.1", (command, held)
            assert port in ports, (command, held)
        else:
            assert held.status == psutil.CONN_CLOSE, (command, held)
    assert listening == {(True, "127.0.0.1", port)}
    jobs = ("worker_process", "runner_process")
    assert sum(any(word.endswith(jobs) for word in command) for command in whole_run.commands) == 1 + len(SITES)
    assert whole_run.modes == [(0o700, [0o600])] * (1 + len(SITES))


@dataclass
class Reduced:
    """A deployment of which sites were lost: one that was slow, then one that was killed and one that was revoked."""

    options: dict[str, Any]
    deployment: Deployment
    folder: Path
    """Its results."""

    def losses(self, label: str) -> dict[tuple[str, int], str]:
        """Which sites a method's training lost in which rounds, and why."""
        wanted = {"what": "fit", "is": "lost"}
        events = [event for event in self.deployment.events() if wanted.items() <= event.items()]
        return {(event["site"], event["round"]): event["reason"] for event in events if f"-{label}-" in event["run"]}


@pytest.fixture(scope="module")
def reduction(network: Network, whole_run: Played) -> Reduced:
    """One deployment for several tests. Models cross in parts.

    First a site never ends a call in time. In the next run it is there again, and dies as a whole in mid-call; then
    another's kit is revoked in mid-call. Both stay away.
    """
    late, gates = Gates(network.folder, "late", only_at="east"), Gates(network.folder, "killed")
    large = {"name": "mlp", "hidden": [300, 300]}
    options = options_of({}, name="reduced", model=large, methods=[late.method, gates.method])
    deployment = network.deploy(options, quorum=1, grace=6.0, patience=1.0)
    network.wait(deployment, lambda: gates.has_reached(1, *SOURCES))
    late.open(1, 2, 3)
    network.wait(deployment, lambda: gates.has_reached(1, "east"))

    gates.open(1)
    network.wait(deployment, lambda: gates.has_reached(2, *SITES))
    network.kill(network.made.sites["east"])

    gates.open(2)
    network.wait(deployment, lambda: gates.has_reached(3, *SOURCES))
    roles.set_revoked(network.coordinator, "south", True)
    gates.open("3-north")
    return Reduced(options, deployment, network.finish(deployment))


def test_a_quorum_is_not_slowed_by_a_site_that_never_ends_a_call(reduction: Reduced) -> None:
    """It is waited for in the first round, and in no other, as `test_slow_site` shows."""
    lost = reduction.losses("late")
    assert lost.keys() == {("east", 1), ("east", 2), ("east", 3)}
    assert "engine.grace" in lost["east", 1]
    lines = (reduction.folder / "late" / "west" / "seed-0" / "rounds.jsonl").read_text().splitlines()
    assert [set(json.loads(line)["extra"].get("missing", {})) for line in lines] == [{"east"}] * 3


@pytest.mark.threat("revoked_kit")
def test_a_quorum_goes_on_without_a_killed_site_and_a_revoked_one(
    network: Network, reduction: Reduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/deploy.md says comes out."""
    lost = reduction.losses("killed")
    assert (lost.keys(), lost["south", 3]) == ({("east", 2), ("east", 3), ("south", 3)}, "its kit was revoked")
    sizes = [event["bytes"] for event in reduction.deployment.events() if event["what"] == "fit" and "bytes" in event]
    assert min(sizes) * len(SITES) > IN_FLIGHT << 20, "they are too large to travel as a whole"
    monkeypatch.setattr(Without, "absent", lost.keys())
    monkeypatch.setattr("fedshift.experiment.runs.round_loop.LocalFederation", Without)
    here = simulate(tmp_path, {**reduction.options, "methods": [{**SLOW, "label": "killed"}]})
    assert alike(here, reduction.folder, "killed")


def answers(network: Network, certificate: Path | None) -> bool:
    """Whether the coordinator's port goes on speaking to a peer that shows this certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate / "client.crt", certificate / "client.key")
    port = load_kit(network.coordinator).project.port
    try:
        with socket.create_connection(("localhost", port), 10) as plain, context.wrap_socket(plain) as connection:
            connection.settimeout(2.0)
            return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_a_revoked_kit_is_refused_after_the_coordinator_was_started_again(network: Network, reduction: Reduced) -> None:
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    south = network.made.sites["south"]
    network.kill(network.coordinator)
    network.start("coordinator")
    assert not answers(network, south / "flare/startup")
    assert answers(network, network.made.sites["north"] / "flare/startup")
    assert "revoked" in str(roles.check_reachable(load_kit(south)))
    session = new_secure_session("test@example.org", str(network.coordinator / "admin"), timeout=PATIENCE)
    try:
        network.until(lambda: {client.name for client in session.get_system_info().client_info} == {"north"})
    finally:
        session.close()
    (told,) = (network.coordinator / "flare").glob("**/disabled_clients.json")
    assert json.loads(told.read_text()) == {"disabled_clients": ["south"]}
    roles.set_revoked(network.coordinator, "south", False)
    assert answers(network, south / "flare/startup")
    network.until(lambda: json.loads(told.read_text()) == {"disabled_clients": []})


@pytest.mark.case("revoked sites", "revoke and remove over processes, then a deployment of all sites")
@pytest.mark.case("revoked sites", "over processes: revoked with a quorum, and dropped; a site of the project dropped")
def test_a_revoked_a_removed_and_a_dropped_site_are_not_waited_for(network: Network) -> None:
    """With the services that ran before, whether the site's own goes on running or not."""
    every = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}
    file, kits = network.folder / "project.yaml", network.folder / "kits"
    text = file.read_bytes()

    def sites_that_train(name: str, drop: tuple[str, ...] = (), **engine: Any) -> set[str]:
        options = options_of({"name": "fedavg"}, name=name, protocol={**every, "drop": list(drop)})
        deployment = network.deploy(options, unseen=False, **engine)
        network.finish(deployment)
        return {event["site"] for event in deployment.events() if event["what"] == "fit"}

    network.start_again("east")
    try:
        roles.set_revoked(network.coordinator, "south", True)
        assert sites_that_train("revoked") == {"north", "east"}
        assert sites_that_train("revoked-quorum", quorum=2) == {"north", "east"}
        assert sites_that_train("revoked-dropped", drop=("south",)) == {"north", "east"}
        roles.stop(roles.load_kit(network.made.sites["south"], "site"))
        roles.set_revoked(network.coordinator, "south", False)
        assert sites_that_train("dropped", drop=("south",)) == {"north", "east"}
        roles.remove(file, kits, "south")
        assert sites_that_train("removed") == {"north", "east"}
    finally:
        file.write_bytes(text)
        network.made = roles.provision(roles.load_project(file), kits, lambda new: None)
        network.start_again("south")


@pytest.mark.threat("copied_kit")
def test_one_kit_on_two_machines_is_said(network: Network, tmp_path: Path) -> None:
    """Both would train in turn, half of what they are asked; the coordinator says so, and begins nothing."""
    twin, message = tmp_path / "twin", "the kit of site 'north' is in use on two machines"
    shutil.copytree(network.made.sites["north"], twin, ignore=shutil.ignore_patterns("channel", "service.*"))
    coordinator = roles.load_kit(network.coordinator, "coordinator")
    try:
        roles.start(roles.load_kit(twin, "site"), twin / "SITE.yaml", wait=PATIENCE)
        network.until(lambda: message in roles.status(coordinator).message)
        deployment = network.deploy(options_of({"name": "fedavg"}, name="twins"))
        network.wait(deployment, lambda: message in deployment.state.get("message", ""))
        assert deployment.state["state"] == "waiting"
        deployment.want("abort")
        network.reach(deployment, "aborted")
    finally:
        roles.stop(roles.load_kit(twin, "site"))


@pytest.mark.threat("other_user_kits")
def test_only_its_owner_reads_what_a_role_writes(network: Network) -> None:
    """Models, kept answers, logs, keys: after the runs of the tests before, whatever the umask."""
    written = [path for part in ("flare", "memory") for path in network.made.folder.glob(f"*/**/{part}/**/*")]
    assert any(path.name == "audit.jsonl" for path in written)
    kits = [network.coordinator, *network.made.sites.values()]
    open_to_others = [path for path in (*kits, *written) if path.lstat().st_mode & 0o077 and not path.is_symlink()]
    assert open_to_others == []


@pytest.mark.threat("reports_home")
def test_nobody_phones_home(network: Network) -> None:
    """All that the processes of the tests before looked up or dialled, from their first line on."""
    coordinator = load_kit(network.coordinator).project
    notes = {path.stem: path.read_text().splitlines() for path in network.watched.iterdir()}
    assert len(notes) >= 2 * (1 + len(SITES))
    touched = {tuple(json.loads(line)) for lines in notes.values() for line in lines}
    dialled = {tuple(address) for event, *address in touched if event == "dialled"}
    assert {port for _, port in dialled} == {str(coordinator.port)}
    assert {host for host, _ in dialled} <= {"localhost", "127.0.0.1"}
    looked_up = {address[0] for event, *address in touched if event == "looked up"}
    assert looked_up <= {"localhost"}
    # FLARE asks the system which of its own addresses faces outwards; nothing is sent for that.
    assert {tuple(address) for event, *address in touched if event == "aimed"} <= {("10.255.255.255", "1")}
    assert not [address for event, *address in touched if event == "sent"]
