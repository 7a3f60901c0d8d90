"""What a coordinator's files say of its deployments: their state, what each site was last heard of, warnings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deployment.flare.deployment_folder import ENDS
from fedshift.deployment.flare.kits import load_kit
from fedshift.deployment.flare.roles import status
from fedshift.deployment.json_files import read_object
from fedshift.errors import UserError
from fedshift.text import one_line

_DEEPEST = 4
"""How many folders a deployment may be below the watched one: <folder>/<project>/coordinator/deployments/<name>."""
_READ = 4 << 20
"""Bytes at the end of the log of events that are read."""


@dataclass(frozen=True)
class SeenSite:
    """What a site was last heard of.

    Attributes:
        name: the site.
        last: the last event, such as "answered fit, round 3".
        age: seconds since then; None if there was none.
    """

    name: str
    last: str
    age: float | None


@dataclass(frozen=True)
class Deployed:
    """A deployment at its coordinator.

    Attributes:
        state: waiting, running, finished, failed or aborted.
        message: what it waits for, or why it failed; "" if nothing was said.
        stopped: why nothing goes on, if the coordinator's service does not run; "" if it does or need not.
        sites: the sites of the project, until the deployment has ended.
        warnings: what it warned of, the last first.
        runs: number of its runs; 0 until all sites have answered.
    """

    state: str
    message: str
    stopped: str
    sites: tuple[SeenSite, ...]
    warnings: tuple[str, ...]
    runs: int


def deployments_in(root: Path) -> list[Path]:
    """The folders of the deployments in or below ``root``: a deployment, a coordinator's kit, or what holds one."""
    patterns = ("*/" * depth + "wanted.json" for depth in range(_DEEPEST + 1))
    return sorted(file.parent for pattern in patterns for file in root.absolute().glob(pattern))


def deployed(folder: Path) -> Deployed | None:
    """What is known of the deployment in ``folder``; None if there is none."""
    wanted, said = read_object(folder / "wanted.json"), read_object(folder / "state.json")
    if not wanted and not said:
        return None
    if said.get("state", "waiting") in ("waiting", *ENDS) and wanted.get("request", 0) != said.get("request", 0):
        said = {"message": "for the coordinator to take it up"}  # what is said answers an earlier request
    state = str(said.get("state", "waiting"))
    events = list(_events(folder / "progress.jsonl"))
    stopped, sites = "", tuple[SeenSite, ...]()
    with suppress(UserError):  # a deployment that was copied elsewhere has no kit
        found = load_kit(folder.parents[1], "coordinator")
        if state not in ENDS:
            service = status(found)
            stopped = "" if service.pid is not None else one_line(service.message or service.state)
            sites = tuple(_seen(site, events) for site in found.project.sites)
    begun = [event.get("runs") for event in events if event.get("what") == "experiment"]
    return Deployed(
        state,
        one_line(str(said.get("message", ""))),
        stopped,
        sites,
        tuple(dict.fromkeys(reversed([text for event in events if (text := _warning(event))]))),
        int(begun[-1] or 0) if begun else 0,
    )


def _events(file: Path) -> Iterator[Mapping[str, Any]]:
    """The events at the end of a log, the oldest first. A line that is cut or still being written does not count."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - _READ))
            lines = log.read().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def _seen(site: str, events: list[Mapping[str, Any]]) -> SeenSite:
    for event in reversed(events):
        state = event.get("is")
        if event.get("site") == site and state in ("asked", "answered", "lost", "refused", "back"):
            where = f", round {event['round']}" if "round" in event else ""
            call = f"{event.get('what')}{where}"
            reason = one_line(str(event.get("reason", "")))
            told = {
                "asked": f"asked for {call}; no answer yet",
                "answered": f"answered {call}",
                "lost": f"lost at {call}: {reason}",
                "refused": f"refused at {call}: {reason}",
                "back": "is back",
            }[state]
            age = max(0.0, time.time() - float(event.get("time", 0)))
            return SeenSite(site, told, age)
    return SeenSite(site, "nothing yet", None)


def _warning(event: Mapping[str, Any]) -> str:
    """What an event warns of; "" if of nothing."""
    if event.get("what") == "warning":
        return one_line(str(event.get("message", "")))
    if event.get("what") == "job" and event.get("is") == "died":
        return f"a job died ({one_line(str(event.get('status', '')))}); the next one goes on from the last round"
    return ""
