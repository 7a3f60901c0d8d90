"""A deployment's folder at the coordinator: what was asked for, how far it is, how it ended. Every process that has to
do with it, the job's included, meets the others here; each file is whole or not there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError, nearest
from fedshift.files import write_bytes

_NAME = re.compile(r"[\w-][\w.-]*")
ENDS = ("finished", "failed", "aborted")


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
    def named(cls, kit: Path, name: str | None) -> Deployment:
        """The deployment of that name, or the only one. Raises UserError when there is none, or several to choose."""
        known = {deployment.name: deployment for deployment in cls.all(kit)}
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or name not in known:
            what = f"there is no deployment '{name}'" if name else "say which deployment"
            raise UserError(f"{what}; {nearest(name or '', known)}")
        return known[name]

    # Asked for --------------------------------------------------------------------------------------------------------

    def want(self, what: str) -> None:
        """Ask the coordinator's service for something: ``run`` or ``abort``."""
        write_bytes(self.folder / "wanted.json", json.dumps({"want": what, "since": time.time()}).encode())

    @property
    def wanted(self) -> dict[str, Any]:
        return _read(self.folder / "wanted.json")

    @property
    def engine(self) -> dict[str, Any]:
        """The experiment's ``engine`` section."""
        found: dict[str, Any] = _read(self.folder / "experiment.json").get("engine", {})
        return found

    # How far it is ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """``state``: waiting, running, finished, failed or aborted; with a message, the job, the tries so far."""
        return _read(self.folder / "state.json") or {"state": "waiting"}

    def set_state(self, state: str, **more: Any) -> None:
        write_bytes(self.folder / "state.json", json.dumps({"state": state, "time": time.time(), **more}).encode())

    @property
    def sites(self) -> list[str]:
        """The sites of the project, in its order."""
        found: list[str] = _read(self.kit / "kit.json")["project"]["sites"]
        return found

    def record(self, event: Mapping[str, Any]) -> None:
        """Add an event for people who watch."""
        with open(self.folder / "progress.jsonl", "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": time.time(), **event}) + "\n")

    def events(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """The events from number ``since`` on."""
        file = self.folder / "progress.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines()[since:] if file.exists() else []:
            try:
                yield json.loads(line)
            except ValueError:
                return  # the line that is being written

    # One job after the other ------------------------------------------------------------------------------------------

    def begin_job(self) -> None:
        """Forget how the job before ended."""
        for name in ("outcome.json", "elsewhere.json"):
            (self.folder / name).unlink(missing_ok=True)

    def end(self, outcome: str, message: str = "", exit_code: int = 0) -> None:
        """Say how the job ends: finished, failed, or to be gone on with in another one (again)."""
        whole = {"outcome": outcome, "message": message, "exit_code": exit_code}
        write_bytes(self.folder / "outcome.json", json.dumps(whole).encode())

    @property
    def outcome(self) -> dict[str, Any]:
        return _read(self.folder / "outcome.json")

    def ask_to_go_on_elsewhere(self, reason: str) -> None:
        """Have the job end at its next look, to be gone on with in another one."""
        write_bytes(self.folder / "elsewhere.json", json.dumps({"reason": reason}).encode())

    def asked_to_go_on_elsewhere(self) -> str | None:
        """Why the job should end, if it should."""
        reason: str | None = _read(self.folder / "elsewhere.json").get("reason")
        return reason


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
