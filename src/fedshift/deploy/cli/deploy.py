"""``fedshift deploy``: pass an experiment to the coordinator on this machine, watch it, copy its results."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.cli.console import safe_console, say
from fedshift.cli.run import show_results
from fedshift.deploy.coordinator import EXPERIMENT, check_deployable, check_members
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import ENDS, Deployment
from fedshift.deploy.watched import deployment_status
from fedshift.digests import Damaged
from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.records import with_unit
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.runs.run_folder import RunFolder, check_place
from fedshift.json_objects import read_object, write_object

_ACTIONS = ("status", "logs", "abort", "resume")


def deploy(what: str, rest: Sequence[str], kit: Path, runs: Path, detach: bool) -> None:
    """Deploy an experiment file, or do one of status, logs, abort and resume."""
    if what not in _ACTIONS:
        follow(kit, load(Path(what), rest), runs, detach=detach)
        return
    result = roles.load_kit(kit, "coordinator")
    name = rest[0] if rest else None
    if what == "status":
        _status(result.folder, name)
    elif what == "logs":
        _logs(result.folder, name)
    elif what == "abort":
        Deployment.find(result.folder, name).want("abort")
    else:
        deployment = Deployment.find(result.folder, name)
        _check_running(kit)
        before = len(list(deployment.events()))
        deployment.want("run")
        if not detach:
            _watch(deployment, runs, before)


def follow(kit: Path, experiment: Experiment, runs: Path, *, detach: bool = False) -> Path:
    """Deploy an experiment and watch it until it ends; return the folder of its results."""
    check_deployable(experiment)
    check_place(experiment, runs / experiment.name)
    result = roles.load_kit(kit, "coordinator")
    check_members(experiment, result.project.sites, roles.revoked_sites(result))
    _check_running(kit)
    deployment = Deployment(result.folder, experiment.name)
    whole, file = json.loads(json.dumps(experiment.dump())), deployment.folder / EXPERIMENT
    if deployment.state["state"] == "running" and _settings(file) != whole:
        raise UserError(
            f"deployment '{experiment.name}' runs with other settings: abort it first, or give this one another name"
        )
    write_object(file, whole)
    before = len(list(deployment.events()))
    deployment.want("run")
    if detach:
        say(f"deployed as {experiment.name}: fedshift deploy status {experiment.name}")
        return runs / experiment.name
    return _watch(deployment, runs, before)


def _settings(file: Path) -> dict[str, Any] | None:
    """The settings of a deployment; None if its file is damaged."""
    try:
        return read_object(file)
    except Damaged:
        return None


def _check_running(kit: Path) -> None:
    state = roles.status(roles.load_kit(kit, "coordinator"))
    if state.pid is None:
        raise UserError(
            f"the coordinator in {kit} is not running ({state.message or state.state}): call fedshift coordinator start"
        )


def _watch(deployment: Deployment, runs: Path, seen: int) -> Path:
    """Show events until the deployment ends, then copy its results. Ctrl-C stops the watching, not the deployment."""
    console = safe_console(stderr=True)
    request = deployment.wanted.get("request", 0)
    shown = ""
    try:
        while True:
            for event in deployment.events(seen):
                seen += 1
                _show(event, replies=console.is_terminal)
            state = deployment.state
            line = f"{state['state']}{': ' if state.get('message') else ''}{state.get('message', '')}"
            if line != shown and state.get("request", 0) == request:
                shown = line
                say(line, stderr=True)
            if state["state"] in ENDS and state.get("request", 0) == request:
                break
            time.sleep(0.2)
    except KeyboardInterrupt:
        say(f"the deployment continues at the coordinator: fedshift deploy status {deployment.name}", stderr=True)
        sys.exit(130)
    folder = fetch(deployment, runs)
    if state["state"] == "finished":
        show_results(folder, console)
        return folder
    message = f"deployment '{deployment.name}' {state['state']}: {state.get('message', '')}"
    raise UserError(message) if state.get("exit_code") == UserError.exit_code else FedshiftError(message)


def fetch(deployment: Deployment, runs: Path) -> Path:
    """Copy a deployment's run folders below ``runs``, where every other command finds them. UserError if a run of
    another experiment is in the place of one of them. Then nothing is copied."""
    source, folder = deployment.folder / "runs" / deployment.name, runs / deployment.name
    if source.exists():
        for path in sorted(source.glob("*/*/seed-*")):
            made = RunFolder(path, {}).written_by()
            if made is not None:
                RunFolder(folder / path.relative_to(source), made).check_identity()
        shutil.copytree(
            source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "checkpoint*", "memory")
        )
    return folder


def _show(event: dict[str, Any], *, replies: bool) -> None:
    """Print an event as one line, if it is of a kind that is shown. ``replies``: also single ones."""
    what, state = event.get("what"), event.get("is")
    where = f"round {event['round']}, {what}" if "round" in event and "exchange" in event else what
    if what == "round":
        answer = event.get("accuracy")
        accuracy = "" if answer is None else f": {with_unit(event.get('metric', 'accuracy'), answer)}"
        text = f"{event['method']} → {event['target']}, seed {event['seed']}, round {event['round']}{accuracy}"
    elif state in ("lost", "refused"):
        text = f"{where}: site {event['site']} {state}: {event.get('reason', '')}"
    elif state == "answered" and replies:
        text = f"{where}: {event['site']} answered ({event['bytes']:,} bytes)"
    elif what == "warning":
        text = f"warning: {event['message']}"
    elif what in ("site", "job"):
        text = f"{what} {event.get('site', event.get('job', ''))} {state}"
    else:
        return
    say(text, stderr=True)


def _status(kit: Path, name: str | None) -> None:
    chosen = [Deployment.find(kit, name)] if name else Deployment.all(kit)
    if not chosen:
        say("no deployments")
    for deployment in chosen:
        state = deployment.state
        rounds = [event for event in deployment.events() if event.get("what") == "round"]
        last = f", {rounds[-1]['method']} → {rounds[-1]['target']} round {rounds[-1]['round']}" if rounds else ""
        say(f"{deployment.name}: {state['state']}{last} {state.get('message', '')}".rstrip())
        seen = deployment_status(deployment.folder)
        for site in seen.sites if seen is not None else ():
            if site.trouble:
                say(f"  {site.name}: {site.trouble}")


def _logs(kit: Path, name: str | None) -> None:
    for event in Deployment.find(kit, name).events():
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.pop("time", 0)))
        severity, advice = _severity(event)
        words = " ".join(f"{key}={value}" for key, value in event.items() if value not in (None, ""))
        say(f"{moment} {severity} {words}{advice}")


def _severity(event: dict[str, Any]) -> tuple[str, str]:
    """How severe an event is, as the service's log has it, and what to do."""
    what, state, site = event.get("what"), event.get("is"), event.get("site", "")
    if state == "lost":
        return "WARNING", f" | ask site {site} for fedshift site status; it goes on where it was when it is back"
    if state == "refused":
        return "WARNING", f" | the reason names the rule; site {site} decides: fedshift site status shows it there"
    if what == "warning":
        return "WARNING", ""
    if (what, state) == ("job", "died"):
        return "WARNING", " | it goes on from the last round by itself; if that happens again, see flare.log"
    if (what, state) == ("job", "failed"):
        return "ERROR", " | see flare.log in the kit; then fedshift deploy resume"
    return "INFO", ""
