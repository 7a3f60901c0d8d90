"""Projects and start-up kits: what FLARE's provisioning makes of them, and what can be wrong with one."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import shutil
import socket
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fedshift.errors import UserError

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from fedshift.deployment.flare import roles
from fedshift.deployment.flare.checks import check_certificates, check_port, check_reachable
from fedshift.deployment.flare.deployment_folder import Deployment
from fedshift.deployment.flare.jobs import Attendance, RunningDeployment
from fedshift.deployment.flare.kits import Kit, Project, load_kit
from fedshift.deployment.flare.provision import Provisioned, relocate
from fedshift.deployment.flare.service import Service
from fedshift.federation.remote.policy import Policy

PROJECT: dict[str, Any] = {
    "name": "hearts",
    "contact": "team@example.org",
    "server": "localhost",
    "port": 8002,
    "sites": ["north", "south"],
}


def project_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "project.yaml"
    file.write_text(yaml.safe_dump({**PROJECT, **changes}))
    return file


def provisioned(folder: Path, **changes: Any) -> Provisioned:
    return roles.provision(roles.load_project(project_file(folder, **changes)), folder, lambda new: None)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provisioned(tmp_path_factory.mktemp("kits"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": ["north", "North"]}, "two sites are called"),
        ({"sites": []}, "sites"),
        ({"sites": ["a/b"]}, "cannot be a site's name"),
        ({"sites": ["coordinator"]}, "reserved word"),
        ({"contact": "nobody"}, "e-mail"),
        ({"port": 0}, "port"),
        ({"sorver": "x"}, "sorver"),
        ({"name": "../x"}, "letters, digits"),
    ],
)
def test_a_mistake_in_a_project_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as raised:
        roles.load_project(project_file(tmp_path, **change))
    assert "\n" not in str(raised.value)


def test_every_role_gets_its_own_keys_and_no_other(kits: Provisioned) -> None:
    assert kits.new == ("coordinator", "north", "south")
    keys = {path.read_bytes() for path in kits.folder.rglob("*.key") if "authority" not in path.parts}
    assert len(keys) == 4  # the server's, its administrator's, two sites'
    for site in kits.sites.values():
        assert len(list(site.rglob("*.key"))) == 1
        assert not list(site.rglob("*.sh.key"))
        assert (next(site.rglob("*.key")).stat().st_mode & 0o077) == 0
    assert (kits.folder / "authority").stat().st_mode & 0o077 == 0


def test_settings_of_a_kit(kits: Provisioned) -> None:
    assert not list(kits.folder.glob("**/flare/**/*.sh"))  # they would start FLARE as it is
    """Own classes only, no code of a job's, no shell, no logs to the coordinator, nothing in a shared folder."""
    for kit in (kits.coordinator, *kits.sites.values()):
        local = kit / "flare" / "local"
        resources = json.loads((local / "resources.json").read_text())
        ours = [name for name in resources["class_allow_list"] if name.startswith("fedshift")]
        assert len(ours) == 1
        assert resources["class_list_enforcement_mode"] == "enforce"
        rights = json.loads((local / "authorization.json").read_text())["permissions"]
        assert list(rights) == ["project_admin"]
        assert rights["project_admin"]["byoc"] == "none"
        assert rights["project_admin"]["shell_commands"] == "none"
        assert "/tmp/nvflare" not in (local / "resources.json").read_text()
        if kit != kits.coordinator:
            assert resources["allow_log_streaming"] is False
            assert "site_log_streamer" not in {part["id"] for part in resources["components"]}


@pytest.mark.parametrize("scheme", ["tcp", "grpc", "http"])
def test_the_coordinator_listens_with_the_projects_scheme_and_sites_dial_it(scheme: str, tmp_path: Path) -> None:
    made = provisioned(tmp_path, scheme=scheme, sites=["north"], largest_message=100)
    relocate(load_kit(made.coordinator))  # as at each start
    own = json.loads((made.coordinator / "flare/startup/fed_server.json").read_text())["servers"][0]["service"]
    other = json.loads((made.sites["north"] / "flare/startup/fed_client.json").read_text())["servers"][0]["service"]
    assert (own["scheme"], other["scheme"]) == ("guarded" if scheme == "tcp" else scheme, scheme)
    for kit in (made.coordinator, made.sites["north"]):
        channels = json.loads((kit / "flare/local/comm_config.json").read_text())
        assert channels["streaming_max_blob_size"] == 100 << 20


def test_a_message_that_no_role_would_take_is_not_sent() -> None:
    """FLARE would end the process that sends it, and the job with it."""
    from fedshift.deployment.flare.engine import check_size
    from fedshift.federation.remote.wire import Message

    project = Project.model_validate({**PROJECT, "largest_message": 1})
    check_size(Message("{}", bytes(900 << 10), ""), project)
    with pytest.raises(UserError, match="largest_message"):
        check_size(Message("{}", bytes(1 << 20), ""), project)


def test_the_site_file_of_a_kit_has_the_defaults_of_every_rule(kits: Provisioned) -> None:
    """Each with a comment or a list to choose from, except limits that say what they are."""
    text = (kits.sites["north"] / "SITE.yaml").read_text()
    written = yaml.safe_load(text)["policy"]
    assert set(written) == set(Policy.model_fields)
    assert Policy.model_validate(written) == Policy()
    assert all("#" in line for line in text.splitlines() if line.strip().startswith(("models", "splits", "exposure")))


def test_a_site_that_is_added_later_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    first = provisioned(tmp_path)
    before = {path: path.read_bytes() for path in first.sites["north"].rglob("*") if path.is_file()}
    (first.sites["north"] / "SITE.yaml").write_text("site: north  # filled in\n")
    more = provisioned(tmp_path, sites=["north", "south", "east"])
    assert more.new == ("east",)
    for path, content in before.items():
        if path.name != "SITE.yaml":
            assert path.read_bytes() == content
    root = (more.sites["east"] / "flare/startup/rootCA.pem").read_bytes()
    assert root == (more.coordinator / "flare/startup/rootCA.pem").read_bytes()
    assert Deployment(more.coordinator, "x").sites == ["north", "south", "east"]
    anew = roles.provision(roles.load_project(tmp_path / "project.yaml"), tmp_path, lambda new: None, renew=True)
    assert (anew.sites["east"] / "flare/startup/rootCA.pem").read_bytes() != root
    assert (anew.sites["north"] / "SITE.yaml").read_text() == "site: north  # filled in\n"


def test_a_kit_that_was_moved_keeps_its_files_below_it(tmp_path: Path) -> None:
    made = provisioned(tmp_path / "here")
    moved = tmp_path / "there"
    shutil.move(made.coordinator, moved)
    relocate(load_kit(moved))
    text = (moved / "flare/local/resources.json").read_text()
    assert str(moved) in text
    assert str(made.coordinator) not in text


def test_certificates(kits: Provisioned) -> None:
    kit = load_kit(kits.sites["north"], "site")
    expiry = check_certificates(kit)
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    assert now + 300 * day < expiry < now + 400 * day
    with pytest.raises(UserError, match=r"expired at .* ask team@example.org"):
        check_certificates(kit, expiry + day)
    with pytest.raises(UserError, match=r"valid from .* this machine's clock says .* set the clock"):
        check_certificates(kit, now - 2 * day)


def test_kits_that_are_wrong(kits: Provisioned, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the kit of a site, not of a coordinator"):
        load_kit(kits.sites["north"], "coordinator")
    with pytest.raises(UserError, match="holds no start-up kit"):
        load_kit(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(kits.sites["north"], other)
    shutil.copy(kits.sites["south"] / "flare/startup/client.crt", other / "flare/startup")
    with pytest.raises(UserError, match="certificate is for 'south', not for 'north'"):
        check_certificates(load_kit(other))
    (other / "flare/startup/client.crt").write_text("nonsense")
    with pytest.raises(UserError, match=r"lacks a readable client.crt"):
        check_certificates(load_kit(other))
    foreign = provisioned(tmp_path / "foreign")
    mixed = tmp_path / "mixed"
    shutil.copytree(kits.sites["north"], mixed)
    shutil.copy(foreign.sites["north"] / "flare/startup/rootCA.pem", mixed / "flare/startup")
    with pytest.raises(UserError, match="not of its authority"):
        check_certificates(load_kit(mixed))


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        kit = load_kit(provisioned(tmp_path, port=taken.getsockname()[1]).coordinator)
        with pytest.raises(UserError, match=r"port \d+ cannot be used .*provision with another port"):
            check_port(kit, seconds=0.1)


def answering(kit: Path, stop: threading.Event, patience: float = 2.0) -> int:
    """A TLS server with a coordinator's certificate that wants its clients' certificates, as FLARE's does.

    It waits for so many seconds until it ends a connection: longer than a client waits.
    """
    startup = kit / "flare" / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", roles.free_port()))
    listener.settimeout(0.2)

    def serve() -> None:
        with listener:
            while not stop.is_set():
                try:
                    plain, _ = listener.accept()
                    with context.wrap_socket(plain, server_side=True) as connection:
                        connection.settimeout(patience or None)
                        connection.recv(int(patience > 0))
                except OSError:
                    continue

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["tcp", "grpc"])
def test_a_connection_that_is_ended_at_once_is_a_refusal_unless_the_scheme_does_so(
    scheme: str, kits: Provisioned
) -> None:
    stop = threading.Event()
    try:
        kit = load_kit(kits.sites["north"])
        here = {"port": answering(kits.coordinator, stop, patience=0.0), "scheme": scheme}
        reason = check_reachable(Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update=here)))
    finally:
        stop.set()
    assert ("revoked or replaced" in str(reason)) == (scheme == "tcp")


def test_reaching_the_coordinator(kits: Provisioned, tmp_path: Path) -> None:
    stop = threading.Event()
    try:
        port = answering(kits.coordinator, stop)

        def kit_of(made: Provisioned) -> Kit:
            kit = load_kit(made.sites["north"])
            return Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": port}))

        assert check_reachable(kit_of(kits)) is None
        with pytest.raises(UserError, match=r"kit.*'hearts'"):
            check_reachable(kit_of(provisioned(tmp_path)))
    finally:
        stop.set()
    kit = load_kit(kits.sites["north"])
    nobody = Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": roles.free_port()}))
    assert "refused" in str(check_reachable(nobody)).lower()


def dated(kit: Path, own: str, authority: Path, begin: int, end: int) -> None:
    """Give a kit's certificate other dates, in days from now; signed by the project's authority all the same."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key((authority / "rootCA.key").read_bytes(), None)
    file = kit / "flare" / "startup" / f"{own}.crt"
    old, now = x509.load_pem_x509_certificate(file.read_bytes()), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(now + datetime.timedelta(begin)).not_valid_after(now + datetime.timedelta(end))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))  # type: ignore[arg-type]


@pytest.mark.parametrize("dates", [(1, 30), (-30, -1)])
@pytest.mark.parametrize("whose", ["server", "client"])
def test_a_clock_that_is_wrong_is_said_in_one_line(dates: tuple[int, int], whose: str, tmp_path: Path) -> None:
    """A certificate out of its dates by one side's clock: the site's sees the coordinator's so, or the other way."""
    made = provisioned(tmp_path)
    dated(made.coordinator if whose == "server" else made.sites["north"], whose, made.folder / "authority", *dates)
    stop = threading.Event()
    try:
        port = answering(made.coordinator, stop)
        kit = load_kit(made.sites["north"])
        kit = Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": port}))
        with pytest.raises(UserError, match="clocks") as raised:
            check_reachable(kit)
        assert "\n" not in str(raised.value)
    finally:
        stop.set()
    if whose == "client":
        message = r"valid from .* set the clock" if dates[0] > 0 else r"expired at .* clock says"
        with pytest.raises(UserError, match=message):
            check_certificates(kit)


def test_a_site_that_cannot_reach_the_coordinator_says_so_and_tries_again(tmp_path: Path) -> None:
    kit = load_kit(provisioned(tmp_path, port=roles.free_port()).sites["north"])
    service = Service(kit)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 4:
            service.stopping.set()
        return False

    said: list[str] = []
    service.say = lambda state, message: said.append(f"{state} {message}")  # type: ignore[method-assign]
    service.stopping.wait = wait  # type: ignore[assignment, method-assign]
    service.run()
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert all("cannot reach the coordinator at localhost port" in line for line in said[:4])


@pytest.mark.parametrize(
    "line",
    [
        "sfm_endpoint - INFO - Connection CN00012 is evicted for CN00013 from endpoint north for exceeding limit 1",
        "ClientManager - INFO - Failed to re-activate the client:north: already registered with another token.",
    ],
)
def test_two_machines_with_one_kit_are_told_apart_from_a_line_that_broke_once(
    line: str, kits: Provisioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("fedshift.deployment.flare.jobs.time.monotonic", lambda: now)
    attendance = Attendance()
    for _ in range(2):
        attendance.read_line(line)
    assert attendance.kit_used_twice() == ""
    now += 9
    attendance.read_line(line)
    assert "'north'" in attendance.kit_used_twice()
    now += 60
    assert attendance.kit_used_twice() == ""


def test_a_service_notes_which_sites_registered(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(load_kit(kits.coordinator))
    service.child = SimpleNamespace(pid=1, stdout=["INFO - Client: New client north@10.0.0.7 joined. Sent token: 1\n"])  # type: ignore[assignment]
    monkeypatch.setattr("fedshift.deployment.flare.jobs.time.monotonic", lambda: 7.0)
    service._read_output(service.child)  # type: ignore[arg-type]
    assert service._attendance.joined == {"north": 7.0}


class Server:
    """Stands for FLARE's, whose jobs all die; ``rounds`` of them finish a round before."""

    def __init__(self, deployment: Deployment, rounds: int) -> None:
        self.deployment, self.rounds, self.jobs = deployment, rounds, 0

    def get_system_info(self) -> Any:
        return SimpleNamespace(client_info=[SimpleNamespace(name=site) for site in self.deployment.sites])

    def submit_job(self, folder: str) -> str:
        self.jobs += 1
        if self.jobs <= self.rounds:
            self.deployment.record({"what": "round", "round": self.jobs})
        return f"job-{self.jobs}"

    def get_job_meta(self, job: str) -> dict[str, str]:
        return {"status": "FINISHED:EXECUTION_EXCEPTION"}


@pytest.mark.parametrize("rounds", [0, 2])
def test_jobs_that_die_again_and_again_are_given_up(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(1000.0, 2.0)
    monkeypatch.setattr("fedshift.deployment.flare.jobs.time.monotonic", lambda: next(ticks))
    made = provisioned(tmp_path)
    deployment = Deployment(made.coordinator, "study")
    deployment.want("run")
    (deployment.folder / "experiment.json").write_text(json.dumps({"engine": {"tries": 3}}))
    server = Server(deployment, rounds)
    job = RunningDeployment(Attendance(), deployment)
    looks = 0
    while not job.look(server):
        looks += 1
        assert looks < 50
    assert server.jobs == 3 + rounds
    assert deployment.state["state"] == "failed"
    assert re.search(r"3 jobs .*fedshift deploy resume", deployment.state["message"])


@pytest.mark.parametrize(
    ("quorum", "revoked", "begins"), [(1, {"north"}, True), (1, set(), False), (None, {"north"}, False)]
)
def test_a_quorum_does_not_wait_for_a_revoked_site(
    quorum: int | None, revoked: set[str], begins: bool, kits: Provisioned
) -> None:
    deployment = Deployment(kits.coordinator, f"study-{quorum}-{len(revoked)}")
    deployment.want("run")
    (deployment.folder / "experiment.json").write_text(json.dumps({"engine": {"quorum": quorum}}))
    server = Server(deployment, 1)
    server.get_system_info = lambda: SimpleNamespace(client_info=[SimpleNamespace(name="south")])  # type: ignore[method-assign]
    RunningDeployment(Attendance(), deployment, lambda: frozenset(revoked)).look(server)
    assert server.jobs == int(begins)
    if not begins:
        assert ("north (revoked)" in deployment.state["message"]) == bool(revoked)


def test_a_reply_that_comes_while_the_coordinator_looks_who_is_lost_counts(
    kits: Provisioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE ends a task with OK once its reply has come; that is no reason to count the site as lost."""
    from nvflare.apis.controller_spec import TaskCompletionStatus
    from nvflare.apis.signal import Signal

    from fedshift.deployment.flare import engine
    from fedshift.federation.remote.transport import Sign
    from fedshift.federation.remote.wire import Message

    message = Message("{}", b"reply", "")

    class Controller:
        def send(self, task: Any, context: Any, targets: list[str]) -> None:
            self.task = task

        def cancel_task(self, task: Any) -> None:
            pass

    controller = Controller()

    def reply_comes() -> None:
        if controller.task.completion_status is None:
            answered = SimpleNamespace(client=SimpleNamespace(name="north"), result=engine.shareable_of(message))
            controller.task.result_received_cb(answered, None)
            controller.task.completion_status = TaskCompletionStatus.OK

    monkeypatch.setattr(engine, "_LOOK_AGAIN", 0.01)
    kit = load_kit(kits.coordinator)
    transport = engine.FlareTransport(controller, None, Signal(), lambda: reply_comes(), kit)
    arrived = transport.exchange(iter([("north", message)]), 60.0, {})
    assert [one for one in arrived if not isinstance(one[1], Sign)] == [("north", message)]


def test_a_revoked_site_is_lost_at_once(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the deadline, which may be an hour."""
    from nvflare.apis.signal import Signal

    from fedshift.deployment.flare import engine
    from fedshift.federation.remote.transport import Lost, Sign
    from fedshift.federation.remote.wire import Message

    controller = SimpleNamespace(send=lambda *_, **__: None, cancel_task=lambda _: None)
    monkeypatch.setattr(engine, "_LOOK_AGAIN", 0.01)
    monkeypatch.setattr(engine, "revoked_sites", lambda kit: {"north"} if kit.folder == kits.coordinator else set())
    transport = engine.FlareTransport(controller, None, Signal(), lambda: None, load_kit(kits.coordinator))
    arrived = transport.exchange(iter([("north", Message("{}", b"", ""))]), 3600.0, {})
    ((site, lost),) = (one for one in arrived if not isinstance(one[1], Sign))
    assert (site, lost) == ("north", Lost("its kit was revoked"))


def test_what_flare_writes_of_a_message_is_plain_values() -> None:
    """One mapping, written by the decomposer of mappings; no other of FLARE's decomposers has a say."""
    from nvflare.fuel.utils import fobs
    from nvflare.private.fed.utils.fed_utils import fobs_initialize

    from fedshift.deployment.flare.engine import message_from, shareable_of
    from fedshift.federation.remote.wire import Message

    fobs_initialize()  # as each of its processes does
    message = Message('{"do": "hello"}', bytes(range(256)) * 9000, "0" * 64)
    written = fobs.dumps(shareable_of(message))
    kinds = re.findall(rb"__fobs_(?:type|dc)__..?(nvflare[\w.]*)", written)
    assert kinds == [b"nvflare.apis.shareable.Shareable", b"nvflare.fuel.utils.fobs.decomposer.DictDecomposer"]
    assert (written.count(b"__fobs_type__"), written.count(b"__fobs_dc__")) == (1, 1)
    assert message_from(fobs.loads(written)) == message


def test_names_of_deployments(kits: Provisioned) -> None:
    for name in ("../x", "", "a/b", ".x"):
        with pytest.raises(UserError, match="no name of a deployment"):
            Deployment(kits.coordinator, name)
    with pytest.raises(UserError, match="there is no deployment 'x'"):
        Deployment.named(kits.coordinator, "x")
