"""The coordinator's side of a deployed experiment: agree with the sites, then every (method, target, seed) in turn.

It knows names, shapes, classes and numbers of samples; samples are only those of its own unseen set, where it has one.
An engine calls `coordinate` in the process of its job; all that has to outlive the job lies in the deployment's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedshift.data.builders.at_sites import AtSites
from fedshift.deployment.event_log import Watch
from fedshift.deployment.handshake import Agreed, agree, encoded_for, fingerprint_of, split_for, split_rule, targets_of
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment, method_name, parse
from fedshift.experiment.config.sections import AdaptToOne, FlareEngine, LeaveOneOut, SourceTarget
from fedshift.experiment.environment import resolve_device, threads_set
from fedshift.experiment.plan import Run, budgets, rounds_needed, site_budget, site_plans
from fedshift.experiment.protocol import Split
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.evaluator import Evaluator
from fedshift.experiment.runs.round_loop import conduct
from fedshift.experiment.runs.run_folder import run_folder, write_order
from fedshift.federation.remote.remote_federation import RemoteFederation
from fedshift.federation.remote.transport import Transport, ask_plain
from fedshift.federation.setting_json import setting_recipe
from fedshift.federation.site_runner import Setting
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.models.options import NetworkOptions
from fedshift.weights import Weights

EXPERIMENT, CARDS, PROGRESS = "experiment.json", "cards.json", "progress.jsonl"
CLOCKS_APART = 60.0
"""Seconds by which clocks may differ before the coordinator says so."""
EVERY_SITE = "sites"
"""As a target: no site is left out, and the model is measured on the held-out samples of all of them."""


def check_deployable(experiment: Experiment) -> FlareEngine:
    """The engine of an experiment that can be deployed. Raises UserError for one that cannot."""
    if not isinstance(experiment.engine, FlareEngine):
        raise UserError("engine.name: write engine: {name: flare} in an experiment that is deployed")
    if not isinstance(experiment.data, AtSites):
        raise UserError(
            f"data.name: {experiment.data.name} lies on this machine; write data: {{name: sites}}, and each site its "
            "own data in its SITE.yaml (fedshift project try plays such a federation with data on this machine)"
        )
    if isinstance(experiment.protocol, SourceTarget):
        raise UserError("protocol.kind: source_target is a simulation; deploy leave_one_out or adapt_to_one")
    for method in experiment.methods:
        if method.pooled:
            raise UserError(f"methods: {method.display} needs all samples in one place and cannot be deployed")
        name = method_name(method)
        if name.partition(":")[0].endswith(".py"):
            raise UserError(
                f"methods: {method.display} is a file, and no code travels; install it as a package at every site and "
                "name it package.module:Class, which sites must allow in policy.methods"
            )
    if isinstance(experiment.protocol, AdaptToOne) and experiment.protocol.wrong_labels:
        raise UserError("protocol.wrong_labels: only a simulation can make labels wrong; sites keep theirs")
    return experiment.engine


def coordinate(folder: Path, transport: Transport, sites: Sequence[str]) -> None:
    """Run what is not finished of the deployment in ``folder``.

    Raises NewJobNeeded when the run has to go on in a new job, UserError and FedshiftError for what ends it.
    """
    experiment = parse(json.loads((folder / EXPERIMENT).read_text(encoding="utf-8")))
    engine = check_deployable(experiment)
    watch = Watch(folder / PROGRESS)
    dropped = experiment.protocol.drop if isinstance(experiment.protocol, AdaptToOne) else ()
    with threads_set(engine.thread_count()):
        agreed = agree(experiment, transport, [site for site in sites if site not in dropped], folder, engine, watch)
        for warning in agreed.data.warnings:
            watch.warn(warning)
        targets = targets_of(experiment, agreed)
        check_fit(experiment, agreed.data, targets)
        fingerprint = fingerprint_of(agreed)
        context = Context(
            experiment,
            agreed.data,
            fingerprint,
            resolve_device(experiment.device),
            torch.get_num_threads(),
            None,
            watch,
        )
        runs = folder / "runs" / experiment.name
        write_order(experiment, targets, runs)
        planned = [
            Run(method, target, seed)
            for seed in experiment.protocol.seeds
            for target in targets
            for method in experiment.methods
        ]
        watch.begin(len(planned))
        for run in planned:
            _one(context, agreed, run, transport, engine, runs, watch)


def _one(
    context: Context,
    agreed: Agreed,
    run: Run,
    transport: Transport,
    engine: FlareEngine,
    runs: Path,
    watch: Watch,
) -> None:
    """One run from its last checkpoint, or its beginning, to its result."""
    experiment, method = context.experiment, run.method
    agreed = encoded_for(experiment, agreed, run.target)
    context = replace(context, data=agreed.data)
    split = split_for(experiment, agreed, run)
    place = run_folder(experiment, split, context.fingerprint, run, runs)
    place.identity["wire"] = engine.wire
    place.check_identity()
    finished = place.result()
    if finished is not None:
        watch.finished(run, finished, resumed=True)
        return
    deadline = time.monotonic() + 60
    while not place.acquire():  # a job that has just died may still hold it
        if time.monotonic() > deadline:
            raise FedshiftError(f"{place.path} is held by another job")
        time.sleep(0.5)
    with place:
        budget = budgets(method, experiment.methods, experiment.training, split)
        setting = Setting(
            method=method,
            training=experiment.training,
            network=experiment.model,
            preprocessing=agreed.data.preprocessing,
            input_shape=agreed.data.input_shape,
            classes=len(agreed.data.classes),
            sources=len(split.train),
            seed=run.seed,
            device=context.device,
            refuse=frozenset(engine.refuse),
            on_refusal=engine.on_refusal,
        )
        network = setting.build_network().to(context.device)
        plans = site_plans(method, agreed.data, split)
        name = f"{experiment.name}-{method.display}-{run.target}-seed-{run.seed}"
        numbers = {plan.name: (plan.role, plan.parts[0][2]) for plan in plans}
        federation = RemoteFederation(
            method,
            transport,
            run=name,
            recipe=_recipe(setting),
            parts={site: _part(experiment, agreed, run, site, numbers.get(site)) for site in agreed.sites},
            like=network.state_dict(),
            samples={plan.name: len(plan.parts[0][1]) for plan in plans},
            deadline=engine.deadline,
            quorum=engine.quorum,
            on_refusal=engine.on_refusal,
            wire=engine.wire,
            patience=engine.patience,
            on_event=watch.event,
            sources=[plan.name for plan in plans if plan.role == "source"],
            targets=[plan.name for plan in plans if plan.role == "target"],
            budget=site_budget(budget, plans),
            rounds=max(1, rounds_needed(method, experiment.training, split, budget)),
            on_answer=watch.trained,
        )
        place.claim()
        evaluator = _AtSites(agreed, split, federation, run, torch.device(context.device), experiment.model)
        result = conduct(context, run, place, federation, evaluator, split, network)
        ask_plain(transport, "end", name, {site: {} for site in agreed.sites}, engine.patience)
        watch.finished(run, result, resumed=False)


def _recipe(setting: Setting) -> dict[str, Any]:
    """The setting as sites are told it: the method by its registered name, and not where anything lies."""
    recipe = setting_recipe(setting)
    assert isinstance(setting.method, Method)
    recipe["method"] = {"name": method_name(setting.method), "options": recipe["method"]["options"]}
    del recipe["device"]
    return recipe


def _part(
    experiment: Experiment, agreed: Agreed, run: Run, site: str, number: tuple[str, int] | None
) -> dict[str, Any]:
    """What a site is told of its own part in a run."""
    role, place = number or ("unseen", 0)
    shared = isinstance(experiment.protocol, LeaveOneOut) and experiment.protocol.base_images == "shared"
    return {
        "role": role,
        "number": place,
        "split": split_rule(experiment) | {"seed": run.seed},
        "whole": role == "unseen" and (not agreed.grouped[site] or shared),
        "fingerprint": agreed.fingerprints[site],
    }


# Measuring ------------------------------------------------------------------------------------------------------------


class _AtSites:
    """Measures a model where the samples are: at the sites, and here on the coordinator's own."""

    def __init__(
        self,
        agreed: Agreed,
        split: Split,
        federation: RemoteFederation,
        run: Run,
        device: torch.device,
        model: NetworkOptions,
    ) -> None:
        own = agreed.own is not None and run.target in agreed.own.domains
        self._here = Evaluator(agreed.own, Split({}, {}, split.measured), device, model) if own and agreed.own else None
        self._targets = [] if own else list(split.measured)
        self._sources = [site for site, rows in split.held_out.items() if len(rows)]
        self._federation, self._classes = federation, len(agreed.data.classes)

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """As `Evaluator.measure`; raises FedshiftError when the target's own site does not answer."""
        asked = list(dict.fromkeys([*self._sources, *self._targets]))
        found = self._federation.measure(weights, asked) if asked else {}
        missing = [site for site in self._targets if site not in found]
        if missing and len(missing) == len(self._targets):
            raise FedshiftError(
                f"round {self._federation.round}: target '{missing[0]}' did not measure the model; when it is back, go "
                "on with fedshift deploy resume"
            )
        sources = {site: found[site]["accuracy"] for site in self._sources if site in found}
        if self._here is not None:
            return {**self._here.measure(network, weights), "source_accuracy": sources}
        targets = [found[site] for site in self._targets if site in found]
        pairs = [[target["classes"][number] for target in targets] for number in range(self._classes)]
        return {
            "target_accuracy": {site: found[site]["accuracy"] for site in self._targets if site in found},
            "source_accuracy": sources,
            "per_class": [_recall(pair) for pair in pairs],
        }


def _recall(pairs: Sequence[tuple[int, int] | None]) -> float | None:
    """Accuracy in percent of one class over some sites; None where it is absent, or a site does not say."""
    if any(pair is None for pair in pairs):
        return None
    right, of = sum(pair[0] for pair in pairs if pair), sum(pair[1] for pair in pairs if pair)
    return 100.0 * right / of if of else None
