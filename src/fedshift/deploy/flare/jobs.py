"""The deployments of a coordinator: it runs them one after the other, each as one FLARE job after the other.

A deployment whose job died continues in a new job from its last checkpoint, a bounded number of times.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedshift.deploy.flare.certificates import revoked_sites
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.kits import COORDINATOR_CLASS, SITE_CLASS, Kit
from fedshift.deploy.flare.limits import REFUSED_FOR
from fedshift.digests import Damaged
from fedshift.errors import FedshiftError, UserError

_JOINED = re.compile(r"Client: New client ([\w.-]+)@")
"""A line of FLARE's server when a site registers. FLARE's interface does not tell when a site registered."""

_EVICTED = re.compile(
    r"is evicted for \S+ from endpoint ([\w-]+) for exceeding|"
    r"Failed to re-activate the client:([\w-]+): already registered with another"
)
"""A line of FLARE's server when a second client connects under the name of a connected site."""
_FAILED = re.compile(r"Failing job (\S+) due to reported failure from")
"""A line of FLARE's server when a site says that its process of a job has ended. FLARE then waits for the other sites
to end theirs, for some seconds, before it ends the job."""
_REFUSED = re.compile(rf"'([\w.-]+)' {REFUSED_FOR} (\d{{1,3}}) minutes")
"""A line of our listener when it refuses a site for some time."""
_EVICTIONS, _WINDOW = 3, 60.0
"""Evictions, and the seconds within which so many mean that two machines use one kit."""
_ROLL_CALL = 5.0
"""Seconds between looks at who is registered, for the status."""
_SOON = 60.0
"""Seconds in which sites that are being started connect."""
_WHY = " (fedshift site status there says why not; if the coordinator has moved, it needs its new kit.json)"
_LOOK_AGAIN = 0.25
"""Seconds between looks at FLARE's list of sites."""
TIMES = {"task_request_interval": 0.1, "heart_beat_timeout": 600}
"""A job's times in seconds. FLARE's default of 2 s between a site's requests for tasks would be most of a short
exchange."""


class Attendance:
    """What the log of FLARE's server tells about the sites: when each registered, whose kit is used twice, who is
    refused for some time, and in which jobs a site's process has ended."""

    def __init__(self) -> None:
        self.joined: dict[str, float] = {}
        """Site → time of its last registration (monotonic seconds)."""
        self.failed: set[str] = set()
        """Ids of the jobs in which a site's process has ended."""
        self.refused: dict[str, float] = {}
        """Site → until when the listener refuses it (seconds since 1970): it read no answers."""
        self.connected: tuple[str, ...] = ()
        """The sites that are registered, as FLARE's server said when it was last asked."""
        self._evicted: dict[str, list[float]] = {}
        """Site → times of its last evictions."""

    def read_line(self, line: str) -> None:
        """Read one line of the server's log."""
        match = _JOINED.search(line)
        if match:
            self.joined[match.group(1)] = time.monotonic()
        match = _FAILED.search(line)
        if match:
            self.failed.add(match.group(1))
        match = _REFUSED.search(line)
        if match:
            self.refused[match.group(1)] = time.time() + 60 * int(match.group(2))
        match = _EVICTED.search(line)
        if match:
            times = self._evicted.setdefault(match.group(1) or match.group(2), [])
            times[:] = [*times, time.monotonic()][-_EVICTIONS:]

    def kit_used_twice(self) -> str:
        """A message if two machines use one site's kit; empty if none do."""
        since = time.monotonic() - _WINDOW
        for site, times in dict(self._evicted).items():
            if len(times) == _EVICTIONS and times[0] > since:
                return (
                    f"the kit of site '{site}' is in use on two machines, which disconnect each other: stop both, then "
                    "start one"
                )
        return ""

    def refused_now(self) -> str:
        """A message if sites are refused for some time; empty if none is."""
        until = {site: moment for site, moment in dict(self.refused).items() if moment > time.time()}
        return "; ".join(
            f"site '{site}' is refused until {time.strftime('%H:%M', time.localtime(moment))}, since it sends and "
            f"reads no answers: ask its people; fedshift project revoke {site} refuses it for good"
            for site, moment in until.items()
        )


class Deployments:
    """Runs the deployments of a coordinator one after the other.

    ``say`` is called with the state, a message and its severity.
    """

    def __init__(self, kit: Kit, attendance: Attendance, say: Callable[[str, str, int], None]) -> None:
        self._kit, self._attendance, self._say = kit, attendance, say
        self._session: Any = None
        self._present: RunningDeployment | None = None
        self._next_look = self._next_roll_call = 0.0
        self._damaged = ""
        """Which damaged file keeps a deployment from going on, and the way out."""
        self._disabled: frozenset[str] | None = None
        """The sites that FLARE was told to refuse; None: not known."""

    def look(self) -> None:
        """Check once what is requested and how it goes. After a connection error, the next call tries again.
        FedshiftError if trying again would not help."""
        if time.monotonic() < self._next_look:
            return
        try:
            if self._session is None:
                self._session = self._connect()
            port, attendance = self._kit.project.port, self._attendance
            self._look_who_is_there()
            all_troubles = (attendance.kit_used_twice(), attendance.refused_now(), self._damaged)
            troubles = [text for text in all_troubles if text]
            level = logging.WARNING if troubles else logging.INFO
            self._say("connected", "; ".join([f"listening on port {port}", *troubles]), level)
            self._go_on()
        except FedshiftError:
            raise
        except Exception as error:  # FLARE raises many kinds when its server is not there yet
            logging.getLogger("fedshift.service").debug(f"the server does not answer yet: {error!r}")
            self._forget_session()
            self._next_look = time.monotonic() + 0.3

    def _go_on(self) -> None:
        """Look how the present deployment goes, or for the next one. A damaged file is noted, and looked at again."""
        self._damaged = ""
        try:
            self._tell_flare_who_is_revoked()
            if self._present is None:
                self._present = self._next()
            if self._present is not None and self._present.look(self._session):
                self._present = None
        except Damaged as error:
            self._damaged = str(error)

    def _look_who_is_there(self) -> None:
        """Ask FLARE's server now and then which sites are registered."""
        if time.monotonic() >= self._next_roll_call:
            self._next_roll_call = time.monotonic() + _ROLL_CALL
            present = {client.name for client in self._session.get_system_info().client_info}
            self._attendance.connected = tuple(site for site in self._kit.project.sites if site in present)

    def _tell_flare_who_is_revoked(self) -> None:
        """Have FLARE forget sites whose kit is revoked, and accept again those whose kit is not."""
        revoked = revoked_sites(self._kit)
        if revoked == self._disabled:
            return
        for site in sorted({*self._kit.project.sites, *revoked}):
            if site in revoked:
                self._session.disable_client(site)
            else:
                self._session.enable_client(site)
        self._disabled = revoked

    def _next(self) -> RunningDeployment | None:
        for deployment in Deployment.all(self._kit.folder):
            try:
                if deployment.wanted.get("want") == "run" and not deployment.ended:
                    return RunningDeployment(self._attendance, deployment, lambda: revoked_sites(self._kit))
            except Damaged as error:
                self._damaged = str(error)  # the others go on
        return None

    def _connect(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return new_secure_session(self._kit.project.contact, str(self._kit.folder / "admin"), timeout=2.0)

    def _forget_session(self) -> None:
        self._disabled = None
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()
        self._session = None

    def close(self) -> None:
        """Close the connection to the server. Its job continues."""
        self._forget_session()


class RunningDeployment:
    """A deployment that is running: its jobs, one after the other, until it ends. ``revoked`` names revoked sites."""

    def __init__(
        self, attendance: Attendance, deployment: Deployment, revoked: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        self._attendance, self.deployment, self._revoked = attendance, deployment, revoked
        engine = deployment.engine
        self.tries, self.quorum = int(engine.get("tries", 5)), engine.get("quorum")
        self.deadline = float(engine.get("deadline", 3600))
        self._submitted = 0.0
        self._job: str | None = None
        self._runs = False
        """Whether FLARE has started the job at the sites."""
        self._request = 0
        self._died = 0
        self._rounds = self._count_rounds()
        self._waiting_since = time.monotonic()
        self._next_status = 0.0
        self._told_refused: set[tuple[str, float]] = set()

    def look(self, session: Any) -> bool:
        """Check once how the deployment goes; return whether it has ended."""
        deployment = self.deployment
        wanted = deployment.wanted
        self._request = wanted.get("request", 0)
        if wanted.get("want") == "abort":
            if self._job is not None:
                with contextlib.suppress(Exception):
                    session.abort_job(self._job)
            self._end("aborted", message="aborted; fedshift deploy resume continues from the last round")
            return True
        self._tell_who_is_refused()
        if self._job is None:
            return self._begin(session)
        return self._look_at_job(session, self._job)

    def _look_at_job(self, session: Any, job: str) -> bool:
        """Check once how the job goes; return whether the deployment has ended."""
        deployment = self.deployment
        killed = deployment.process_gone(job)  # before the outcome, which a process writes before it ends
        outcome = deployment.outcome(job)
        if outcome.get("outcome") == "finished":
            self._end("finished", message="")
            return True
        if outcome.get("outcome") == "failed":
            self._end("failed", message=outcome["message"], exit_code=outcome.get("exit_code", 1))
            return True
        if outcome.get("outcome") == "again":  # the old job ends while the next one starts
            return self._end_job("SITE_FAILED" if job in self._attendance.failed else "")
        if outcome.get("outcome") == "aborted":
            return self._end_job("ABORTED")
        if killed:
            return self._end_job("KILLED")
        if job in self._attendance.failed and deployment.new_job_requested() is None:
            deployment.request_new_job("the process of a site has ended")
        if self._runs:
            self._look_for_returned_sites()
        if time.monotonic() < self._next_status:
            return False
        self._next_status = time.monotonic() + 1.0
        status = str(session.get_job_meta(job).get("status", ""))
        if status.startswith("FINISHED"):
            return self._end_job(status)
        self._runs = status == "RUNNING"
        return False

    def _begin(self, session: Any) -> bool:
        """Submit the next job when all sites are connected, or after a while the quorum; whether it cannot begin."""
        if time.monotonic() < self._next_status:
            return False
        self._next_status = time.monotonic() + _LOOK_AGAIN
        revoked = self._revoked()
        members = self.deployment.members(revoked)
        lacking = [site for site in members if site in revoked]  # it began with them
        if (lacking and self.quorum is None) or lacking == members:
            self._end("failed", message=_cannot_go_on(lacking), exit_code=UserError.exit_code)
            return True
        connected = {client.name for client in session.get_system_info().client_info}.intersection(members)
        used_twice = self._attendance.kit_used_twice()
        absent = [site for site in members if site not in connected]
        if used_twice or self._waits(len(connected), [site for site in absent if site not in revoked]):
            why = "" if time.monotonic() - self._waiting_since < _SOON else _WHY
            self._state("waiting", used_twice or f"for {', '.join(absent)} to connect{why}")
            return False
        self.deployment.begin_job()
        self._submitted = time.monotonic()
        # FLARE starts the job at all connected sites, once there are as many as this.
        folder = job_folder(self.deployment.name, len(connected), self.deployment.folder / "job")
        self._job, self._runs = session.submit_job(str(folder)), False
        self._state("running", "")
        return False

    def _waits(self, connected: int, missing: Sequence[str]) -> bool:
        """Whether to wait for sites: a quorum waits only for a while."""
        waited = time.monotonic() - self._waiting_since
        if self.quorum is None or connected < self.quorum or waited <= min(self.deadline, 60):
            return bool(missing)
        return False

    def _end_job(self, status: str) -> bool:
        """A job ended before its deployment: continue in a new job, or give up; return whether it has ended."""
        deployment = self.deployment
        deployment.record({"what": "job", "is": "died" if status else "again", "job": self._job, "status": status})
        rounds = self._count_rounds()
        self._died = 0 if rounds > self._rounds else self._died + 1
        self._rounds = rounds
        if self._died >= self.tries:
            text = [str(event["reason"]) for event in deployment.events() if event.get("is") == "failed"]
            message = (
                f"{self._died} jobs ended one after the other without finishing a round "
                f"({text[-1] if text else status}); see fedshift deploy logs, then fedshift deploy resume"
            )
            self._end("failed", message=message, exit_code=1)
            return True
        self._job = None
        self._waiting_since = time.monotonic()
        return False

    def _look_for_returned_sites(self) -> None:
        """Request a new job if a site was restarted. A job takes in no site after its start."""
        for site in self.deployment.members(self._revoked()):
            back = self._attendance.joined.get(site, 0.0) > self._submitted
            if back and self.deployment.new_job_requested() is None:
                self.deployment.record({"what": "site", "site": site, "is": "back"})
                self.deployment.request_new_job(f"site '{site}' is back")

    def _tell_who_is_refused(self) -> None:
        """Note once for each time that the listener refuses a site, who it is."""
        for site, until in dict(self._attendance.refused).items():
            if until > time.time() and (site, until) not in self._told_refused:
                self._told_refused.add((site, until))
                self.deployment.record({"what": "warning", "site": site, "message": self._attendance.refused_now()})

    def _count_rounds(self) -> int:
        return sum(event.get("what") == "round" for event in self.deployment.events())

    def _end(self, state: str, **more: Any) -> None:
        self.deployment.set_state(state, request=self._request, **more)

    def _state(self, state: str, message: str) -> None:
        now = self.deployment.state
        if (now.get("state"), now.get("message"), now.get("job")) != (state, message, self._job):
            self.deployment.set_state(state, request=self._request, message=message, job=self._job, died=self._died)


def _cannot_go_on(lacking: Sequence[str]) -> str:
    """Why an experiment that these revoked sites belong to ends, and what to do; without any, no site is left."""
    if not lacking:
        return "no site of the project takes part: all are revoked (fedshift project accept) or in protocol.drop"
    names = ", ".join(f"'{site}'" for site in lacking)
    return (
        f"it began with {names}, whose kit was revoked since, and without engine.quorum: begin anew without it under "
        f"another name, or take it back with fedshift project accept {lacking[0]}"
    )


def job_folder(deployment: str, fewest: int, folder: Path) -> Path:
    """Write the FLARE job of a deployment: names and settings, no code. ``fewest``: sites that must be connected for
    FLARE to start the job."""
    shutil.rmtree(folder, ignore_errors=True)
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": deployment, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}, "min_clients": fewest}
    server = {
        "format_version": 2,
        "server": TIMES,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "fedshift", "path": COORDINATOR_CLASS, "args": {"deployment": deployment}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["fedshift"], "executor": {"path": SITE_CLASS, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder
