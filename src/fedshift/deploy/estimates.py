"""The coordinator's part in estimates at sites without labels: it carries sums and readings, and sees no estimate.

Where a labelled site is the target of a run, it sends sums of what that run's model says of its samples. When all runs
are over, each such site reads its scores with the sums of the others, once, and each site without labels is told both
of all of them. It then estimates by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from operator import add
from pathlib import Path

from pydantic import RootModel

from fedshift.deploy.deployed_plan import DeployedPlan, run_at_sites
from fedshift.deploy.estimate_inputs import summed_inputs
from fedshift.deploy.estimate_sums import EstimateSums
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.handshake import sources_encoding
from fedshift.deploy.json_files import read_stored
from fedshift.deploy.remote.requests import EndRequest, EstimateRequest, ReadingAnswer, ReadingRequest
from fedshift.deploy.remote.transport import Done, Lost, Transport, ask_plain
from fedshift.evaluation.estimate.plain_sums import (
    GivenInputs,
    GivenPooled,
    GivenSite,
    GivenSums,
    check_classes,
    plain_sums,
)
from fedshift.experiment.plan import PlannedRun, Run
from fedshift.federation.plain_values import Frozen
from fedshift.json_objects import write_object

OVER = "estimates.json"
_MOST_LOOKED = 300
"""Sites that tell of their changed samples: what more of them tell is too long for a request."""
_REMEDY = "delete it, and sites estimate again"


def sums_file(folder: Path, run: str) -> Path:
    """The file of a deployment for the sums of a run's target."""
    return folder / "sums" / f"{run}.json"


def threshold_file(folder: Path, run: str) -> Path:
    """The file of a deployment for the threshold that a run's sources chose."""
    return folder / "thresholds" / f"{run}.json"


def keep_sums(file: Path, sums: Mapping[str, GivenSums | None]) -> None:
    """Keep the sums of a run's targets, until all runs are over."""
    plain = {site: of_site.model_dump(mode="json") for site, of_site in sums.items() if of_site is not None}
    if plain:
        write_object(file, plain, indent=None)


def hand_over(plan: DeployedPlan, transport: Transport, folder: Path, deadline: float, log: EventLog) -> None:
    """Let sites without labels estimate what to expect of their models. What failed is tried again later."""
    over = set(read_estimated(folder))
    names = [run_at_sites(plan.experiment.name, run.run) for run in plan.runs]
    waiting = [(run, name) for run, name in zip(plan.runs, names, strict=True) if run.split.predicted]
    waiting = [(run, name) for run, name in waiting if name not in over]
    sums = EstimateSums(plan, transport, deadline, log) if plan.experiment.engine.sums_only else None
    for planned, name in waiting:
        known = {} if sums is not None else _collect_known(plan, planned.run, transport, folder, deadline, log)
        if len(known) > _MOST_LOOKED:
            known = {site: given.model_copy(update={"looked": None}) for site, given in known.items()}
        looked = bool(known) and all(site.looked is not None for site in known.values())
        inputs = summed_inputs(plan, planned, known, transport, deadline, log) if looked else None
        pooled = None if sums is None else sums.of(planned.run)
        chosen = read_stored(Threshold, threshold_file(folder, name), _REMEDY, older=True)
        threshold = None if chosen is None else chosen.threshold
        if _ask_estimate(plan, planned, known, inputs, pooled, threshold, transport, deadline, log):
            over.add(name)
    if not waiting:
        return
    note_estimated(folder, over)
    if all(name in over for _, name in waiting):
        if sums is not None:
            sums.end()
        for planned, name in zip(plan.runs, names, strict=True):  # the sites may forget their scores
            sites = [site for site in planned.split.targets if site in plan.agreed.sites]
            ask_plain(transport, dict.fromkeys(sites, EndRequest(run=name)), deadline, Done)


def _collect_known(
    plan: DeployedPlan, run: Run, transport: Transport, folder: Path, deadline: float, log: EventLog
) -> dict[str, GivenSite]:
    """Sums and reading of each site that was left out of a run beside this one, as the site without labels is told."""
    same = [item.run for item in plan.runs if (item.run.method, item.run.seed) == (run.method, run.seed)]
    names = {item.target: run_at_sites(plan.experiment.name, item) for item in same if item.target != run.target}
    classes = len(plan.data.classes)
    kept = {site: kept_sums(sums_file(folder, run)).get(site) for site, run in names.items()}
    sums = {site: text for site, text in kept.items() if text is not None}
    for text in sums.values():
        check_classes(text, classes)
    known: dict[str, GivenSite] = {}
    for site, of_site in sums.items():
        others = [item.sums for other, item in sums.items() if other != site]
        if others:
            together = GivenSums.model_validate(plain_sums(reduce(add, others)))
            request = ReadingRequest(run=names[site], sums=together, number=sorted(sums).index(site))
            answer = _reading(site, request, transport, deadline, log)
            known |= {} if answer is None else {site: GivenSite(sums=of_site, **dict(answer))}
    return known


class _KeptSums(RootModel[dict[str, GivenSums]]):
    """The sums of a run's targets, by site."""


class Threshold(Frozen):
    """The threshold that a run's sources chose, if they did."""

    threshold: float | None = None


class _Estimated(Frozen):
    """The runs of which there are estimates."""

    runs: tuple[str, ...] = ()


def kept_sums(file: Path) -> dict[str, GivenSums]:
    """What `keep_sums` kept, by site; empty if there is nothing."""
    sums = read_stored(_KeptSums, file, _REMEDY, older=True)
    return {} if sums is None else sums.root


def note_estimated(folder: Path, runs: Collection[str]) -> None:
    """Note of which runs there are estimates."""
    write_object(folder / OVER, {"runs": sorted(runs)})


def read_estimated(folder: Path) -> tuple[str, ...]:
    """The runs that were noted."""
    noted = read_stored(_Estimated, folder / OVER, _REMEDY, older=True)
    return () if noted is None else noted.runs


def _reading(
    site: str, request: ReadingRequest, transport: Transport, deadline: float, log: EventLog
) -> ReadingAnswer | None:
    answer = ask_plain(transport, {site: request}, deadline, ReadingAnswer).get(site, Lost("did not answer"))
    if not isinstance(answer, Lost):
        return answer.answer
    log.warn(f"site '{site}' is no case of the estimates of {request.run}: {answer.reason}")
    return None


def _ask_estimate(
    plan: DeployedPlan,
    planned: PlannedRun,
    known: Mapping[str, GivenSite],
    inputs: GivenInputs | None,
    pooled: GivenPooled | None,
    threshold: float | None,
    transport: Transport,
    deadline: float,
    log: EventLog,
) -> bool:
    """Tell the target of a run what is known; whether it has estimated."""
    site, run = planned.run.target, run_at_sites(plan.experiment.name, planned.run)
    preprocessing = sources_encoding(plan.agreed, site)
    request = EstimateRequest(
        run=run, known=dict(known), preprocessing=preprocessing, threshold=threshold, pooled=pooled, inputs=inputs
    )
    answer = ask_plain(transport, {site: request}, deadline, Done).get(site, Lost("did not answer"))
    lost, sites = isinstance(answer, Lost), len(known) if pooled is None else pooled.whole.sites
    reason = answer.reason if isinstance(answer, Lost) else f"from {sites} sites; it stays there"
    log.event({"what": "estimate", "site": site, "run": run, "is": "lost" if lost else "made", "reason": reason[:500]})
    if lost:
        log.warn(f"site '{site}' has no estimate of run {run}: {reason}; fedshift deploy resume tries again")
    return not lost
