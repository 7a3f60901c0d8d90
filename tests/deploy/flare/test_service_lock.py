"""Whether a role's service runs, and that only one does: after kills, with numbers that mean nothing, at once."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fedshift.deploy.flare import roles
from fedshift.deploy.flare.kits import Kit, load_kit
from fedshift.deploy.flare.service import EVENTS, RAW, ServiceLog, holder, only_service
from fedshift.errors import FedshiftError, UserError
from fedshift.json_objects import write_object
from tried import case

MODULE = "fedshift.deploy.flare.service"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("kits")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = {"name": "locks", "contact": "team@example.org", "server": "localhost", "port": port, "sites": ["north"]}
    (folder / "project.yaml").write_text(yaml.safe_dump(options))
    made = roles.provision(roles.load_project(folder / "project.yaml"), folder, lambda new: None)
    return load_kit(made.sites["north"], "site")


@pytest.fixture(autouse=True)
def _clean(kit: Kit) -> None:
    for name in ("service.json", "service.lock"):
        (kit.folder / name).unlink(missing_ok=True)


def write_status(kit: Kit, pid: int, state: str = "connected") -> None:
    write_object(kit.folder / "service.json", {"pid": pid, "state": state, "message": "there"})


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_a_number_that_another_process_has_now_is_no_service(kit: Kit) -> None:
    """As after a kill: of a container's first process, or of one whose number was given away."""
    for pid in (1, os.getpid(), 2**22):
        write_status(kit, pid)
        assert (roles.status(kit).state, roles.status(kit).pid) == ("stopped", None)
        assert not roles.stop(kit)


@pytest.mark.slow
def test_only_one_service_has_the_lock_and_it_says_which(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.deploy.flare.service._SECONDS", 0.2)
    with only_service(kit):
        assert holder(kit) == os.getpid()
        assert roles.status(kit).state == "starting", "it has said nothing yet"
        write_status(kit, 1)  # by one before
        assert roles.status(kit).state == "starting"
        write_status(kit, os.getpid())
        assert roles.status(kit) == roles.Status("connected", "there", os.getpid())
        with pytest.raises(UserError, match="runs already"), only_service(kit):
            pass
        # What a service starts does not have its lock.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], close_fds=False)
    assert eventually(lambda: holder(kit) is None), "at once, but for a process that is just being started"
    child.kill()
    child.wait()


def test_a_process_that_is_no_service_of_ours_is_not_ended(kit: Kit) -> None:
    """The lock is held, and its number is a stranger's: this process stands for a container's."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    try:
        with only_service(kit), pytest.raises(FedshiftError, match="stop it where"):
            roles.stop(kit)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ended


@pytest.mark.slow
def test_of_two_services_at_once_one_goes_on_and_a_killed_one_is_followed(kit: Kit) -> None:
    def start_process() -> subprocess.Popen[str]:
        words = [sys.executable, "-m", MODULE, str(kit.folder)]
        return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    both = [start_process(), start_process()]
    assert eventually(lambda: any(process.poll() is not None for process in both))
    (over,), (alive,) = (
        [process for process in both if (process.poll() is not None) == gone] for gone in (True, False)
    )
    assert over.returncode == 2
    assert "runs already" in over.communicate()[1]
    assert eventually(lambda: roles.status(kit).state == "retrying")
    assert roles.status(kit).pid == alive.pid

    alive.kill()
    alive.communicate()
    write_status(kit, 1, "retrying")  # as if the machine had given its number to another
    assert roles.status(kit).pid is None
    after = start_process()
    assert eventually(lambda: roles.status(kit).pid == after.pid and roles.status(kit).state == "retrying")
    assert roles.stop(kit)
    assert after.wait(30) == 0
    after.communicate()
    assert roles.status(kit).state == "stopped"
    assert not Path(f"/proc/{after.pid}").exists()


STAMP = "2026-11-26 00:00:38,785"
FORM = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING|ERROR|CRITICAL) \S.*")


def events(folder: Path) -> list[str]:
    file = folder / EVENTS
    lines = file.read_text().splitlines() if file.exists() else []
    assert all(FORM.fullmatch(line) for line in lines)
    return [line[20:] for line in lines]


@pytest.mark.case("logs", "an event: one line with time and severity, whatever its text")
def test_each_event_is_one_line_with_its_severity(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path)
    assert not (tmp_path / EVENTS).exists(), "a service that ends at once writes nothing"
    log.event("connected: listening on port 8002")
    log.event("retrying:\ncannot\x1b[2J reach", logging.WARNING)
    assert events(tmp_path) == ["INFO connected: listening on port 8002", "WARNING retrying: cannot [2J reach"]


@pytest.mark.parametrize(
    ("line", "event"),
    [
        case(
            "logs",
            "what FLARE says of itself: not an event",
            f"{STAMP} - conn_manager - INFO - Connector [CH00002] is starting",
            None,
        ),
        case(
            "logs",
            "a warning of FLARE's: not an event",
            f"{STAMP} - ServerRunner - WARNING - no site has asked for a task",
            None,
        ),
        case(
            "logs",
            "an error of FLARE's",
            f"{STAMP} - conn_manager - ERROR - Error processing frame: ValueError",
            "WARNING FLARE says: Error processing frame",
        ),
        case(
            "logs",
            "our listener's refusal of a site",
            f"{STAMP} - listener - ERROR - 'north' is refused for 5 minutes: it sends and reads no answers",
            "ERROR 'north' is refused for 5 minutes",
        ),
        case(
            "logs",
            "a refusal of the lock-down",
            f"{STAMP} - fedshift.lockdown - WARNING - refused what server asked for",
            "WARNING refused what server asked for",
        ),
        case(
            "logs",
            "a traceback of a process",
            "Traceback (most recent call last):",
            "ERROR a process of FLARE's failed",
        ),
        case(
            "logs",
            "a process that says why it does not start",
            "error: this version of FLARE cannot be locked down",
            "ERROR this version of FLARE cannot be locked down",
        ),
        case(
            "logs",
            "what a site's program refuses, with column and count",
            "warning: site 'north' refuses to send statistics of so few samples of column 'age': 3 rows have a value",
            "WARNING site 'north' refuses",
        ),
        case("logs", "a line that is not FLARE's", "ERROR", None),
    ],
)
def test_what_is_an_event_of_what_flare_prints(line: str, event: str | None, tmp_path: Path) -> None:
    ServiceLog(tmp_path).output(f"{line}\n")
    assert (tmp_path / RAW).read_text() == f"{line}\n"
    if event is None:
        assert events(tmp_path) == []
    else:
        (single_event,) = events(tmp_path)
        assert single_event.startswith(event)


@pytest.mark.case("logs", "an error of FLARE's a thousand times: one event")
def test_what_is_repeated_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedshift.deploy.flare.service.time.monotonic", lambda: now)
    log = ServiceLog(tmp_path)
    for number in range(1000):
        log.output(f"{STAMP} - conn_manager - ERROR - stream {number} failed")
    log.output(f"{STAMP} - conn_manager - ERROR - another fault")
    assert (len(events(tmp_path)), len((tmp_path / RAW).read_text().splitlines())) == (2, 1001)
    now += 61
    log.output(f"{STAMP} - conn_manager - ERROR - stream 7 failed")
    assert len(events(tmp_path)) == 3
