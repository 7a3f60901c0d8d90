"""One run: a method, an unseen target, a seed; its sites and its network, in this process or a pool of workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedshift.evaluation.records import RunResult
from fedshift.experiment.plan import Run, budgets, rounds_needed, site_budget, site_plans
from fedshift.experiment.protocol import split_of, with_wrong_labels
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.evaluator import Evaluator
from fedshift.experiment.runs.round_loop import conduct
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation
from fedshift.federation.site_runner import Setting


def carry_out(context: Context, run: Run, folder: RunFolder) -> RunResult:
    """One run from its last checkpoint, or its beginning, to its result."""
    experiment, method = context.experiment, run.method
    data = context.encoded_for(run.target)
    context = replace(context, data=data)
    split = split_of(experiment.protocol, data, run.target, run.seed)
    budget = budgets(method, experiment.methods, experiment.training, split)
    setting = Setting(
        method=method,
        training=experiment.training,
        network=experiment.model,
        preprocessing=data.preprocessing,
        input_shape=data.input_shape,
        classes=len(data.classes),
        sources=len(split.train),
        seed=run.seed,
        device=context.device,
        refuse=frozenset(experiment.engine.refuse),
        on_refusal=experiment.engine.on_refusal,
    )
    shown = with_wrong_labels(experiment.protocol, data, split, run.seed)
    if context.pool is not None and shown is not data:
        context.pool.forget()  # of the labels of an earlier run
    own = experiment.engine.refuse_at
    plans = [replace(plan, refuse=frozenset(own.get(plan.name, ()))) for plan in site_plans(method, shown, split)]
    network = setting.build_network().to(context.device)
    folder.claim()
    evaluator = Evaluator(data, split, torch.device(context.device), experiment.model)
    options: dict[str, Any] = {
        "budget": site_budget(budget, plans),
        "rounds": max(1, rounds_needed(method, experiment.training, split, budget)),
        "quorum": experiment.engine.quorum,
        "on_refusal": experiment.engine.on_refusal,
        "on_answer": context.reporter.trained,
    }
    federation: Federation = (
        PoolFederation(context.pool, plans, setting, **options)
        if context.pool
        else LocalFederation(plans, setting, **options)
    )
    return conduct(context, run, folder, federation, evaluator, split, network)
