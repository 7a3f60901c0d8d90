"""``fedshift coordinator status`` and ``fedshift site status``: how a role is, in about ten lines, and what to do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedshift.cli.console import say
from fedshift.deploy.chained_log import text_at_end
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import ENDS, Deployment
from fedshift.deploy.flare.service import EVENTS
from fedshift.deploy.privacy.ledger import PrivacyLedger
from fedshift.deploy.remote.policy import AGREED, RECOVERED, AuditLog
from fedshift.deploy.site_cards import GivenPrivacy, cards_of
from fedshift.deploy.site_file import SiteConfig, load_site
from fedshift.digests import Damaged
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.environment import versions
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon
from fedshift.text import one_line

_READ = 1 << 20
"""Bytes at the end of a service's log that are searched for its last warning."""
_NOT_RUNNING = ("stopped", "failed")


def show_coordinator(folder: Path) -> None:
    """Print how the coordinator is."""
    kit = roles.load_kit(folder, "coordinator")
    status, names = roles.status(kit), kit.project.sites
    deployments = Deployment.all(kit.folder)
    current = next(
        (deployment for deployment in deployments if not deployment.ended), deployments[-1] if deployments else None
    )
    events = list(current.events()) if current is not None else []
    revoked = [name for name in roles.revoked_sites(kit) if name in names]
    _say(_state("coordinator", status, "fedshift coordinator start"))
    absent = [name for name in names if name not in status.sites and name not in revoked]
    present = f"{len(status.sites)} of {len(names)}{_after_colon(status.sites)}"
    missing = f"; not connected{_after_colon(absent)}" if absent and status.pid is not None else ""
    _say(f"sites connected: {present if status.pid is not None else 'none, since it does not run'}{missing}")
    if revoked:
        _say(f"revoked: {', '.join(revoked)}")
    _say(f"deployment: {'none yet' if current is None else _progress(current, events)}")
    _say(f"last refusal or loss: {_last_trouble(events)}")
    _say(f"privacy: {_budgets(current)}")
    _say_machine(kit.folder)
    _say(f"kit valid until {roles.expiry(kit)}; project {kit.project.name}, port {kit.project.port}")


def show_site(path: Path) -> None:
    """Print how a site is."""
    config = load_site(path)
    kit = roles.load_kit(config.kit, "site")
    status = roles.status(kit)
    _say(_state(f"site {kit.name}", status, f"fedshift site start {path}"))
    try:
        lines, _ = AuditLog.check(config.audit_log) if config.audit_log.exists() else ([], "")
    except FedshiftError as error:
        _say(f"warning: {error}")
        lines = []
    _say(f"last request: {_last_request([line for line in lines if line.get('do') not in (AGREED, RECOVERED)])}")
    refusals = [line for line in lines if line.get("refused") or line.get("failed")]
    last = refusals[-1] if refusals else {}
    why = last.get("refused") or last.get("failed")
    _say(f"last refusal: {f'{_last_request([last])}: {why}' if refusals else 'none'}")
    _say(f"privacy: {_ledger(config)}")
    _say_machine(config.memory if config.memory.exists() else kit.folder, kit.folder)
    _say(f"kit valid until {roles.expiry(kit)}; project {kit.project.name}, coordinator {kit.project.server}")


def _say(text: str) -> None:
    say(one_line(text, 400))


def _state(name: str, status: roles.Status, start: str) -> str:
    """Whether a service runs, since when, what it says, and how to start it."""
    pid = f" (process {status.pid})" if status.pid else ""
    since = f" since {_moment(status.begun)}" if status.begun is not None and status.pid else ""
    todo = f"; start it with {start}" if status.state in _NOT_RUNNING else ""
    return f"{name}: {status.state}{pid}{since} {status.message}".rstrip() + todo


def _moment(seconds: object) -> str:
    """A time of this machine's clock; a file may hold anything."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(float(str(seconds))))
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def _after_colon(names: Iterable[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def _progress(deployment: Deployment, events: list[dict[str, Any]]) -> str:
    """The run and round that a deployment is at."""
    state = deployment.state
    rounds = [event for event in events if event.get("what") == "round"]
    runs = [event for event in events if event.get("what") == "run" and event.get("is") == "begun"]
    last = max((rounds[-1:] or [{}])[0], (runs[-1:] or [{}])[0], key=lambda event: float(event.get("time", 0)))
    where = f", {last['method']} → {last['target']}, seed {last['seed']}" if "method" in last else ""
    number = f", round {last['round']} done" if "round" in last else ""
    todo = f"; fedshift deploy resume {deployment.name} goes on" if state["state"] in ENDS[1:] else ""
    message = f": {state['message']}" if state.get("message") else ""
    return f"{deployment.name} {state['state']}{where}{number}{message}{todo}"


def _last_trouble(events: list[dict[str, Any]]) -> str:
    result = [event for event in events if event.get("is") in ("refused", "lost")]
    if not result:
        return "none"
    last = result[-1]
    return f"{_moment(last.get('time'))} {last.get('what')}: site {last.get('site')} {last['is']}: {last.get('reason')}"


def _budgets(deployment: Deployment | None) -> str:
    """What the sites' cards of a deployment said of their budgets."""
    try:
        cards = cards_of(deployment.folder) if deployment is not None else {}
    except Damaged as error:
        return f"not known: {error}"
    budgets = {site: card.privacy for site, card in cards.items() if card.privacy is not None}
    if not budgets:
        return "no site of the last deployment has a budget"
    return "when the last job began, " + ", ".join(f"{site} {_spending(budget)}" for site, budget in budgets.items())


def _spending(budget: GivenPrivacy) -> str:
    steps = [NoisySteps(*step) for step in budget.spent]
    try:
        spent = f"{adaptive_epsilon(steps, budget.epsilon, budget.delta):.3g}"
    except UserError:  # Opacus is not installed here
        spent = "some"
    return f"had spent ε = {spent} of {budget.epsilon:g}"


def _ledger(config: SiteConfig) -> str:
    budget = config.file.privacy
    if budget is None:
        return "no budget (SITE.yaml has no privacy)"
    try:
        log = AuditLog(config.audit_log) if config.audit_log.exists() else None
        spent = PrivacyLedger(config.memory, config.file.site, budget, log).epsilon()
    except FedshiftError as error:
        return f"not known: {error}"
    return f"ε = {spent:.3g} of {budget.epsilon:g} spent at δ = {budget.delta:g}"


def _last_request(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "none yet"
    last = lines[-1]
    where = f", round {last['round']}" if last.get("round") is not None else ""
    return f"{_moment(last.get('time'))} {last.get('call') or last.get('do')} of {last.get('run')}{where}"


def _say_machine(disk: Path, kit: Path | None = None) -> None:
    """Disk, versions, and the last warning of the service's log."""
    _say(f"disk: {shutil.disk_usage(disk).free / 1e9:.1f} GB free at {disk}")
    try:
        flare = version("nvflare")
    except PackageNotFoundError:
        flare = "not installed"
    _say("versions: " + ", ".join(f"{name} {number}" for name, number in {**versions(), "nvflare": flare}.items()))
    log = (kit or disk) / EVENTS
    _say(f"last warning of {log}: {_last_warning(log)}")


def _last_warning(log: Path) -> str:
    severe = [
        line
        for line in text_at_end(log, _READ).splitlines()
        if line[20:].startswith(("WARNING ", "ERROR ", "CRITICAL "))
    ]
    return severe[-1] if severe else "none"
