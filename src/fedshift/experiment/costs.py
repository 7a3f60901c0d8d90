"""What runs will cost, known before they train: bytes that they send, and privacy.

Bytes are those of a dry run: the exchanges are carried out once on a few samples.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedshift.data.domain import Domain, Rows
from fedshift.data.site_data import batches_per_epoch
from fedshift.evaluation.records import SitePrivacy
from fedshift.experiment.budgets import trained_by_all
from fedshift.experiment.plan import Plan, PlannedRun
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.functional.differential_privacy import NoisySteps, epsilon
from fedshift.methods.base import Method, RunPlan, Traffic
from fedshift.methods.rounds import finish_run, play_round, start_run
from fedshift.methods.screening import screening_of
from fedshift.models.network import Network
from fedshift.weights import Weights

SAMPLES = 2
"""Samples of each domain at a site in a dry run: BatchNorm refuses a single one."""
_MANY = 60
"""Sites from which the bytes are computed from those of a few."""
_FEW_SITES = (6, 9, 12, 15)
"""Numbers of sites whose dry runs say how bytes grow: a parabola through three, which the last one holds to."""


_TIMED_SITES = 4
"""So many sites tell how long it takes to save what a site remembers."""


@dataclass(frozen=True)
class DryRun:
    """Bytes until the first round, in the first round, in every later one, and after the last.

    ``visit`` is the seconds of a site's turn in a round beside its mini-batches, ``save`` those in which the run writes
    what the site remembers of it, and deletes what it wrote before.
    """

    start: Traffic
    first: Traffic
    later: Traffic
    finish: Traffic
    visit: float = 0.0
    save: float = 0.0

    def of(self, rounds: int) -> Traffic:
        """Bytes of so many rounds and of what comes before them."""
        if rounds == 0:
            return self.start
        further = Traffic(self.later.up * (rounds - 1), self.later.down * (rounds - 1))
        return self.start + self.first + further


def dry_run(
    method: Method,
    sites: Sequence[SitePlan],
    setting: Setting,
    network: Network,
    *,
    samples: int = SAMPLES,
    budget: Mapping[str, int] | None = None,
    **options: Any,
) -> DryRun:
    """Start a method and run two rounds in this process, on a few samples of each site.

    Args:
        network: what sites train; every site gets this one.
        budget: mini-batches that each site may train on; None: no training.
        options: further arguments of `Federation`.
    """
    few = [
        replace(
            site,
            parts=_few(site.parts, samples),
            unlabelled=_few(site.unlabelled, samples),
            held_out=_few(site.held_out, samples),
        )
        for site in sites
    ]
    shared = _WithNetwork(**vars(setting), built=network)
    federation = _DryFederation(few, shared, budget=dict(budget or {}), **options)
    start = Weights({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()})
    federation.screening = screening_of(method, start)
    state = start_run(method, federation, start)
    pages = [_page(federation)]
    visits = 0.0
    for _ in range(2):
        began = time.perf_counter()
        state = play_round(method, federation, state)
        visits = time.perf_counter() - began  # the second says more: the first also loads what is loaded once
        pages.append(_page(federation))
    visit, save = visits / (federation.per_round or len(few)), federation.seconds_to_save()
    finish_run(method, federation, state.weights)
    pages.append(_page(federation))
    start_page, first, later, finish = pages
    return DryRun(start_page, first, later, finish, visit, save)


def dry_run_of(planned: PlannedRun, network: Network) -> DryRun:
    """The dry run of a planned run."""
    engine, sites = planned.experiment.engine, planned.sites(planned.data)
    options: dict[str, Any] = {"rounds": max(1, planned.rounds), "on_refusal": engine.on_refusal}
    options |= {"sums_only": engine.sums_only, "quorum": engine.quorum, "per_round": planned.drawn}

    def of(some: Sequence[SitePlan]) -> DryRun:
        return dry_run(planned.run.method, some, planned.setting("cpu"), network, **options)

    alike = len({site.role for site in sites}) == 1 and not any(site.refuse for site in sites)
    drawn = planned.drawn or 0
    if len(sites) > _MANY + drawn and alike and engine.quorum is None:
        return _of_many(sites, of, drawn) or of(sites)
    return of(sites)


def _of_many(sites: Sequence[SitePlan], of: Callable[[Sequence[SitePlan]], DryRun], drawn: int) -> DryRun | None:
    """The dry run of many sites, from those of a few; None where their bytes follow no parabola in their number.

    ``drawn``: how many are drawn for each round; 0: all.
    """
    try:
        few = [of(sites[: drawn + number]) for number in _FEW_SITES]
    except Exception:  # a method of one's own that needs all of them says so with all of them
        return None
    result = []
    for values in zip(*map(_numbers, few), strict=True):
        if _parabola(values[:3], _FEW_SITES[3]) != values[3]:
            return None
        result.append(int(_parabola(values[:3], len(sites) - drawn)))
    start, first, later, finish = (Traffic(*result[index : index + 2]) for index in (0, 2, 4, 6))
    return DryRun(start, first, later, finish, min(dry.visit for dry in few), min(dry.save for dry in few))


def _numbers(dry: DryRun) -> tuple[int, ...]:
    return tuple(number for item in (dry.start, dry.first, dry.later, dry.finish) for number in (item.up, item.down))


def _parabola(values: Sequence[int], at: int) -> Fraction:
    """The value at a number of sites of the parabola through the first three of `_FEW_SITES`."""
    total = Fraction(0)
    for node, value in zip(_FEW_SITES, values, strict=False):
        others = [other for other in _FEW_SITES[:3] if other != node]
        total += value * Fraction(
            math.prod(at - other for other in others), math.prod(node - other for other in others)
        )
    return total


def traffic(planned: PlannedRun, network: Network, dry: DryRun) -> Traffic:
    """Bytes of a run, the samples included that leave their sites before a pooled method trains."""
    split, size = planned.split, planned.training.batch_size
    trained = sum(
        planned.budget[site] * len(rows) / batches_per_epoch(len(rows), size)
        for site, rows in {**split.train, **split.unlabelled}.items()
    )
    share = trained_of(planned) / max(1, sum(planned.budget.values()))
    plan = RunPlan(
        dry=dry.of(planned.rounds) + dry.finish,
        dry_samples={site: min(SAMPLES, len(rows)) for site, rows in split.train.items()},
        network=network,
        input_shape=planned.plan.data.input_shape,
        samples={site: len(rows) for site, rows in split.train.items()},
        targets=len(split.unlabelled),
        rounds=planned.rounds,
        trained=round(trained * share),
        sums_only=planned.experiment.engine.sums_only,
    )
    return planned.run.method.traffic(plan) + Traffic(up=sum(planned.pooled_bytes.values()), down=0)


def trained_of(planned: PlannedRun) -> int:
    """Mini-batches that all sites together train on in a run."""
    return trained_by_all(planned.run.method, planned.training, planned.split, planned.budget, planned.drawn)


@dataclass(frozen=True, kw_only=True)
class _WithNetwork(Setting):
    """A setting whose sites share one network, which is built already."""

    built: Network

    def build_network(self) -> Network:
        return self.built


class _DryFederation(LocalFederation):
    """A federation that tells how long it takes to save what its sites remember."""

    def seconds_to_save(self) -> float:
        """Of one site, into a folder that is deleted again."""
        runners = list(self._runners.items())[:_TIMED_SITES]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for name, runner in runners:
                runner.site.memory.save(Path(folder) / name, 0)
        return (time.perf_counter() - began) / max(1, len(runners))


def _few(parts: Sequence[tuple[Domain, Rows, int]], samples: int) -> list[tuple[Domain, Rows, int]]:
    return [(domain, rows[:samples], number) for domain, rows, number in parts]


def _page(federation: LocalFederation) -> Traffic:
    """Bytes since the last call."""
    federation.settle()
    _, totals = federation.ledger.settle()
    return Traffic(*(sum(totals[direction].values()) for direction in ("up", "down")))


@dataclass(frozen=True)
class Spent:
    """What an experiment costs a site."""

    run: float  # ε of its most expensive run
    together: float  # ε of all runs, for someone who sees the models of all
    delta: float  # δ of both


def spent_by_experiment(plan: Plan) -> dict[str, Spent]:
    """What an experiment costs each site; empty where it is not private."""
    privacy = plan.experiment.training.privacy
    if privacy is None:
        return {}
    runs: dict[str, list[SitePrivacy]] = {}
    for planned in plan.runs:
        for site, run in planned.privacy.items():
            runs.setdefault(site, []).append(run)
    delta = privacy.delta
    return {
        site: Spent(
            max(run.epsilon for run in all_runs),
            epsilon([NoisySteps(run.noise_multiplier, run.sample_rate, run.steps) for run in all_runs], delta),
            delta,
        )
        for site, all_runs in sorted(runs.items())
    }
