"""Sets up and carries out one run of a simulation, in this process or in a pool of workers."""

from __future__ import annotations

from typing import Any

import torch

from fedshift.evaluation.records import RunResult
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.fits.sealed_routing import measured_parts
from fedshift.experiment.plan import PlannedRun
from fedshift.experiment.runs.context import Context, Workers
from fedshift.experiment.runs.evaluator import Evaluator
from fedshift.experiment.runs.round_loop import train_and_evaluate
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation


def carry_out(context: Context, workers: Workers, planned: PlannedRun, folder: RunFolder) -> RunResult:
    """Carry out one run to its result, from its last checkpoint or from its beginning."""
    engine = planned.experiment.engine
    shown = planned.shown_data
    sites, setting = planned.sites(shown), planned.setting(context.device)
    network = setting.build_network().to(context.device)
    folder.write_settings()
    experiment, device = planned.experiment, torch.device(context.device)
    resamples, data = experiment.evaluation.resamples, planned.data
    new_site = experiment.protocol.new_site_of(planned.run.method, data.input_shape, planned.split)
    measured = measured_parts(planned.run.method, engine.routing, planned.split)
    options: dict[str, Any] = {
        "budget": site_budget(planned.budget, sites),
        "rounds": max(1, planned.rounds),
        "quorum": engine.quorum,
        "on_refusal": engine.on_refusal,
        "sums_only": engine.sums_only,
        "per_round": planned.drawn,
        "on_answer": context.reporter.trained,
    }
    pool = workers.pool_for(shown)
    federation: Federation = (
        PoolFederation(pool, sites, setting, **options)
        if pool
        else LocalFederation(sites, setting, side_by_side=engine.sites == "side_by_side", **options)
    )
    own = federation.own_weights if experiment.protocol.by_site else None
    evaluator = Evaluator(data, measured, device, experiment.model, resamples, new_site, own)
    return train_and_evaluate(context, planned, folder, federation, evaluator, network)
