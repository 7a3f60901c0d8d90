"""The jobs of a deployment: when one begins, when one is given up, who is lost meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.shareable import Shareable
from test_kits import provision_project

from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.engine import KIT, SITE, TASK, FlareSite, message_from, shareable_of
from fedshift.deploy.flare.jobs import Attendance, Deployments, RunningDeployment
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.flare.provision import Provisioned
from fedshift.deploy.flare.service import Service
from fedshift.deploy.remote.requests import request_key
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal
from fedshift.files import write_bytes
from fedshift.json_objects import write_object


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision_project(tmp_path_factory.mktemp("kits"))


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
    monkeypatch.setattr("fedshift.deploy.flare.jobs.time.monotonic", lambda: now)
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
    service.child = SimpleNamespace(pid=1, stdout=["INFO - Client: New client north@10.0.0.7 joined. Sent token: 1\n"])
    monkeypatch.setattr("fedshift.deploy.flare.jobs.time.monotonic", lambda: 7.0)
    service._read_output(service.child)
    assert service._attendance.joined == {"north": 7.0}


@pytest.mark.case("floods", "a site that is refused for some minutes is named in status and progress")
def test_who_is_refused_for_some_minutes_is_named(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.deploy.flare.jobs.time.time", lambda: now)
    now, attendance = 1000.0, Attendance()
    attendance.read_line("listener - ERROR - 'north' is refused for 99999999999 minutes: it is no line of ours")
    assert attendance.refused_now() == ""
    attendance.read_line("listener - ERROR - 'north' is refused for 5 minutes: it sends and reads no answers")
    assert "'north'" in attendance.refused_now()
    deployment = Deployment(kits.coordinator, "refused")
    deployment.want("run")
    running = RunningDeployment(attendance, deployment)
    for _ in range(2):
        running._tell_who_is_refused()
    (event,) = deployment.events()
    assert (event["what"], event["site"]) == ("warning", "north")
    now += 301
    assert attendance.refused_now() == ""


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


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 2])
def test_jobs_that_die_again_are_given_up(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1000.0, 2.0)
    monkeypatch.setattr("fedshift.deploy.flare.jobs.time.monotonic", lambda: next(ticks))
    made = provision_project(tmp_path)
    deployment = Deployment(made.coordinator, "study")
    deployment.want("run")
    write_object(deployment.folder / "experiment.json", {"engine": {"tries": 3}})
    server = Server(deployment, rounds)
    job = RunningDeployment(Attendance(), deployment)
    looks = 0
    while not job.look(server):
        looks += 1
        assert looks < 50
    assert (server.jobs, deployment.state["state"]) == (3 + rounds, "failed")
    assert re.search(r"3 jobs .*fedshift deploy resume", deployment.state["message"])


def test_a_clock_that_goes_back_begins_nothing_anew(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(kits.coordinator, "clock")
    deployment.want("run")
    assert not deployment.ended
    monkeypatch.setattr("fedshift.deploy.flare.deployment_folder.time.time", lambda: 0.0)
    write_object(deployment.folder / "experiment.json", {})
    job = RunningDeployment(Attendance(), deployment)
    assert not job.look(Server(deployment, 0))
    deployment.end("job-1", "finished")
    assert job.look(Server(deployment, 0))
    assert deployment.ended
    deployment.want("run")
    assert not deployment.ended


@pytest.mark.case("revoked sites", "a deployment of all sites, with and without a quorum, where one is revoked")
@pytest.mark.case("revoked sites", "a site that protocol.drop names is not connected")
@pytest.mark.case("revoked sites", "a run under way whose site is revoked, without a quorum")
@pytest.mark.parametrize("quorum", [1, None])
@pytest.mark.parametrize(
    ("revoked", "drop", "began", "waits"),
    [
        ("", [], [], "north"),
        ("north", [], [], ""),
        ("", ["north"], [], ""),
        ("north", ["north"], [], ""),
        ("up", [], [], "north"),
        ("north", [], ["north", "south"], ""),
        ("north", [], ["south"], ""),
        ("", [], ["south"], ""),
    ],
)
def test_whom_a_deployment_waits_for(
    quorum: int | None, revoked: str, drop: list[str], began: list[str], waits: str, kits: Provisioned, tmp_path: Path
) -> None:
    """Only south is connected; ``began``: whom the experiment began with."""
    shutil.copy(kits.coordinator / "kit.json", tmp_path / "kit.json")
    deployment = Deployment(tmp_path, "study")
    deployment.want("run")
    write_object(deployment.folder / "experiment.json", {"engine": {"quorum": quorum}, "protocol": {"drop": drop}})
    if began:
        write_object(deployment.folder / "cards.json", {site: {} for site in began})
    server = Server(deployment, 1)
    server.get_system_info = lambda: SimpleNamespace(client_info=[SimpleNamespace(name="south")])
    ended = RunningDeployment(Attendance(), deployment, lambda: frozenset({revoked})).look(server)
    ends = quorum is None and "north" in began and revoked == "north"
    assert (ended, server.jobs) == (ends, int(not waits and not ends))
    if waits:
        assert waits in deployment.state["message"]
    if ends:
        assert "'north'" in deployment.state["message"]
        assert (deployment.state["state"], deployment.state["exit_code"]) == ("failed", 2)


@pytest.mark.case("few rows", "a site's table lacks a column: the site's log names it and the nearest one")
def test_what_a_site_cannot_read_is_said_at_both_ends(
    kits: Provisioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("agee,ill\n" + "".join(f"{40 + row},{row % 2}\n" for row in range(30)))
    data = {"name": "table", "sites": {"north": "t.csv"}, "label": "ill", "numeric": ["age"]}
    (tmp_path / "SITE.yaml").write_text(json.dumps({"site": "north", "data": data}))
    monkeypatch.setenv(SITE, str(tmp_path / "SITE.yaml"))
    monkeypatch.setenv(KIT, str(kits.sites["north"]))
    body = body_of({})
    asked = seal({"do": "hello", "key": request_key({"do": "hello"}, body.sha256)}, body)
    context: Any = SimpleNamespace(get_peer_context=lambda: None, get_job_id=lambda: "job")
    told = message_from(FlareSite().execute(TASK, shareable_of(asked), context, None))
    message = json.loads(told.header)["message"]
    assert "lacks the column 'age'" in message
    assert "agee" not in message
    assert capsys.readouterr().out.startswith("warning: ")


@pytest.mark.case("revoked sites", "every site of a project is revoked")
def test_a_deployment_without_any_site_ends(kits: Provisioned, tmp_path: Path) -> None:
    shutil.copy(kits.coordinator / "kit.json", tmp_path / "kit.json")
    deployment = Deployment(tmp_path, "study")
    deployment.want("run")
    write_object(deployment.folder / "experiment.json", {})
    assert RunningDeployment(Attendance(), deployment, lambda: frozenset({"north", "south"})).look(None)
    assert "accept" in deployment.state["message"]


def test_a_reply_that_comes_while_the_coordinator_looks_who_is_lost_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE ends a task with OK once its reply has come; that is no reason to count the site as lost."""
    from nvflare.apis.controller_spec import TaskCompletionStatus
    from nvflare.apis.signal import Signal

    from fedshift.deploy.flare import engine
    from fedshift.deploy.remote.transport import Sign
    from fedshift.deploy.remote.wire import Message

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
    transport = engine.FlareTransport(controller, None, Signal(), lambda: reply_comes(), 1024)
    arrived = transport.exchange(iter([("north", message)]), 60.0, {})
    assert [arrival for arrival in arrived if not isinstance(arrival[1], Sign)] == [("north", message)]


@pytest.mark.parametrize(
    ("deadline", "patience", "revoked", "reason"),
    [
        (3600.0, {}, {"north"}, "its kit was revoked"),
        (0.02, {}, {"south"}, "no reply within 0.02 s"),
        (3600.0, {"north": 0.02}, set(), "it was lost before, and did not fetch its request within 0.02 s"),
    ],
    ids=["revoked", "deadline", "patience"],
)
def test_a_site_that_does_not_answer_is_lost(
    deadline: float, patience: dict[str, float], revoked: set[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked, at once; otherwise after the deadline, which may be an hour, or if it was lost before, its patience."""
    from nvflare.apis.signal import Signal

    from fedshift.deploy.flare import engine
    from fedshift.deploy.remote.transport import Lost, Sign
    from fedshift.deploy.remote.wire import Message

    controller = SimpleNamespace(send=lambda *_, **__: None, cancel_task=lambda _: None)
    monkeypatch.setattr(engine, "_LOOK_AGAIN", 0.01)
    looks = itertools.count()

    def endless() -> str | None:
        return "it is waited for without end" if next(looks) > 500 else None

    transport = engine.FlareTransport(controller, None, Signal(), endless, 1024, lambda: revoked)
    arrived = transport.exchange(iter([("north", Message("{}", b"", ""))]), deadline, patience)
    assert [arrival for arrival in arrived if not isinstance(arrival[1], Sign)] == [("north", Lost(reason))]


def test_what_flare_writes_of_a_message_is_plain_values() -> None:
    """One mapping, written by the decomposer of mappings; no other of FLARE's decomposers has a say."""
    from nvflare.fuel.utils import fobs
    from nvflare.private.fed.utils.fed_utils import fobs_initialize

    from fedshift.deploy.flare.engine import message_from, shareable_of
    from fedshift.deploy.remote.wire import Message

    fobs_initialize()  # as each of its processes does
    message = Message('{"do": "hello"}', bytes(range(256)) * 9000, "0" * 64)
    written = fobs.dumps(shareable_of(message))
    kinds = re.findall(rb"__fobs_(?:type|dc)__..?(nvflare[\w.]*)", written)
    assert kinds == [b"nvflare.apis.shareable.Shareable", b"nvflare.fuel.utils.fobs.decomposer.DictDecomposer"]
    assert (written.count(b"__fobs_type__"), written.count(b"__fobs_dc__")) == (1, 1)
    assert message_from(fobs.loads(written)) == message


@pytest.mark.parametrize("part", ["header", "body", "digest"])
def test_a_message_without_one_of_its_parts_is_none(part: str) -> None:
    written = shareable_of(Message("{}", b"body", "0" * 64))
    assert message_from(written) == Message("{}", b"body", "0" * 64)
    for other in (None, 7):
        assert message_from(Shareable({**written, part: other})) == Lost("what it sent is no message")


def test_a_deployment_that_ended_does_not_begin_again(kits: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ended = {"want": "run"}, SimpleNamespace(wanted={"want": "run"}, ended=True)
    stopped, waiting = (SimpleNamespace(wanted=wanted, ended=False) for wanted in ({"want": "abort"}, run))
    jobs = object.__new__(Deployments)
    jobs._kit, jobs._attendance = load_kit(kits.coordinator), Attendance()
    begun: list[Any] = []
    monkeypatch.setattr("fedshift.deploy.flare.jobs.RunningDeployment", lambda _, new, revoked: begun.append(new))
    for folder in ([ended, stopped], [ended, stopped, waiting]):
        monkeypatch.setattr(Deployment, "all", lambda _, folder=folder: folder)
        jobs._next()
    assert begun == [waiting]


def test_a_deployment_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "old")
    deployment.folder.mkdir(parents=True)
    (deployment.folder / "experiment.json").write_text(json.dumps({"engine": {"quorum": 3}}))
    assert (deployment._section("engine"), deployment._section("notes")) == ({"quorum": 3}, {})


class EndlessServer:
    """Stands for FLARE's, to which every job runs for ever."""

    def __init__(self) -> None:
        self.jobs = 0

    def get_system_info(self) -> Any:
        return SimpleNamespace(client_info=[SimpleNamespace(name="north")])

    def submit_job(self, folder: str) -> str:
        self.jobs += 1
        return f"job-{self.jobs}"

    def get_job_meta(self, job: str) -> dict[str, str]:
        return {"status": "RUNNING"}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    deployment = Deployment(tmp_path, "study")
    deployment.want("run")
    write_bytes(tmp_path / "kit.json", json.dumps({"project": {"sites": ["north"]}}).encode())
    write_object(deployment.folder / "experiment.json", {"engine": {}})
    return deployment


def look(job: RunningDeployment, server: EndlessServer) -> int:
    """Look once, and once more for a next job; how many jobs there were."""
    job.look(server)
    job._next_status = 0.0
    job.look(server)
    return server.jobs


def died(deployment: Deployment) -> list[str]:
    return [event["status"] for event in deployment.events() if event.get("is") == "died"]


@pytest.mark.slow
def test_a_killed_job_is_seen_by_the_service_itself(deployment: Deployment) -> None:
    server, job = EndlessServer(), RunningDeployment(Attendance(), deployment)
    assert look(job, server) == 1
    running = [sys.executable, "-S", "-c", "print(flush=True); input()", "-n", "job-1"]
    with subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        noted = {"pid": process.pid, "job": "job-1"}
        write_object(deployment.folder / "process.json", noted)
        assert look(job, server) == 1
        process.kill()
    assert (look(job, server), died(deployment)) == (2, ["KILLED"])
    deployment.end("job-1", "aborted")  # what a job that was left still writes ends no other
    assert look(job, server) == 2


def test_an_aborted_job_says_so_itself(deployment: Deployment) -> None:
    server, job = EndlessServer(), RunningDeployment(Attendance(), deployment)
    look(job, server)
    deployment.end("job-1", "aborted")
    assert (look(job, server), died(deployment)) == (2, ["ABORTED"])


def test_a_job_ends_as_soon_as_a_sites_process_of_it_has_ended(deployment: Deployment) -> None:
    line = "FederatedServer - INFO - Failing job {} due to reported failure from north: ?"
    server, attendance = EndlessServer(), Attendance()
    job = RunningDeployment(attendance, deployment)
    look(job, server)
    attendance.read_line(line.format("job-0"))
    look(job, server)
    assert deployment.new_job_requested() is None, "that was another job"
    attendance.read_line(line.format("job-1"))
    look(job, server)
    assert deployment.new_job_requested() == "the process of a site has ended"
    deployment.end("job-1", "again")  # as the job does within a quarter of a second
    assert (look(job, server), died(deployment)) == (2, ["SITE_FAILED"])
