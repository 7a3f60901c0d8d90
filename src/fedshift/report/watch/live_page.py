"""The state of running experiments, and the page that shows it. It reads the runs' files and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

from fedshift.deploy_door import deploy_room
from fedshift.errors import UserError
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import RoundRecord, RunResult, with_unit
from fedshift.evaluation.site_bytes import SiteBytes, read_site_bytes
from fedshift.evaluation.stored import (
    ORDER,
    RESULT,
    ROUNDS,
    SETTINGS,
    is_finished,
    read_failure,
    read_order,
    read_result,
    read_rounds,
    run_folders,
)
from fedshift.files import plain_yaml
from fedshift.report.html import render
from fedshift.report.measures import MISSING
from fedshift.report.page import DARK, LIGHT
from fedshift.report.run_means import rows_of_sites
from fedshift.report.sections.about_runs import sites_sent
from fedshift.report.sections.blocks import Block, Cells, Entry, Grid, Listing, Section, Text, grid, number, section
from fedshift.text import clock, one_line


@dataclass(frozen=True)
class SeenSite:
    """What a site was last heard of."""

    name: str  # the site
    last: str  # the last event, such as "answered fit, round 3"
    age: float | None  # seconds since then; None if there was none
    # why the others go on without its replies, such as "lost since round 2 (fit): no answer"; "" if they do not. It
    # stands until the site answers again, also while it is asked anew
    trouble: str = ""
    since: float | None = None  # seconds since the first loss or refusal of those; None without
    lost: bool = False  # whether it does not answer at all; else it answers, and its replies are refused


@dataclass(frozen=True)
class Deployed:
    """A deployment at its coordinator."""

    state: str  # waiting, running, finished, failed or aborted
    message: str  # what it waits for, or why it failed; "" if nothing was said
    stopped: str  # why nothing goes on, if the coordinator's service does not run; "" if it does or need not
    sites: tuple[SeenSite, ...]  # the sites of the project, until the deployment has ended
    warnings: tuple[str, ...]  # what it warned of, the last first
    runs: int  # number of its runs; 0 until all sites have answered


def deployments_in(root: Path) -> list[Path]:
    """The folders of the deployments in or below ``root``."""
    watched = deploy_room("watched")
    folders: list[Path] = watched.deployments_in(root) if watched is not None else []
    return folders


def deployment_at(folder: Path) -> Deployed | None:
    """What is known of the deployment in ``folder``; None if there is none."""
    watched = deploy_room("watched")
    deployment: Deployed | None = watched.deployment_status(folder) if watched is not None else None
    return deployment


REFRESH = 5
"""Seconds until the page is loaded again."""
_MOST_WARNINGS = 12


@dataclass(frozen=True)
class WatchedRun:
    """A run that was begun."""

    names: tuple[str, str, str]  # method, target and seed
    result: RunResult | None  # its result, once it is finished
    rounds: Sequence[RoundRecord]  # what it measured so far; empty when it is finished
    planned_rounds: int  # rounds that it will have at the pace of its work so far; 0 if its settings cannot be read
    failure: str  # why it stopped; "" if it did not fail
    age: float | None  # seconds since its last round was written; None before the first
    by_site: SiteBytes | None = None  # what each site sent and received so far; None if that is not known

    @property
    def missing(self) -> dict[str, str]:
        """Site → why it was missing in the last round."""
        missing = self.rounds[-1].extra.get("missing") if self.rounds else None
        return {str(site): str(why) for site, why in missing.items()} if isinstance(missing, Mapping) else {}

    @property
    def sent(self) -> int:
        """Bytes that left the sites so far."""
        if self.result is not None:
            return sum(self.result.bytes_up.values())
        return sum(sum(record.bytes["up"].values()) for record in self.rounds)


@dataclass(frozen=True)
class Watched:
    """An experiment, local or deployed."""

    name: str  # its name
    runs: Sequence[WatchedRun]  # the runs that were begun
    planned: int  # number of planned runs
    deployment: Deployed | None = None  # what its coordinator says of it; None for a local experiment
    faults: Sequence[str] = ()  # files that cannot be read

    @property
    def finished(self) -> bool:
        """Whether every planned run has a result."""
        return sum(run.result is not None for run in self.runs) >= self.planned > 0

    @property
    def seconds_left(self) -> float | None:
        """The time that unfinished runs need, one after the other, at the pace so far; None before the first round."""
        done = [run.result.seconds for run in self.runs if run.result is not None]
        open_runs = [run for run in self.runs if run.result is None and not run.failure]
        paces = [fmean(record.seconds for record in run.rounds) * run.planned_rounds for run in open_runs if run.rounds]
        if not done and not paces:
            return None
        whole = fmean(done or paces)
        begun = sum(min(whole, sum(record.seconds for record in run.rounds)) for run in open_runs)
        return max(0.0, (self.planned - len(done)) * whole - begun)


def experiments_in(root: Path) -> list[Watched]:
    """The experiments in or below a folder, which may be a coordinator's kit. Those that are not finished come first.

    UserError if there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"no folder '{root}': give the folder of the runs, or a coordinator's kit")
    by_experiment: dict[Path, list[Path]] = {}
    for deployed_folder in deployments_in(root):  # also those whose first run has not begun
        by_experiment[deployed_folder / "runs" / deployed_folder.name] = []
    for folder in run_folders(root):
        by_experiment.setdefault(folder.parents[2], []).append(folder)
    experiments = [_experiment(folder, runs) for folder, runs in by_experiment.items()]
    return sorted(experiments, key=lambda experiment: experiment.finished)


def _experiment(folder: Path, folders: Sequence[Path]) -> Watched:
    runs, faults = [], []
    for run in folders:
        try:
            runs.append(_run(run))
        except UserError as error:
            faults.append(str(error))
    try:
        order = read_order(folder / ORDER)
        planned = max(len(folders), len(order.methods) * len(order.targets) * len(order.seeds))
    except UserError as error:
        faults.append(str(error))
        planned = len(folders)
    deployment = deployment_at(folder.parents[1]) if folder.parent.name == "runs" else None
    return Watched(folder.name, runs, max(planned, deployment.runs if deployment else 0), deployment, faults)


def _run(folder: Path) -> WatchedRun:
    method, target, seed = folder.parts[-3:]
    if is_finished(folder):
        result = read_result(folder / RESULT)
        return WatchedRun((method, target, seed), result, (), 0, "", None, result.bytes_by_site)
    failure, age, settings = read_failure(folder) or "", None, None
    with suppress(OSError):
        age = max(0.0, time.time() - (folder / ROUNDS).stat().st_mtime)
    with suppress(OSError, ValueError, UserError):
        settings = plain_yaml((folder / SETTINGS).read_bytes())
    records = read_rounds(folder / ROUNDS)
    planned = _planned_rounds(settings, records, target) if isinstance(settings, Mapping) else 0
    by_site = read_site_bytes(folder)
    return WatchedRun((method, target, seed), None, records, planned, one_line(failure), age, by_site)


def _planned_rounds(settings: Mapping[str, Any], records: Sequence[RoundRecord], target: str) -> int:
    """Rounds of a run. A method that trains less in a round than others has more than its settings say."""
    training, protocol = settings.get("training"), settings.get("protocol")
    training = training if isinstance(training, Mapping) else {}
    rounds, budget = training.get("rounds"), training.get("mini_batches")
    drawn = isinstance(protocol, Mapping) and protocol.get("sites_per_round")  # who is not drawn uses budget untrained
    known = isinstance(budget, Mapping) and all(isinstance(size, int) for size in budget.values())
    if isinstance(budget, Mapping) and known and len(records) > 1 and not drawn:
        first, last = records[0], records[-1]
        pace = (last.mini_batches - first.mini_batches) / (last.round - first.round)
        whole = sum(budget.values()) / max(1, len(set(budget) - {target}))
        if pace > 0:
            return last.round + max(0, round((whole - last.mini_batches) / pace))
    return rounds if isinstance(rounds, int) else 0


def watch_page(root: Path) -> str:
    """The page of all experiments in or below ``root``. UserError if there is no such folder."""
    sections = [
        section(f"experiment-{number}", experiment.name, *_blocks(experiment))
        for number, experiment in enumerate(experiments_in(root), 1)
    ] or [Section("none", "Nothing runs here", (Text("There is no run in this folder yet."),))]
    return render(
        "watch.html", root=root.resolve().name or str(root), sections=sections, refresh=REFRESH, light=LIGHT, dark=DARK
    )


def _blocks(experiment: Watched) -> Iterator[Block]:
    finished = sum(run.result is not None for run in experiment.runs)
    failed = sum(bool(run.failure) for run in experiment.runs)
    lines = (
        [] if experiment.deployment is None else [_state(experiment.deployment), *_lost_sites(experiment.deployment)]
    )
    if experiment.planned:
        lines.append(f"{finished} of {experiment.planned} runs finished" + (f", {failed} failed." if failed else "."))
    if experiment.seconds_left:
        lines.append(f"The rest takes {clock(experiment.seconds_left)} at this pace, one run after the other.")
    lines.append(f"Sites sent {sum(run.sent for run in experiment.runs) / 1e6:,.2f} MB.")
    yield Text(" ".join(lines), "verdict")
    if experiment.deployment is not None and experiment.deployment.sites:
        rows = [
            [site.name, site.trouble or MISSING, _ago(site.since), site.last, _ago(site.age)]
            for site in experiment.deployment.sites
        ]
        yield grid("Sites", ["site", "missing", "since", "last event", "when"], rows, css="facts")
    current = [run for run in experiment.runs if run.result is None]
    if current:
        yield _runs("Begun", current)
        sent = {" / ".join(run.names): rows_of_sites([run.by_site]) for run in current if run.by_site is not None}
        if (left := sites_sent("What left each site so far", "run", sent)) is not None:
            yield left
    told_above = (
        {site.name for site in experiment.deployment.sites if site.lost} if experiment.deployment is not None else set()
    )
    absent = [(run.names, site, why) for run in current for site, why in run.missing.items() if site not in told_above]
    missing = [f"{site}: {one_line(why)} ({' / '.join(names)})" for names, site, why in absent]
    if missing:
        yield Listing(tuple(missing), "Missing in the last round")
    done = [run for run in experiment.runs if run.result is not None]
    of_runs = [warning for run in done if run.result is not None for warning in run.result.warnings]
    warnings = list(
        dict.fromkeys(
            [*experiment.faults, *(experiment.deployment.warnings if experiment.deployment else ()), *of_runs]
        )
    )
    if warnings:
        more = [f"and {len(warnings) - _MOST_WARNINGS} more"] if len(warnings) > _MOST_WARNINGS else []
        yield Listing((*warnings[:_MOST_WARNINGS], *more), "Warnings")
    if done:
        yield _runs("Finished", done, under_way=False)


def _runs(caption: str, runs: Sequence[WatchedRun], under_way: bool = True) -> Grid:
    rows: list[Cells] = []
    for run in runs:
        last = run.rounds[-1] if run.rounds else None
        score: Any = run.result.score() if run.result else last.target_mean if last else None
        metric = run.result.metric if run.result else last.metric if last else "accuracy"
        told = number(score) if ENTRIES[metric].unit or score is None else Entry(with_unit(metric, score), value=score)
        done = run.result.rounds if run.result else last.round if last else 0
        of = f" of {run.planned_rounds}" if run.planned_rounds else ""
        rows.append([run.names[0], run.names[1], told, run.names[2].removeprefix("seed-"), f"{done}{of}"])
        rows[-1] += [number(run.sent / 1e6), *([run.failure or _ago(run.age)] if under_way else [])]
    head = ["method", "target", "measured, %", "seed", "round", "MB sent", *(["last round"] if under_way else [])]
    return grid(caption, head, rows, css="classes")


def _state(deployment: Deployed) -> str:
    text = f"Deployment {deployment.state}{f': {deployment.message}' if deployment.message else ''}."
    if not deployment.stopped:
        return text
    why = f"The coordinator's service does not run ({deployment.stopped})"
    return f"{text} {why}: start it with fedshift coordinator start."


def _lost_sites(deployment: Deployed) -> list[str]:
    """Whom the runs go on without, as a sentence; empty if all sites take part."""
    lost = [site.name for site in deployment.sites if site.lost]
    return [f"Lost: {', '.join(lost)}."] if lost else []


def _ago(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{clock(seconds)} ago"


ADDRESS = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server that shows ``folder`` to this machine alone.

    UserError if there is no such folder, or the port is taken.
    """
    experiments_in(folder)
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(_Page, folder))
    except OSError as error:
        raise UserError(f"--port: {port} cannot be used ({error.strerror}): choose another one") from None


class _Page(BaseHTTPRequestHandler):
    """Answers GET / and nothing else."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self._folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        # A page of a stranger may have a name that leads here; this machine's own names are the only ones answered.
        assert isinstance(self.server, ThreadingHTTPServer)
        addresses = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.headers.get("Host") not in addresses:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = watch_page(self._folder).encode()
        except UserError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is the user's."""
