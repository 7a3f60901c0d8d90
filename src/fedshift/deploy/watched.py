"""What a coordinator's files say of its deployments: their state, what each site was last heard of, warnings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deploy.chained_log import is_undamaged, text_at_end
from fedshift.deploy.flare.deployment_folder import ENDS
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.flare.roles import status
from fedshift.digests import Damaged
from fedshift.errors import UserError
from fedshift.json_objects import read_object
from fedshift.report.watch.live_page import Deployed, SeenSite
from fedshift.text import one_line

_DEEPEST = 4
"""How many folders a deployment may be below the watched one: <folder>/<project>/coordinator/deployments/<name>."""
_READ = 4 << 20
"""Bytes at the end of the log of events that are read."""
_TOLD = {
    "asked": "asked for {call}; no answer yet",
    "answered": "answered {call}",
    "lost": "lost at {call}: {reason}",
    "refused": "refused at {call}: {reason}",
    "back": "is back",
}
"""What an event of a site says of it."""


@dataclass(frozen=True)
class _Trouble:
    """A call that a site has not answered with a usable reply since a time."""

    kind: str
    call: str
    since: float
    reason: str


def deployments_in(root: Path) -> list[Path]:
    """The folders of the deployments in or below ``root``: a deployment, a coordinator's kit, or what holds one."""
    patterns = ("*/" * depth + "wanted.json" for depth in range(_DEEPEST + 1))
    return sorted(file.parent for pattern in patterns for file in root.absolute().glob(pattern))


def deployment_status(folder: Path) -> Deployed | None:
    """What is known of the deployment in ``folder``; None if there is none."""
    try:
        wanted, answer = read_object(folder / "wanted.json"), read_object(folder / "state.json")
    except Damaged as error:
        wanted, answer = {}, {"message": str(error)}
    if not wanted and not answer:
        return None
    if answer.get("state", "waiting") in ("waiting", *ENDS) and wanted.get("request", 0) != answer.get("request", 0):
        answer = {"message": "for the coordinator to take it up"}  # what is said answers an earlier request
    state = str(answer.get("state", "waiting"))
    # a line that is cut, damaged or being written does not count
    lines = filter(is_undamaged, text_at_end(folder / "progress.jsonl", _READ).split("\n"))
    events: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
    stopped, sites = "", tuple[SeenSite, ...]()
    with suppress(UserError):  # a deployment that was copied elsewhere has no kit
        kit = load_kit(folder.parents[1], "coordinator")
        if state not in ENDS:
            service = status(kit)
            stopped = "" if service.pid is not None else one_line(service.message or service.state)
            sites = tuple(_seen_site(site, events) for site in kit.project.sites)
    begun = [event.get("runs") for event in events if event.get("what") == "experiment"]
    return Deployed(
        state,
        one_line(str(answer.get("message", ""))),
        stopped,
        sites,
        tuple(dict.fromkeys(reversed([text for event in events if (text := _warning(event))]))),
        int(begun[-1] or 0) if begun else 0,
    )


def _seen_site(site: str, events: list[Mapping[str, Any]]) -> SeenSite:
    of_site = [event for event in events if event.get("site") == site and event.get("is") in _TOLD]
    if not of_site:
        return SeenSite(site, "nothing yet", None)
    last, now = of_site[-1], time.time()
    told = _TOLD[last["is"]].format(call=_call(last), reason=one_line(str(last.get("reason", ""))))
    age = max(0.0, now - float(last.get("time", 0)))
    troubles = _troubles(of_site)
    lost = [trouble for trouble in troubles if trouble.kind == "lost"]
    if not troubles:
        return SeenSite(site, told, age)
    first, newest = min(lost or troubles, key=lambda trouble: trouble.since), (lost or troubles)[-1]
    trouble = f"{first.kind} since {first.call}: {newest.reason}"
    return SeenSite(site, told, age, trouble, max(0.0, now - first.since), bool(lost))


def _troubles(events: list[Mapping[str, Any]]) -> list[_Trouble]:
    """The calls that a site has not answered with a usable reply, the last to fail at the end.

    A reply may be refused after it arrived, so it counts only once the site is asked again. One that counts ends every
    loss, and refusals of the same call: a site may refuse one call for ever and answer the others.
    """
    result: dict[str, _Trouble] = {}
    answered = ""
    for event in (*events, {"is": "asked"}):
        state, call = event["is"], str(event.get("what"))
        if state == "asked" and answered:
            result = {name: item for name, item in result.items() if item.kind == "refused" and name != answered}
        if state in ("lost", "refused"):
            before, since = result.pop(call, None), float(event.get("time", 0))
            where, reason = _call(event), one_line(str(event.get("reason", "")))
            if before is not None and before.kind == state:
                where, since = before.call, before.since
            result[call] = _Trouble(state, where, since, reason)
        elif state == "back":
            result = {}
        answered = call if state == "answered" else ""
    return list(result.values())


def _call(event: Mapping[str, Any]) -> str:
    where = f", round {event['round']}" if "round" in event else ""
    return f"{event.get('what')}{where}"


def _warning(event: Mapping[str, Any]) -> str:
    """What an event warns of; "" if of nothing."""
    if event.get("what") == "warning":
        return one_line(str(event.get("message", "")))
    if event.get("what") == "job" and event.get("is") == "died":
        return f"a job died ({one_line(str(event.get('status', '')))}); the next one goes on from the last round"
    return ""
