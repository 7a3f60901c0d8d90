"""A deployment's folder at the coordinator: what was requested, its state, its outcome.

The processes of a deployment (commands, service, job) communicate through these files. Each file is written whole.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedshift.deploy.json_files import DEPLOY_AGAIN, append_event, events_of, members, plain_object
from fedshift.digests import Damaged
from fedshift.errors import UserError, nearest
from fedshift.json_objects import read_object, write_object

_NAME = re.compile(r"[\w-][\w.-]*")
ENDS = ("finished", "failed", "aborted")
_GOES_ON = "delete it, and the deployment goes on from its last round"
"""What to do about damaged files of a deployment."""


class Deployment:
    """``<kit>/deployments/<name>``."""

    def __init__(self, kit: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"'{name}' is no name of a deployment: letters, digits, '-', '_' and '.' only")
        self.kit, self.name = kit, name
        self.folder = kit / "deployments" / name

    @classmethod
    def all(cls, kit: Path) -> list[Deployment]:
        """Every deployment of a coordinator, the oldest first."""
        folders = [path for path in (kit / "deployments").glob("*") if (path / "wanted.json").exists()]
        return [cls(kit, path.name) for path in sorted(folders, key=lambda path: path.stat().st_ctime)]

    @classmethod
    def find(cls, kit: Path, name: str | None) -> Deployment:
        """The deployment of that name, or the only one if ``name`` is None; UserError without exactly one."""
        known = {deployment.name: deployment for deployment in cls.all(kit)}
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or name not in known:
            what = f"there is no deployment '{name}'" if name else "say which deployment"
            raise UserError(f"{what}; {nearest(name or '', known)}")
        return known[name]

    # Requests ---------------------------------------------------------------------------------------------------------

    def want(self, what: str) -> None:
        """Ask the coordinator's service to ``run`` or ``abort`` the deployment.

        Requests are numbered. A state names the request that it answers, so that clocks that are set decide nothing.
        """
        try:
            before = self.wanted
        except Damaged:
            before = self.state  # which names the last request that was taken up
        write_object(self.folder / "wanted.json", {"want": what, "request": before.get("request", 0) + 1})

    @property
    def wanted(self) -> dict[str, Any]:
        ask = f"ask again with fedshift deploy resume {self.name} or abort {self.name}"
        return read_object(self.folder / "wanted.json", ask, older=True)

    @property
    def engine(self) -> dict[str, Any]:
        """The experiment's ``engine`` section."""
        return self._section("engine")

    def _section(self, name: str) -> dict[str, Any]:
        section: dict[str, Any] = read_object(self.folder / "experiment.json", DEPLOY_AGAIN, older=True).get(name, {})
        return section

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """``state`` (waiting, running, finished, failed or aborted), request, message, job, and jobs that died."""
        return read_object(self.folder / "state.json", _GOES_ON, older=True) or {"state": "waiting"}

    @property
    def ended(self) -> bool:
        """Whether the last request has come to its end."""
        state = self.state
        return state["state"] in ENDS and state.get("request", 0) == self.wanted.get("request", 0)

    def set_state(self, state: str, **more: Any) -> None:
        write_object(self.folder / "state.json", {"state": state, "time": time.time(), **more})

    @property
    def sites(self) -> list[str]:
        """The sites of the project, in its order."""
        sites: list[str] = plain_object(self.kit / "kit.json")["project"]["sites"]
        return sites

    def members(self, revoked: Collection[str]) -> list[str]:
        """The sites that take part; ``revoked`` do not, unless the experiment began with them."""
        present = [site for site in self.sites if site not in revoked]
        return members(self.folder, present, self._section("protocol").get("drop", ()))

    def record(self, event: Mapping[str, Any]) -> None:
        """Add an event for people who watch."""
        append_event(self.folder / "progress.jsonl", event)

    def events(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """The events from number ``since`` on; a warning in place of each that is damaged."""
        return events_of(self.folder / "progress.jsonl", since)

    # Jobs -------------------------------------------------------------------------------------------------------------

    def begin_job(self) -> None:
        """Remove what the previous job left."""
        for name in ("outcome.json", "elsewhere.json", "process.json"):
            (self.folder / name).unlink(missing_ok=True)

    def note_process(self, job: str) -> None:
        """Write down that this process runs a job, so that the service sees when it is killed."""
        write_object(self.folder / "process.json", {"pid": os.getpid(), "job": job})

    def process_gone(self, job: str) -> bool:
        """Whether the process that ran a job has ended; False while none has begun."""
        import psutil

        noted = read_object(self.folder / "process.json", _GOES_ON, older=True)
        if noted.get("job") != job:
            return False
        try:
            return job not in psutil.Process(int(noted["pid"])).cmdline()
        except psutil.Error:  # also for one that has ended and whose parent has not asked for it
            return True

    def end(self, job: str, outcome: str, message: str = "", exit_code: int = 0) -> None:
        """Write a job's outcome: ``finished``, ``failed``, ``again`` (continue in a new job), or ``aborted``."""
        whole = {"job": job, "outcome": outcome, "message": message, "exit_code": exit_code}
        write_object(self.folder / "outcome.json", whole)

    def outcome(self, job: str) -> dict[str, Any]:
        """A job's outcome; empty while there is none. A job that was left may still write its own."""
        result = read_object(self.folder / "outcome.json", _GOES_ON, older=True)
        return result if result.get("job") == job else {}

    def request_new_job(self, reason: str) -> None:
        """Ask the job to end, so that the deployment continues in a new one."""
        write_object(self.folder / "elsewhere.json", {"reason": reason})

    def new_job_requested(self) -> str | None:
        """Why the job should end; None if it should not."""
        reason: str | None = read_object(self.folder / "elsewhere.json", _GOES_ON, older=True).get("reason")
        return reason
