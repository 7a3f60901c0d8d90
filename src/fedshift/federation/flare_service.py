"""The service of a role: keeps FLARE's process running, at the coordinator also every deployment.

``python -m fedshift.federation.flare_service KIT [SITE.yaml]`` runs until it is told to stop (SIGTERM, Ctrl-C). What it
knows stands in ``service.json`` of the kit. A deployment whose job died goes on in a new one, from its last checkpoint,
a bounded number of times.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, UserError
from fedshift.federation import flare_kits
from fedshift.federation.deployment import ENDS, Deployment
from fedshift.federation.flare_kits import Kit
from fedshift.files import write_bytes

_BACKOFF = (1.0, 60.0)
_REGISTERED = "Successfully registered client"
_JOINED = re.compile(r"Client: New client ([\w.-]+)@")
"""What FLARE's server writes when a site registers; its interface says only that a site is there, not since when."""

_TWICE = re.compile(
    r"is evicted for \S+ from endpoint ([\w-]+) for exceeding|"
    r"Failed to re-activate the client:([\w-]+): already registered with another"
)
"""What it writes when a site dials while its connection stands, or was told apart from another of its name."""
_CROWD = (3, 60.0)
"""So many times in so many seconds, and two machines take the line from each other: both have the site's kit."""


@dataclass
class Service:
    """Keeps one role alive. ``tick``: seconds between looks."""

    kit: Kit
    site_file: Path | None = None
    tick: float = 0.25
    stopping: threading.Event = field(default_factory=threading.Event)
    child: subprocess.Popen[str] | None = None
    _log: logging.Logger = field(default_factory=lambda: logging.getLogger("fedshift.service"))
    joined: dict[str, float] = field(default_factory=dict)
    """At the coordinator: site → when it registered last (monotonic seconds)."""
    _twice: dict[str, list[float]] = field(default_factory=dict)
    _connected: bool = False
    _starts: int = 0

    def run(self) -> None:
        """Until told to stop. Raises UserError for a kit that cannot be used."""
        flare_kits.check_certificates(self.kit)
        self._open_log()
        self._end_strays()
        wait = _BACKOFF[0]
        try:
            while not self.stopping.is_set():
                try:
                    begun = time.monotonic()
                    self._once()
                    if time.monotonic() - begun > _BACKOFF[1]:
                        wait = _BACKOFF[0]
                except _Unreachable as error:
                    self.say("retrying", f"cannot reach the coordinator at {error}; trying again in {wait:g} s")
                    wait = self._pause(wait)
                    continue
                if not self.stopping.is_set():
                    self.say("restarting", f"FLARE's process ended; starting it again in {wait:g} s")
                    wait = self._pause(wait)
        finally:
            self._end_child()
            self.say("stopped", "")

    def _pause(self, wait: float) -> float:
        self.stopping.wait(wait)
        return min(2 * wait, _BACKOFF[1])

    def _once(self) -> None:
        """FLARE's process from its start to its end."""
        flare_kits.check_certificates(self.kit)
        if self.kit.role == "coordinator":
            if self._starts == 0:
                flare_kits.check_port(self.kit)
        else:
            reason = flare_kits.check_reachable(self.kit)
            if reason:
                raise _Unreachable(reason)
        self._start_child()
        assert self.child is not None
        deployments = _Deployments(self) if self.kit.role == "coordinator" else None
        try:
            while self.child.poll() is None and not self.stopping.is_set():
                if deployments is not None:
                    deployments.look()
                elif self._connected:
                    self.say("connected", f"to {self.kit.project.server} port {self.kit.project.port}")
                self.stopping.wait(self.tick)
        finally:
            if deployments is not None:
                deployments.close()
            self._end_child()

    # FLARE's process --------------------------------------------------------------------------------------------------

    def _start_child(self) -> None:
        flare_kits.empty_channel(self.kit.folder)
        kind = "server" if self.kit.role == "coordinator" else "client"
        who = [] if kind == "server" else [f"uid={self.kit.name}"]
        command = [
            *(sys.executable, "-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train"),
            *("-m", str(self.kit.flare), "-s", f"fed_{kind}.json"),
            *("--set", "secure_train=true", *who, "org=fedshift", "config_folder=config"),
        ]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "FEDSHIFT_KIT": str(self.kit.folder)}
        if self.site_file is not None:
            environment["FEDSHIFT_SITE"] = str(self.site_file.resolve())
        self._connected = False
        self._starts += 1
        self.child = subprocess.Popen(
            command,
            cwd=self.kit.flare,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self.child,), daemon=True).start()
        self.say("starting", "")

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.hear(line)

    def hear(self, line: str) -> None:
        """Take in a line that FLARE's process wrote."""
        self._connected = self._connected or _REGISTERED in line
        found = _JOINED.search(line)
        if found:
            self.joined[found.group(1)] = time.monotonic()
        found = _TWICE.search(line)
        if found:
            times = self._twice.setdefault(found.group(1) or found.group(2), [])
            times[:] = [*times, time.monotonic()][-_CROWD[0] :]
        self._log.info(line.rstrip())

    def crowded(self) -> str:
        """At the coordinator: what is wrong when two machines use one site's kit; empty when none do."""
        since = time.monotonic() - _CROWD[1]
        for site, times in dict(self._twice).items():
            if len(times) == _CROWD[0] and times[0] > since:
                return (
                    f"the kit of site '{site}' is in use on two machines, which take the line from each other: "
                    "stop both, then start one"
                )
        return ""

    def _end_child(self) -> None:
        if self.child is None:
            return
        with contextlib.suppress(OSError):
            self.child.terminate()
        for process in (*_processes_of(self.kit), self.child):
            with contextlib.suppress(Exception):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=10)
        self.child = None

    def _end_strays(self) -> None:
        """Processes of this kit that an earlier service left behind: it was killed itself."""
        for process in _processes_of(self.kit):
            self._log.info(f"ending process {process.pid}, which was left behind")
            with contextlib.suppress(Exception):
                process.kill()

    # What others read -------------------------------------------------------------------------------------------------

    def say(self, state: str, message: str) -> None:
        whole = {
            "pid": os.getpid(),
            "child": self.child.pid if self.child else None,
            "state": state,
            "message": message,
            "starts": self._starts,
        }
        if whole == getattr(self, "_said", None):
            return
        self._said = whole
        if message:
            self._log.info(f"{state}: {message}")
        write_bytes(self.kit.folder / "service.json", json.dumps({**whole, "time": time.time()}).encode())

    def _open_log(self) -> None:
        handler = logging.handlers.RotatingFileHandler(
            self.kit.folder / "service.log", maxBytes=20 << 20, backupCount=3, encoding="utf-8"
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._log.handlers = [handler]
        self._log.setLevel(logging.INFO)
        self._log.propagate = False


class _Unreachable(FedshiftError):
    """The coordinator does not answer."""


def _processes_of(kit: Kit) -> Iterator[Any]:
    """FLARE's processes that work in this kit's folder, the jobs' included."""
    import psutil

    place = str(kit.flare)
    for process in psutil.process_iter(["cmdline", "pid"]):
        words: Sequence[str] = process.info["cmdline"] or []
        if place in words and any(word.startswith("nvflare.private") for word in words):
            yield process


# Deployments ----------------------------------------------------------------------------------------------------------


class _Deployments:
    """Runs what is wanted at the coordinator, one deployment after the other."""

    def __init__(self, service: Service) -> None:
        self.service, self.kit = service, service.kit
        self._session: Any = None
        self._present: _Job | None = None
        self._next_look = 0.0

    def look(self) -> None:
        """One look at what is wanted and how it goes. A fault of the connection is tried again at the next one."""
        if time.monotonic() < self._next_look:
            return
        try:
            if self._session is None:
                self._session = self._connect()
            said = [f"listening on port {self.kit.project.port}", self.service.crowded()]
            self.service.say("connected", "; ".join(filter(None, said)))
            if self._present is None:
                self._present = self._next()
            if self._present is not None and self._present.look(self._session):
                self._present = None
        except FedshiftError:
            raise
        except Exception as error:  # FLARE raises many kinds when its server is not there yet
            logging.getLogger("fedshift.service").info(f"the server does not answer yet: {error!r}")
            self._forget_session()
            self._next_look = time.monotonic() + 0.3

    def _next(self) -> _Job | None:
        for deployment in Deployment.all(self.kit.folder):
            wanted, state = deployment.wanted, deployment.state
            if wanted.get("want") == "run" and (
                state["state"] not in ENDS or state.get("time", 0) < wanted.get("since", 0)
            ):
                return _Job(self.service, deployment)
        return None

    def _connect(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        with contextlib.redirect_stdout(open(os.devnull, "w")):
            return new_secure_session(self.kit.project.contact, str(self.kit.folder / "admin"), timeout=2.0)

    def _forget_session(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()
        self._session = None

    def close(self) -> None:
        self._forget_session()


class _Job:
    """A deployment in work: its jobs, one after the other, until it ends."""

    def __init__(self, service: Service, deployment: Deployment) -> None:
        self.service, self.deployment = service, deployment
        engine = deployment.engine
        self.tries, self.quorum = int(engine.get("tries", 5)), engine.get("quorum")
        self.deadline = float(engine.get("deadline", 3600))
        self._submitted = 0.0
        self._job: str | None = None
        self._died = 0
        self._rounds = self._count_rounds()
        self._waiting_since = time.monotonic()
        self._next_status = 0.0

    def look(self, session: Any) -> bool:
        """Whether the deployment has ended."""
        deployment = self.deployment
        if deployment.wanted.get("want") == "abort":
            if self._job is not None:
                with contextlib.suppress(Exception):
                    session.abort_job(self._job)
            deployment.set_state("aborted", message="aborted; fedshift deploy resume goes on from the last round")
            return True
        if self._job is None:
            return self._begin(session)
        outcome = deployment.outcome
        if outcome.get("outcome") == "finished":
            deployment.set_state("finished", message="")
            return True
        if outcome.get("outcome") == "failed":
            deployment.set_state("failed", message=outcome["message"], exit_code=outcome.get("exit_code", 1))
            return True
        if outcome.get("outcome") == "again":  # what is left of that job ends beside the next one
            return self._ended("")
        if time.monotonic() < self._next_status:
            return False
        self._next_status = time.monotonic() + 1.0
        status = str(session.get_job_meta(self._job).get("status", ""))
        if status.startswith("FINISHED"):
            return self._ended(status)
        if status == "RUNNING":
            self._look_for_returned_sites()
        return False

    def _begin(self, session: Any) -> bool:
        """Submit the next job once the sites are connected: all of them, or after a while the quorum."""
        if time.monotonic() < self._next_status:
            return False
        self._next_status = time.monotonic() + 0.5
        connected = {client.name for client in session.get_system_info().client_info}
        missing = [site for site in self.deployment.sites if site not in connected]
        enough = self.quorum is not None and len(connected) >= self.quorum
        waited = time.monotonic() - self._waiting_since
        crowded = self.service.crowded()
        if crowded:
            self._state("waiting", crowded)
            return False
        if missing and not (enough and waited > min(self.deadline, 60)):
            self._state("waiting", f"for {', '.join(missing)} to connect")
            return False
        self.deployment.begin_job()
        self._submitted = time.monotonic()
        sites = len(self.deployment.sites) - len(missing)
        # FLARE starts a job at all sites that are there; fewer than these and it waits.
        folder = flare_kits.job_folder(self.service.kit, self.deployment.name, sites, self.deployment.folder / "job")
        self._job = session.submit_job(str(folder))
        self._state("running", "")
        return False

    def _ended(self, status: str) -> bool:
        """A job ended before its deployment: go on in another one, or give up. ``status``: of one that died."""
        deployment = self.deployment
        deployment.record({"what": "job", "is": "died" if status else "again", "job": self._job, "status": status})
        rounds = self._count_rounds()
        self._died = 0 if rounds > self._rounds else self._died + 1
        self._rounds = rounds
        if self._died >= self.tries:
            said = [str(event["reason"]) for event in deployment.events() if event.get("is") == "failed"]
            message = (
                f"{self._died} jobs ended one after the other without finishing a round "
                f"({said[-1] if said else status}); see fedshift deploy logs, then fedshift deploy resume"
            )
            deployment.set_state("failed", message=message, exit_code=1)
            return True
        self._job = None
        self._waiting_since = time.monotonic()
        return False

    def _look_for_returned_sites(self) -> None:
        """A site that was started again is connected and has no part in the job: only a new job can give it one."""
        for site in self.deployment.sites:
            back = self.service.joined.get(site, 0.0) > self._submitted
            if back and self.deployment.asked_to_go_on_elsewhere() is None:
                self.deployment.record({"what": "site", "site": site, "is": "back"})
                self.deployment.ask_to_go_on_elsewhere(f"site '{site}' is back")

    def _count_rounds(self) -> int:
        return sum(event.get("what") == "round" for event in self.deployment.events())

    def _state(self, state: str, message: str) -> None:
        now = self.deployment.state
        if (now.get("state"), now.get("message"), now.get("job")) != (state, message, self._job):
            self.deployment.set_state(state, message=message, job=self._job, died=self._died)


def main() -> None:
    """Run a service in this process."""
    kit = flare_kits.load_kit(Path(sys.argv[1]))
    service = Service(kit, Path(sys.argv[2]) if len(sys.argv) > 2 else None)

    def stop(*_: object) -> None:
        service.stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        service.run()
    except UserError as error:
        service.say("failed", str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
