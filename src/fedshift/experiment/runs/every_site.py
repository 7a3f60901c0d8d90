"""Trains one model at every site. No site is left out, nothing is held out, and nothing is measured or stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedshift.data.domain import DataSet
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import threads_set
from fedshift.experiment.plan import Plan, PlannedRun, model_metadata
from fedshift.experiment.protocols.base import Split
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods.rounds import play_round, start_run
from fedshift.methods.screening import screening_of
from fedshift.models.adapters import merge_adapters
from fedshift.weights import Weights


@dataclass(frozen=True)
class TrainedEverywhere:
    """What `train_everywhere` made."""

    weights: Weights  # the model
    metadata: dict[str, Any]  # what a model file says about it
    bytes_up: dict[str, int]  # bytes that left the sites, per kind
    rounds: int  # the rounds that it took
    warnings: tuple[str, ...]  # what is unusual about the data and the method's options on them


class _EverySite(Plan):
    """A plan of one run per method and seed, in which all sites are sources and there is no target."""

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return ("",)

    def roles(self, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.data.domains), ()

    def _split(self, target: str, seed: int) -> Split:
        rows = {name: np.arange(len(domain), dtype=np.int64) for name, domain in self.data.domains.items()}
        return Split(rows, {name: np.arange(0) for name in rows}, {})

    def _data_for(self, target: str) -> DataSet:
        return self.data


def train_everywhere(experiment: Experiment, data: DataSet) -> TrainedEverywhere:
    """Train the experiment's first method, with its first seed, at every site of ``data``.

    UserError if method, network and data do not fit. TrainingDiverged if weights or losses are no longer finite.
    """
    plan = _EverySite(experiment, data)
    warnings = check_fit(plan)
    planned = plan.runs[0]
    with threads_set(experiment.engine.thread_count()):
        weights, federation = _train(planned, resolve_device(experiment.device))
    return TrainedEverywhere(
        weights=weights,
        metadata=model_metadata(planned),
        bytes_up=federation.ledger.total["up"],
        rounds=federation.round,
        warnings=(*data.warnings, *warnings),
    )


def _train(planned: PlannedRun, device: str) -> tuple[Weights, LocalFederation]:
    method, setting, sites = planned.run.method, planned.setting(device), planned.sites(planned.data)
    network = setting.build_network().to(device)
    rounds = max(1, planned.rounds)
    federation = LocalFederation(sites, setting, budget=site_budget(planned.budget, sites), rounds=rounds)
    start = Weights({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()})
    federation.screening = screening_of(method, start)
    state = start_run(method, federation, start)
    averaging = method.at_server(start).average
    while True:
        federation.settle()
        federation.ledger.settle()
        if federation.progress.exchange:  # else the start asked no site, and there is no model yet
            state = replace(state, averaged=averaging.after(state.averaged, state.weights, state.round / rounds))
        if federation.is_exhausted() or state.round >= rounds:
            mean = averaging.handed_out(state.averaged, last=True)
            evaluated = method.evaluated_network(network, len(planned.split.train))
            return merge_adapters(evaluated, state.weights if mean is None else mean), federation
        state = play_round(method, federation, state)
