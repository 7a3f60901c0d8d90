"""The training loop of one run, whatever engine its sites run on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedshift.claims import ClaimLost
from fedshift.errors import TrainingDiverged, UserError, is_out_of_memory
from fedshift.evaluation.predictions import as_parquet
from fedshift.evaluation.records import ERRORS, RoundRecord, RunResult
from fedshift.evaluation.selection import selected_rounds
from fedshift.evaluation.site_bytes import site_bytes
from fedshift.experiment.environment import Usage, versions
from fedshift.experiment.plan import PlannedRun, Run, model_metadata
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.evaluator import Final
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.experiment.runs.stopping import Stopped
from fedshift.experiment.unlabelled_sites import without_labels
from fedshift.federation.federation import Federation
from fedshift.federation.messages import RawData
from fedshift.federation.training import exploded
from fedshift.methods.base import State
from fedshift.methods.rounds import play_round
from fedshift.methods.screening import Screening, screening_of
from fedshift.models.adapters import merged
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
        planned: the run.
        folder: the run's folder. The run resumes from its checkpoint if there is one.
        federation: the run's sites, on this machine or on others.
        evaluator: measures a model after a round.
        network: what sites train, with the weights that the run starts from.

    Raises:
        TrainingDiverged: weights or losses are no longer finite.
        UserError: the device has too little memory.
        FedshiftError: the method breaks its contract.
    """
    run, training = planned.run, planned.training
    loop = _RunLoop(context, planned, folder, federation, evaluator)
    try:
        return loop.to_the_end(network, run.method.evaluated_network(network, len(planned.split.train)))
    except TrainingDiverged as error:
        lr = f"{training.lr:g}"
        more = "" if lr in str(error) else f" (training.lr is {lr})"
        where = f"{run.method.display}, target {run.target}, seed {run.seed}"
        diverged = TrainingDiverged(f"{where}: {error}{more}")
        folder.note_failure(diverged)
        raise diverged from error
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"out of memory on {context.device}: lower training.batch_size or engine.workers, or take a smaller "
                "model"
            ) from error
        folder.note_failure(error)
        raise
    except (ClaimLost, Stopped):
        raise  # the run is not at fault, and a lost folder is another process's
    except Exception as error:
        folder.note_failure(error)
        raise


@dataclass
class _RunLoop:
    """The state of one run in this process."""

    context: Context
    planned: PlannedRun
    folder: RunFolder
    federation: Federation
    evaluator: Evaluating
    records: list[RoundRecord] = field(default_factory=list)
    seconds: float = 0.0
    screening: Screening | None = None
    final: Final | None = None
    clock: float = field(default_factory=time.perf_counter)
    usage: Usage | None = field(default_factory=Usage)
    """What this process needed for the run; None if another one began it."""

    @property
    def run(self) -> Run:
        return self.planned.run

    def to_the_end(self, trained: Network, evaluated: Network) -> RunResult:
        """Start or resume, then run rounds until the budget is used, or the planned rounds are done.

        Every site spends its budget in the planned rounds. One that spends less than it announced would keep the others
        voting with models that they no longer train.

        Args:
            trained: what sites train, with the weights that the run starts from.
            evaluated: the network that ``state.weights`` belong to.
        """
        method, federation = self.run.method, self.federation
        start = Weights({name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()})
        self.screening = federation.screening = screening_of(method, start)
        state = self._resume()
        total = sum(federation.budget.values())
        self.context.reporter.run(self.run, total, sum(federation.progress.used.values()))
        if state is None:
            self.folder.restart()
            self._record_pooling()
            state = method.start(federation, start)
            state = self._close_round(evaluated, state, last=False)
        while not self._is_done(state):
            self.context.stop()
            state = play_round(method, federation, state)
            federation.settle()
            state = self._close_round(evaluated, state, last=self._is_done(state))
        return self._finish(evaluated, state)

    def _is_done(self, state: State) -> bool:
        return self.federation.exhausted() or state.round >= self.federation.rounds

    def _resume(self) -> State | None:
        """Restore the last checkpoint. None if there is none."""
        found = self.folder.load_checkpoint()
        if found is None:
            return None
        state, header = found
        self.usage = None
        progress, ledger = self.federation.progress, self.federation.ledger
        progress.exchange, progress.used = header["exchange"], header["used"]
        progress.undrawn = header.get("undrawn", 0)
        self.federation.budget.update(header.get("budget", {}))
        ledger.restore(header)
        self.seconds = header["seconds"]
        now = self._environment()
        for name, then in header.get("environment", {}).items():
            if now.get(name) != then:
                self.context.reporter.warn(
                    f"{self.folder.path} was started with {name} {then} and resumes with {now.get(name)}: weights may "
                    "differ in their last bits from an uninterrupted run"
                )
        try:
            self.federation.load_memory(self.folder.memory, header["memory"])
        except UserError as error:
            raise UserError(f"{error}; to start this run again, delete {self.folder.path}") from None
        self.records = self.folder.records(state.round, header.get("rounds_sha256"))
        return state

    def _record_pooling(self) -> None:
        """Record in the ledger the samples that leave the sites for the pool."""
        for name, size in self.planned.pooled_bytes.items():
            samples = RawData({"samples": torch.empty(size, dtype=torch.uint8, device="meta")})
            self.federation.ledger.record(0, "pool", name, "up", {"samples": samples})

    def _close_round(self, network: Network, state: State, *, last: bool) -> State:
        """Evaluate the round, log it, then save the checkpoint. A kill between any two loses only this round."""
        self.federation.settle()
        if state.round == 0 and self.federation.progress.exchange == 0:
            return state  # no exchange yet, so there is nothing to save
        averaging, rounds = self.run.method.averaging, self.federation.rounds
        state = replace(state, averaged=averaging.after(state.averaged, state.weights, state.round / max(1, rounds)))
        measured = state.round % self.planned.experiment.training.measure_every == 0
        model = self._handed_out(state, last=last)
        results: dict[str, Any] = {"target_accuracy": {}}
        if last:
            self.final = self.evaluator.final(network, model)
            results = self.final.record
        elif measured:
            results = self.evaluator.measure(network, model)
        if not last:
            judged = averaging.judged(state.averaged, results.get("source_accuracy", {}), self.run.metric in ERRORS)
            state = replace(state, averaged=judged)
        _, page = self.federation.ledger.settle()
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.seconds += seconds
        report = self._report(state)
        self._check_losses(report.get("losses", {}), state.round)
        record = RoundRecord(
            round=state.round,
            metric=self.run.metric,
            seconds=seconds,
            mini_batches=self._mini_batches(),
            bytes=page,
            losses=report.pop("losses", {}),
            aggregation_weights=report.pop("aggregation_weights", {}),
            extra=report,
            **results,
        )
        self.records.append(record)
        self.folder.append(record)
        self.context.reporter.round(self.run, record)
        for callback in self.context.callbacks:
            callback.after_round(self.run, record, self.folder.path)
        self._save_checkpoint(state)
        return state

    def _handed_out(self, state: State, *, last: bool) -> Weights:
        """The model that is measured after a round, and written down after the last."""
        mean = self.run.method.averaging.handed_out(state.averaged, last=last)
        return state.weights if mean is None else mean

    def _report(self, state: State) -> dict[str, Any]:
        """The method's report of its round, and which sites were missing or refused. Warns of new entries."""
        report = dict(state.report)
        known = self._method_warnings()
        for warning in report.get("warnings", []):
            if warning not in known:
                self.context.reporter.warn(f"{self.run.target}, seed {self.run.seed}: {warning}")
        if self.planned.privacy:
            report.pop("losses", None)  # the sites send none
        self._report_screened(report)
        if self.federation.per_round is not None and state.round:
            report["drawn"] = list(self.federation.drawn)
        self._report_missing(report)
        self._report_refused(report)
        return report

    def _report_screened(self, report: dict[str, Any]) -> None:
        """What a rule of robust aggregation did with the round's replies."""
        if self.screening is None or not (screened := self.screening.settle()):
            return
        report["robust"] = screened
        if self.screening.rule.one_model:
            report.pop("aggregation_weights", None)  # one model took the place of all: no site's share counted

    def _report_missing(self, report: dict[str, Any]) -> None:
        """Which sites did not answer, and why."""
        if missing := self.federation.missing:
            report["missing"] = dict(missing)
            for reason in missing.values():
                self.context.reporter.warn(f"{self.run.method.display} continues without a site: {reason}")
            missing.clear()

    def _report_refused(self, report: dict[str, Any]) -> None:
        """What sites refused to send."""
        if refused := self.federation.refused:
            report["refused"] = dict(refused)
            before = self._refusals()
            for reason in itertools.chain.from_iterable(refused.values()):
                if reason not in before:
                    self.context.reporter.warn(f"{self.run.method.display} continues without it: {reason}")
            refused.clear()

    def _check_losses(self, losses: Mapping[str, float], number: int) -> None:
        """Raise TrainingDiverged if a site's loss explodes, compared with its first one of the run."""
        for site, loss in losses.items():
            before = next((record.losses[site] for record in self.records if site in record.losses), loss)
            if exploded(loss, before):
                grown = f"the loss of site '{site}' was {before:.3g} at first and is {loss:.3g} in round {number}"
                raise TrainingDiverged(f"{grown}: lower training.lr or set training.clip_norm")

    def _save_checkpoint(self, state: State) -> None:
        federation = self.federation
        memory = federation.save_memory(self.folder.memory)
        header = {
            "exchange": federation.progress.exchange,
            "used": federation.progress.used,
            "undrawn": federation.progress.undrawn,
            "budget": federation.budget,
            **federation.ledger.saved(),
            "seconds": self.seconds,
            "environment": self._environment(),
        }
        self.folder.save_checkpoint(state, memory, header)

    def _environment(self) -> dict[str, Any]:
        """What the last bits of the weights depend on: threads, device, versions."""
        return {"threads": self.context.threads, "device": self.context.device, **versions()}

    def _refusals(self) -> list[str]:
        """The sites' refusals in the rounds so far, without duplicates."""
        pages = [record.extra.get("refused", {}) for record in self.records]
        return list(dict.fromkeys(reason for page in pages for reasons in page.values() for reason in reasons))

    def _method_warnings(self) -> list[str]:
        """The method's warnings in the rounds so far, without duplicates."""
        return list(dict.fromkeys(text for record in self.records for text in record.extra.get("warnings", [])))

    def _mini_batches(self) -> int:
        """Mini-batches so far per source: the mean over the sources, also if their samples are pooled."""
        progress = self.federation.progress
        return round((sum(progress.used.values()) - progress.undrawn) / len(self.planned.split.train))

    def _finish(self, network: Network, state: State) -> RunResult:
        """Write the model, the predictions and the result."""
        model = self._handed_out(state, last=True)
        final = self.final or self.evaluator.final(network, model)  # killed between the last round and its result
        result = self._result(state, final)
        metadata = model_metadata(self.planned)
        self.folder.save_model(merged(network, model), metadata)
        if final.predictions and self.planned.experiment.evaluation.predictions:
            self.folder.save_predictions(as_parquet(final.predictions, result.classes, metadata))
        self.folder.finish(result)
        return result

    def _result(self, state: State, final: Final) -> RunResult:
        context, planned, run, data = self.context, self.planned, self.run, self.planned.data
        labelled, unlabelled = planned.plan.roles(run.target)
        both = planned.experiment.protocol.both_sides
        return RunResult(
            method=run.method.display,
            target=run.target,
            labelled=list(labelled) if both else [],
            unlabelled=list(unlabelled) if both else [],
            seed=run.seed,
            metric=run.metric,
            without_labels=without_labels(planned),
            selected=selected_rounds(self.records, self.run.metric in ERRORS, measured=bool(planned.split.measured)),
            sites=list(final.sites),
            classes=list(data.classes),
            rounds=state.round,
            seconds=self.seconds,
            processor_seconds=self.usage and self.usage.seconds(),
            memory=self.usage and self.usage.memory(),
            mini_batches=self._mini_batches(),
            bytes_up=self.federation.ledger.total["up"],
            bytes_down=self.federation.ledger.total["down"],
            bytes_by_site=site_bytes(self.federation.ledger.by_site),
            versions=versions(),
            threads=context.threads,
            device=context.device,
            warnings=[
                *data.warnings,
                *planned.plan.site_differences,
                *(f"continued without it: {reason}" for reason in self._refusals()),
                *self._method_warnings(),
            ],
            setting=run.method.described_setting,
            privacy=planned.privacy,
            options=self.folder.identity,
            data=self._data_record() | ({"proxy_a_distance": context.distances_of(planned)} if both else {}),
        )

    def _data_record(self) -> dict[str, Any]:
        """The data that the run was trained and measured on: name, fingerprint, shape and numbers of samples."""
        split, plan = self.planned.split, self.planned.plan
        deviations = ((name, plan.measurement_noise(name), len(rows)) for name, rows in split.measured.items())
        noise = {name: 100.0 * one / samples for name, one, samples in deviations if one is not None and samples}
        return ({"measurement_noise": noise} if noise else {}) | {
            "name": self.planned.data.name,
            "fingerprint": self.planned.plan.fingerprint,
            "input_shape": list(self.planned.data.input_shape),
            "training_samples": {name: len(rows) for name, rows in split.train.items()},
            "held_out_samples": {name: len(rows) for name, rows in split.held_out.items()},
            "measured_samples": {name: len(rows) for name, rows in split.measured.items()},
            "unlabelled_samples": {name: len(rows) for name, rows in split.unlabelled.items()},
        }
