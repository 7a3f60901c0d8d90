"""One run from its plan to its result, to be read from above: plan, sites, rounds, measure, record.

A round is played by `fedshift.methods.rounds`, and what is written of it by `run_log`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fedshift.evaluation.predictions import as_parquet
from fedshift.evaluation.records import ERRORS, RunResult
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.fits.sealed_routing import measured_parts
from fedshift.experiment.fits.side_by_side import trains_side_by_side
from fedshift.experiment.plan import PlannedRun, Run, model_metadata
from fedshift.experiment.runs.context import Context, Workers
from fedshift.experiment.runs.evaluator import Evaluator, Final
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.experiment.runs.run_log import RunLog, failures_noted
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation
from fedshift.methods.base import State
from fedshift.methods.rounds import finish_run, play_round, start_run
from fedshift.methods.screening import screening_of
from fedshift.models.adapters import merge_adapters
from fedshift.models.network import Network
from fedshift.weights import Weights


class Evaluating(Protocol):
    """Evaluates a model after a round."""

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """The fields ``target_accuracy``, ``source_accuracy`` and ``per_class`` of a `RoundRecord`."""
        ...

    def final(self, network: Network, weights: Weights) -> Final:
        """The same fields, and what is measured only once, after the last round."""
        ...


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
        "on_answer": context.reporter.on_trained,
    }
    together = trains_side_by_side(engine, planned.run.method, setting, network)
    pool = workers.pool_for(shown)
    federation: Federation = (
        PoolFederation(pool, sites, setting, **options)
        if pool
        else LocalFederation(sites, setting, side_by_side=together, **options)
    )
    own_weights = federation.own_weights if experiment.protocol.by_site else None
    evaluator = Evaluator(data, measured, device, experiment.model, resamples, new_site, own_weights)
    return train_and_evaluate(context, planned, folder, federation, evaluator, network)


def train_and_evaluate(
    context: Context,
    planned: PlannedRun,
    folder: RunFolder,
    federation: Federation,
    evaluator: Evaluating,
    network: Network,
) -> RunResult:
    """Training loop of one run: round, evaluate, log, checkpoint.

    Args:
        context: what all runs of the experiment share.
        folder: the run's folder. The run resumes from its checkpoint if there is one.
        federation: the run's sites, on this machine or on others.
        network: what sites train, with the weights that the run starts from.

    Raises:
        TrainingDiverged: weights or losses are no longer finite.
        UserError: the device has too little memory.
        FedshiftError: the method breaks its contract.
    """
    loop = _RunLoop(context, planned, folder, federation, evaluator, RunLog(context, planned, folder, federation))
    with failures_noted(context, planned, folder):
        return loop.to_the_end(network, planned.run.method.evaluated_network(network, len(planned.split.train)))


@dataclass
class _RunLoop:
    """The rounds of one run in this process."""

    context: Context
    planned: PlannedRun
    folder: RunFolder
    federation: Federation
    evaluator: Evaluating
    log: RunLog
    final: Final | None = None

    @property
    def run(self) -> Run:
        return self.planned.run

    def to_the_end(self, trained: Network, evaluated: Network) -> RunResult:
        """Start or resume, then run rounds until the budget is used, or the planned rounds are done.

        The run stops after the planned rounds even if budget is left: otherwise a site that spends less than it
        announced keeps the run alive after the others have finished.

        ``trained``: what sites train, with the weights that the run starts from; ``evaluated``: the network that
        ``state.weights`` belong to.
        """
        method, federation = self.run.method, self.federation
        # A copy: measuring loads other models into this network, and a method may keep tensors of the start.
        start = Weights({name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()}).clone()
        self.log.screening = federation.screening = screening_of(method, start)
        state = self.log.resume()
        total = sum(federation.budget.values())
        self.context.reporter.run(self.run, total, sum(federation.progress.used.values()))
        if state is None:
            self.folder.restart()
            self.log.record_pooling()
            state = start_run(method, federation, start)
            state = self._close_round(evaluated, state, last=False)
        while not self._is_done(state):
            self.context.stop()
            state = play_round(method, federation, state)
            federation.settle()
            state = self._close_round(evaluated, state, last=self._is_done(state))
        return self._finish(evaluated, state)

    def _is_done(self, state: State) -> bool:
        return self.federation.is_exhausted() or state.round >= self.federation.rounds

    def _close_round(self, network: Network, state: State, *, last: bool) -> State:
        """Evaluate the round, log it, then save the checkpoint. A kill between any two loses only this round."""
        self.federation.settle()
        if state.round == 0 and self.federation.progress.exchange == 0:
            return state  # no exchange yet, so there is nothing to save
        averaging, rounds = self.run.method.at_server(state.weights).average, self.federation.rounds
        state = replace(state, averaged=averaging.after(state.averaged, state.weights, state.round / max(1, rounds)))
        measured = state.round % self.planned.experiment.training.measure_every == 0
        model = self._handed_out(state, last=last)
        if last:
            finish_run(self.run.method, self.federation, model)
        results: dict[str, Any] = {"target_accuracy": {}}
        if last:
            self.final = self.evaluator.final(network, model)
            results = self.final.record
        elif measured:
            results = self.evaluator.measure(network, model)
        if not last:
            judged = averaging.judge(state.averaged, results.get("source_accuracy", {}), self.run.metric in ERRORS)
            state = replace(state, averaged=judged)
        record = self.log.record(state, results)
        self.context.reporter.round(self.run, record)
        for callback in self.context.callbacks:
            callback.after_round(self.run, record, self.folder.path)
        self.log.save_checkpoint(state)
        return state

    def _handed_out(self, state: State, *, last: bool) -> Weights:
        """The model that is measured after a round, and written down after the last."""
        mean = self.run.method.at_server(state.weights).average.handed_out(state.averaged, last=last)
        return state.weights if mean is None else mean

    def _finish(self, network: Network, state: State) -> RunResult:
        """Write the model, the predictions and the result."""
        model = self._handed_out(state, last=True)
        final = self.final or self.evaluator.final(network, model)  # killed between the last round and its result
        result = self.log.result(state, final)
        metadata = model_metadata(self.planned)
        self.folder.save_model(merge_adapters(network, model), metadata)
        if final.predictions and self.planned.experiment.evaluation.predictions:
            self.folder.save_predictions(as_parquet(final.predictions, result.classes, metadata))
        self.folder.finish(result)
        return result
