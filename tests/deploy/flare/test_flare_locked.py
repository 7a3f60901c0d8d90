"""What a coordinator can ask of a site's FLARE processes: what a job needs, whatever its messages say of themselves.

What FLARE would refuse by itself proves nothing, so the same is sent to FLARE as it is first.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.app_common.job_launcher import process_launcher
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.f3 import drivers
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.drivers.driver_manager import DriverManager
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.lighter.utils import sign_folders
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, new_cell_message
from nvflare.private.fed.client import fed_client_base
from nvflare.private.fed.client.admin import FedAdminAgent, RequestProcessor
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.security.security import EmptyAuthorizer, FLAuthorizer

from fedshift.deploy.flare import kit_checks, lockdown
from fedshift.deploy.flare.dialling import DiallingTcpDriver
from fedshift.deploy.flare.drivers import shared_connection
from fedshift.deploy.flare.drivers.shared_connection import SharedConnection
from fedshift.deploy.flare.jobs import job_folder
from fedshift.deploy.flare.kit_checks import check_launcher
from fedshift.deploy.flare.kits import LAUNCHER_CLASS, SITE_CLASS
from fedshift.deploy.flare.launcher import LockedJobLauncher
from fedshift.deploy.flare.limits import LARGEST_FRAME
from fedshift.deploy.flare.lockdown import CLIENT, JOB, MODULE, TOPICS, Unlockable, lock_down
from fedshift.deploy.flare.provision import _RIGHTS
from fedshift.deploy.flare.service import Service
from fedshift.errors import UserError

JOB_ID = str(uuid.UUID(int=7))


class Cell:
    """FLARE's end of the network at site ``north``."""

    def register_request_cb(self, channel: str, topic: str, cb: Any) -> None:
        """Nothing arrives by itself."""

    def get_fqcn(self) -> str:
        return "north"


class Engine:
    """What FLARE's agent needs of its client."""

    @contextlib.contextmanager
    def new_context(self) -> Iterator[FLContext]:
        yield FLContext()

    def fire_event(self, *_: Any) -> None:
        """Nobody listens."""


class Deploying(RequestProcessor):
    """In place of FLARE's: remembers what reached it."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def get_topics(self) -> list[str]:
        return ["train.deploy"]

    def process(self, req: Any, app_ctx: Any) -> None:
        self.got.append(req)


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(AuditService, "the_auditor", None)
    AuditService.initialize(str(tmp_path / "audit.txt"))
    rights = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("fedshift", rights))


def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock_down(monkeypatch.setattr)


def agent_with(*processors: Any) -> Any:
    agent = FedAdminAgent("admin_agent", Cell(), Engine())
    for processor in processors or ClientRequestProcessors.request_processors:
        agent.register_processor(processor)
    return agent


def ask_agent(agent: Any, topic: str, body: Any, origin: str = "server", **headers: Any) -> str:
    message = Message(topic=topic, body=body)
    message.set_headers(headers)
    request = new_cell_message({MessageHeaderKey.ORIGIN: origin}, message)
    return str(agent._dispatch_request(request).payload.body)


def deploying(body: bytes, **changes: Any) -> dict[str, Any]:
    """A message that has a job deployed, as FLARE's server sends it."""
    meta = {"job_id": JOB_ID, "name": "x", "submitter_role": "project_admin", **changes.pop("meta", {})}
    headers = {
        RequestHeader.ADMIN_COMMAND: "submit_job",
        RequestHeader.REQUIRE_AUTHZ: "true",
        RequestHeader.JOB_ID: JOB_ID,
        RequestHeader.JOB_META: meta,
        ConnProps.USER_NAME: "team@example.org",
        ConnProps.USER_ORG: "fedshift",
        ConnProps.USER_ROLE: "project_admin",
        **changes,
    }
    return {"topic": "train.deploy", "body": body, **headers}


def pack(folder: Path, *more: str) -> bytes:
    """The app of a job of ours, signed as FLARE signs it, with more files than it should have."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    app = job_folder("x", 1, folder / "job") / "app"
    for name in more:
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text("print('here')\n")
    certificate = folder / "somebody.crt"
    certificate.write_text("a certificate")
    sign_folders(str(app), rsa.generate_private_key(public_exponent=65537, key_size=2048), str(certificate))
    return bytes(zip_directory_to_bytes(str(app), ""))


@pytest.mark.threat("flare_rights")
def test_a_raw_shell_message_reads_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says neither who asks nor that a right is needed: FLARE runs it."""
    (tmp_path / "patients.csv").write_text("Jane Doe")
    body = f"cat {tmp_path / 'patients.csv'}"
    assert "Jane Doe" in ask_agent(agent_with(), "sys.shell", body)
    stock = list(ClientRequestProcessors.request_processors)
    lock(monkeypatch)
    assert "'sys.shell' is not needed for a job" in ask_agent(agent_with(), "sys.shell", body)
    # Nor where something else registers FLARE's processors, as a component of the site's could.
    assert "'sys.shell' is not needed for a job" in ask_agent(agent_with(*stock), "sys.shell", body)


def test_what_a_job_needs_remains_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {topic for processor in ClientRequestProcessors.request_processors for topic in processor.get_topics()}
    commands = {command.get_command_name() for command in AdminCommands.commands}
    lock(monkeypatch)
    after = {topic for processor in ClientRequestProcessors.request_processors for topic in processor.get_topics()}
    assert after == set(TOPICS)
    assert before - after >= {"sys.shell", "sys.info", "sys.configure_site_log", "train.shutdown", "info.reset_errors"}
    assert [command.get_command_name() for command in AdminCommands.commands] == ["abort"] != sorted(commands)
    assert AdminCommands.get_command("configure_job_log") is None
    registered: list[Any] = []
    fed_client_base.NetAgent(SimpleNamespace(register_request_cb=registered.append)).close()
    assert not registered


def test_the_ordinary_messages_of_a_job_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock(monkeypatch)
    refusal_of = lockdown._refusal
    for topic, command in TOPICS.items():
        if topic not in ("train.deploy", "train.notify_job_status"):
            assert refusal_of(topic, {}, None, "server", "north", command=command, job=JOB_ID) == ""
    assert refusal_of("train.notify_job_status", "", None, f"north.{JOB_ID}", "north", command=None, job=JOB_ID) == ""
    processor = Deploying()
    assert (ask_agent(agent_with(processor), **deploying(pack(tmp_path))), len(processor.got)) == ("ok", 1)


@pytest.mark.parametrize(
    ("topic", "origin", "headers", "reason"),
    [
        ("train.start_job", "server", {"job_id": "x --set y"}, "no job's id"),
        ("train.start_job", "server", {"job_id": "../../startup"}, "no job's id"),
        ("train.abort", "south", {"job_id": JOB_ID}, "only the coordinator"),
        ("train.abort", "server", {"job_id": JOB_ID, "admin_command": "abort_job"}, "does not belong"),
        ("train.notify_job_status", "server", {"job_id": JOB_ID}, "only a job of this site"),
        ("train.notify_job_status", f"south.{JOB_ID}", {"job_id": JOB_ID}, "only a job of this site"),
        ("scheduler.check_resource", "server", {"job_id": JOB_ID}, "does not belong"),
    ],
)
def test_what_is_not_as_flares_server_sends_it_is_refused(
    topic: str, origin: str, headers: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(monkeypatch)
    assert reason in ask_agent(agent_with(), topic, {}, origin, **headers)


def test_a_right_is_asked_for_whatever_the_headers_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet = {RequestHeader.REQUIRE_AUTHZ: "false", ConnProps.USER_ROLE: "guest"}
    body, processor = pack(tmp_path), Deploying()
    assert ask_agent(agent_with(processor), **deploying(body, **quiet)) == "ok"
    lock(monkeypatch)
    assert "not authorized" in ask_agent(agent_with(processor), **deploying(body, **quiet))
    nobody = {RequestHeader.ADMIN_COMMAND: None}
    assert "does not belong" in ask_agent(agent_with(processor), **deploying(body, **nobody))
    assert len(processor.got) == 1


@pytest.mark.threat("flare_rights")
def test_role_super_has_no_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body, processor = pack(tmp_path), Deploying()
    strong = Person("root", "fedshift", "super")
    asking = AuthzContext(right="submit_job", user=strong, submitter=strong)
    for_its_own = AuthzContext(right="submit_job", user=Person("a", "fedshift", "project_admin"))
    assert AuthorizationService.authorize(asking) == (True, "")
    assert ask_agent(agent_with(processor), **deploying(body, **{ConnProps.USER_ROLE: "super"})) == "ok"
    lock(monkeypatch)
    assert AuthorizationService.authorize(asking) == (False, "role 'super' has no rights here")
    assert AuthorizationService.authorize(for_its_own) == (True, "")
    assert "'super'" in ask_agent(agent_with(processor), **deploying(body, **{ConnProps.USER_ROLE: "super"}))
    assert "'super'" in ask_agent(agent_with(processor), **deploying(body, meta={"submitter_role": "Super"}))
    assert len(processor.got) == 1


@pytest.mark.parametrize("authorizer", [None, EmptyAuthorizer()])
def test_without_rules_there_are_no_rights(authorizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuthorizationService, "the_authorizer", authorizer)
    asking = AuthzContext(right="submit_job", user=Person("a", "fedshift", "project_admin"))
    assert AuthorizationService.authorize(asking)[0]
    lock(monkeypatch)
    assert not AuthorizationService.authorize(asking)[0]


@pytest.mark.threat("flare_rights")
@pytest.mark.parametrize(
    ("more", "meta", "reason"),
    [
        (["custom/mine.py"], {}, "holds 'custom'"),
        (["config/log_config.json"], {}, "log_config.json"),
        (["sitecustomize.py"], {}, "sitecustomize.py"),
        ([], {"byoc": True}, "code of its own"),
        ([], {"launcher_spec": {"default": {"docker": {"image": "x"}}}}, "another way"),
        ([], {"job_id": "another"}, "another job"),
    ],
)
def test_code_is_not_deployed(
    more: list[str], meta: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body, processor = pack(tmp_path, *more), Deploying()
    assert ask_agent(agent_with(processor), **deploying(body, meta=meta)) == "ok"
    lock(monkeypatch)
    assert reason in ask_agent(agent_with(processor), **deploying(body, meta=meta))
    assert len(processor.got) == 1


@pytest.mark.parametrize("body", [b"", b"PK", None, "text"])
def test_what_is_no_folder_is_not_deployed(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(monkeypatch)
    assert "no zip file" in ask_agent(agent_with(), **deploying(body))


def test_code_of_a_job_has_no_way_past_the_class_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind the first door: an app that was marked all the same."""
    (tmp_path / "resources.json").write_text(
        f'{{"class_allow_list": ["{SITE_CLASS}"], "class_list_enforcement_mode": "enforce"}}'
    )
    context = FLContext()
    context.set_prop(FLContextKey.JOB_META, {"byoc": True}, private=True, sticky=False)
    workspace = SimpleNamespace(get_resources_file_path=lambda: str(tmp_path / "resources.json"))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    build = {"path": "subprocess.Popen", "args": {"args": ["id"]}}
    ComponentPathAuthorizer().authorize_component_config(build, fl_ctx=context)
    assert AppAuthzService.authorize_app_info({"byoc": True}, "root", "fedshift", "super", {}) == (True, "")
    lock(monkeypatch)
    with pytest.raises(Exception, match=r"subprocess\.Popen.*not in allow_list"):
        ComponentPathAuthorizer().authorize_component_config(build, fl_ctx=context)
    ComponentPathAuthorizer().authorize_component_config({"path": SITE_CLASS}, fl_ctx=context)
    assert not AppAuthzService.authorize_app_info({"byoc": True}, "root", "fedshift", "super", {})[0]
    assert AppAuthzService.authorize_app_info({}, "a", "fedshift", "project_admin", {}) == (True, "")


def test_a_jobs_process_is_locked_down_too(tmp_path: Path) -> None:
    context = FLContext()
    arguments = {JobProcessArgs.EXE_MODULE: ("-m", JOB), JobProcessArgs.JOB_ID: ("-n", JOB_ID)}
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True, sticky=False)
    line = f"{sys.executable} -m {JOB} -n {JOB_ID}"
    assert ClientProcessJobLauncher().get_command({}, context) == line
    assert LockedJobLauncher().get_command({}, context) == line.replace(JOB, f"{MODULE} {JOB}")
    arguments[JobProcessArgs.EXE_MODULE] = ("-m", "nvflare.another")
    with pytest.raises(RuntimeError, match="not known"):
        LockedJobLauncher().get_command({}, context)


def test_a_job_with_code_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind the first door; and no folder of a job's is on the path of its process."""
    started: list[Any] = []
    monkeypatch.setattr(process_launcher, "spawn_process", lambda words, environment: started.append(words))
    monkeypatch.setattr(process_launcher, "ProcessHandle", lambda process_adapter: "started")
    context = FLContext()
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, {JobProcessArgs.EXE_MODULE: ("-m", f"{JOB} x")}, private=True)
    workspace = SimpleNamespace(get_app_custom_dir=lambda job: str(tmp_path / job))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    assert LockedJobLauncher().launch_job({"job_id": JOB_ID}, context) == "started"
    (tmp_path / JOB_ID).mkdir()
    with pytest.raises(RuntimeError, match="code of its own"):
        LockedJobLauncher().launch_job({"job_id": JOB_ID}, context)
    assert len(started) == 1


def test_a_site_whose_settings_name_another_launcher_is_not_started(tmp_path: Path) -> None:
    kit: Any = SimpleNamespace(flare=tmp_path)
    (tmp_path / "local").mkdir()
    stock = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
    for paths, locked in (([LAUNCHER_CLASS], True), ([stock], False), ([LAUNCHER_CLASS, stock], False), ([], False)):
        settings = {"components": [{"id": "process_launcher", "path": path} for path in paths]}
        (tmp_path / "local" / "resources.json").write_text(json.dumps(settings))
        with contextlib.nullcontext() if locked else pytest.raises(UserError, match="not locked down"):
            check_launcher(kit)


def test_a_frame_that_is_too_large_is_refused_before_memory_is_reserved() -> None:
    """At a site, where the coordinator sends it: FLARE alone would wait for all of it."""
    from nvflare.fuel.f3.comm_error import CommError
    from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
    from nvflare.fuel.f3.drivers.socket_conn import SocketConnection

    header = shared_connection.frame(0, size=LARGEST_FRAME + 1)
    connector = ConnectorInfo("CH1", None, {}, Mode.ACTIVE, 0, 0, False, threading.Event())

    def read(kind: Any) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(header)
            there.shutdown(socket.SHUT_WR)
            kind(here, connector).read_frame()

    with pytest.raises(CommError, match="closed by peer"):
        read(SocketConnection)
    with pytest.raises(CommError, match="at most"):
        read(SharedConnection)


def test_a_connection_is_freed_by_the_thread_that_reads_from_it() -> None:
    """FLARE's is closed by a thread whose send takes too long. The reader then takes bytes of what is opened next."""
    from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
    from nvflare.fuel.f3.drivers.socket_conn import SocketConnection

    connector = ConnectorInfo("CH1", None, {}, Mode.ACTIVE, 0, 0, False, threading.Event())
    frame = shared_connection.frame(0, bytes(4))

    def descriptor_after_close(kind: Any) -> int:
        """While the reader works on a frame; then the reader ends."""
        here, there = socket.socketpair()
        busy, go_on = threading.Event(), threading.Event()

        def hold(_: Any) -> None:
            busy.set()
            go_on.wait(10)

        with there:
            there.sendall(frame)
            connection = kind(here, connector)
            connection.register_frame_receiver(SimpleNamespace(process_frame=hold))
            reader = threading.Thread(target=connection.read_loop)
            reader.start()
            assert busy.wait(10)
            connection.close()
            descriptor = int(here.fileno())
            assert there.recv(1) == b"", "the other side is told at once"
            go_on.set()
            reader.join(10)
            assert here.fileno() == -1
        return descriptor

    assert descriptor_after_close(SocketConnection) == -1
    assert descriptor_after_close(SharedConnection) != -1


@pytest.mark.parametrize(("size", "why"), [(1000, ""), (2 << 20, "the job's folder is larger than 1 MB")])
def test_a_job_s_folder_is_as_large_as_it_unpacks(size: int, why: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config/config_fed_client.json", b" " * size)
    assert len(packed.getvalue()) < 10_000
    assert lockdown._app_refusal(packed.getvalue(), {"job_id": "j"}, "j") == why


@pytest.mark.threat("other_flare")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (FedAdminAgent, "_dispatch_request"),
        (ClientRequestProcessors, "request_processors"),
        (AuthorizationService, "authorize"),
        (ComponentPathAuthorizer, "_job_has_byoc"),
        (fed_client_base, "NetAgent"),
    ],
)
def test_a_flare_with_other_insides_is_not_started(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(owner, name)
    replaced: list[Any] = []
    with pytest.raises(Unlockable, match="cannot be locked down"):
        lock_down(lambda *change: replaced.append(change))
    assert not replaced
    check_end(monkeypatch, capsys, JOB, "cannot be locked down")


@pytest.mark.threat("other_flare")
def test_another_flare_is_not_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("nvflare.__version__", "2.10.0")
    check_end(monkeypatch, capsys, JOB, "cannot be locked down")


def test_a_site_dials_with_our_driver_whatever_flare_registers_afterwards() -> None:
    manager = DriverManager()
    lockdown.dial_with_ours(manager)
    manager.search_folder(str(Path(drivers.__file__).parent), drivers.__package__)
    assert {manager.find_driver_class(f"{scheme}://x:1") for scheme in ("tcp", "stcp")} == {DiallingTcpDriver}
    assert manager.find_driver_class("grpc://x:1") is not None
    late = DriverManager()
    late.register(TcpDriver)
    with pytest.raises(Unlockable, match="another driver"):
        lockdown.dial_with_ours(late)


def test_only_two_processes_are_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check_end(monkeypatch, capsys, "http.server", "none of FLARE's processes")


@pytest.mark.slow
def test_a_service_does_not_start_the_unlockable_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kit = SimpleNamespace(role="site", name="north", folder=tmp_path, flare=tmp_path / "flare")
    service = Service(kit, tick=0.01)
    monkeypatch.setattr(kit_checks, "check_certificates", lambda _: None)
    monkeypatch.setattr(kit_checks, "check_launcher", lambda _: None)
    monkeypatch.setattr(kit_checks, "check_reachable", lambda *_: "")
    started: list[list[str]] = []

    def start(self: Service) -> None:
        started.append([])
        self.child = subprocess.Popen([sys.executable, "-m", MODULE], stderr=subprocess.DEVNULL, text=True)

    monkeypatch.setattr(Service, "_start_child", start)
    with pytest.raises(UserError, match="cannot be locked down"):
        service.run()
    assert len(started) == 1


def test_a_site_starts_flare_behind_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kit = SimpleNamespace(role="site", name="north", folder=tmp_path, flare=tmp_path / "flare")
    commands: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(pid=1, stdout=[])

    monkeypatch.setattr(subprocess, "Popen", popen)
    Service(kit)._start_child()
    assert commands[0][1:5] == ["-u", "-m", MODULE, CLIENT]
    # By these two a service finds what an earlier one left behind.
    assert str(kit.flare) in commands[0]
    assert CLIENT.startswith("nvflare.private")
    assert JOB.startswith("nvflare.private")


def check_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, message: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lockdown", module])
    monkeypatch.setattr(lockdown.runpy, "run_module", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as raised:
        lockdown.main()
    assert raised.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


@pytest.fixture
def list_flare() -> Any:
    return pytest.importorskip("list_flare", reason="docs/ is not beside these tests")


def test_the_list_is_that_of_the_code(list_flare: Any) -> None:
    page = list_flare.PAGE.read_text(encoding="utf-8")
    assert page == list_flare.written(page), "run: python docs/list_flare.py"


def test_nothing_else_of_flare_is_replaced_or_private(list_flare: Any) -> None:
    """Every name here breaks with a release of FLARE that nobody announces: look for a public one first."""
    touches = list_flare.touches()
    assert sum(touch.kind == "replaced" for touch in touches) <= 6
    assert sum(touch.kind == "private" for touch in touches) <= 16
    assert {touch.file for touch in touches if touch.kind in ("private", "replaced")} == {
        "flare/drivers/guarded_tcp.py",
        "flare/drivers/shared_connection.py",
        "flare/lockdown.py",
    }


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("from nvflare.recipe import SimEnv", "public"),
        ("from nvflare.apis.impl.controller import _private", "private"),
        ("from nvflare.fuel.f3.drivers.base_driver import BaseDriver", "drivers"),
        ("from nvflare.fuel.sec.authz import Person", "private"),
        ("program = 'nvflare.private.fed.app.server.server_train'", "command"),
        ("_module('private.defs')", "private"),
        ("def _changes():\n    return [(owner, 'name', 1)]", "replaced"),
    ],
)
def test_every_way_to_touch_flare_is_seen(line: str, kind: str, list_flare: Any, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(line)
    (touch,) = list_flare.touches(tmp_path)
    assert (touch.kind, touch.file) == (kind, "code.py")
