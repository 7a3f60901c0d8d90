"""What is written of a run: its rounds, what the method and the sites reported, checkpoints, and the result."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedshift.claims import ClaimLost
from fedshift.errors import TrainingDiverged, UserError, is_out_of_memory
from fedshift.evaluation.records import ERRORS, RoundRecord, RunResult
from fedshift.evaluation.selection import selected_rounds
from fedshift.evaluation.site_bytes import site_bytes
from fedshift.experiment.environment import Usage, versions
from fedshift.experiment.plan import PlannedRun, Run
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.evaluator import Final
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.experiment.runs.stopping import Stopped
from fedshift.federation.federation import Federation
from fedshift.federation.local.cards import kind_of
from fedshift.federation.messages import RawData
from fedshift.federation.training import has_exploded
from fedshift.methods.base import State
from fedshift.methods.composition.options import described_setting
from fedshift.methods.screening import Screening


@dataclass
class RunLog:
    """The records of one run in this process."""

    context: Context
    planned: PlannedRun
    folder: RunFolder
    federation: Federation
    records: list[RoundRecord] = field(default_factory=list)
    seconds: float = 0.0
    # the rule of robust aggregation at work in the run, which says what it did in each round
    screening: Screening | None = None
    clock: float = field(default_factory=time.perf_counter)
    # what this process needed for the run; None if another one began it
    usage: Usage | None = field(default_factory=Usage)

    @property
    def run(self) -> Run:
        return self.planned.run

    def resume(self) -> State | None:
        """Restore the last checkpoint. None if there is none."""
        checkpoint = self.folder.load_checkpoint()
        if checkpoint is None:
            return None
        state, beside = checkpoint
        self.usage = None
        progress, ledger = self.federation.progress, self.federation.ledger
        progress.exchange, progress.used, progress.undrawn = beside.exchange, beside.used, beside.undrawn
        self.federation.budget.update(beside.budget)
        ledger.restore(beside.bytes, beside.bytes_by_site)
        self.seconds = beside.seconds
        now = self._environment()
        for name, then in beside.environment.items():
            if now.get(name) != then:
                self.context.reporter.warn(
                    f"{self.folder.path} was started with {name} {then} and resumes with {now.get(name)}: weights may "
                    "differ in their last bits from an uninterrupted run"
                )
        try:
            self.federation.load_memory(self.folder.memory, beside.memory)
        except UserError as error:
            raise UserError(f"{error}; to start this run again, delete {self.folder.path}") from None
        self.records = self.folder.records(state.round, beside.rounds_sha256)
        return state

    def record_pooling(self) -> None:
        """Record in the ledger the samples that leave the sites for the pool."""
        for name, size in self.planned.pooled_bytes.items():
            samples = RawData({"samples": torch.empty(size, dtype=torch.uint8, device="meta")})
            self.federation.ledger.record(0, "pool", name, "up", {"samples": samples})

    def record(self, state: State, results: Mapping[str, Any]) -> RoundRecord:
        """The line of a round: what was measured, sent, and said by the method. Written to the run's folder."""
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
        return record

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
            if has_exploded(loss, before):
                grown = f"the loss of site '{site}' was {before:.3g} at first and is {loss:.3g} in round {number}"
                raise TrainingDiverged(f"{grown}: lower training.lr or set training.clip_norm")

    def save_checkpoint(self, state: State) -> None:
        federation = self.federation
        memory = federation.save_memory(self.folder.memory)
        header = {
            "exchange": federation.progress.exchange,
            "used": federation.progress.used,
            "undrawn": federation.progress.undrawn,
            "budget": federation.budget,
            **federation.ledger.to_checkpoint(),
            "seconds": self.seconds,
            "environment": self._environment(),
        }
        self.folder.save_checkpoint(state, memory, header)

    def _environment(self) -> dict[str, Any]:
        """What the last bits of the weights depend on: threads, device, versions."""
        return {"threads": self.context.threads, "device": kind_of(self.context.device), **versions()}

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

    def result(self, state: State, final: Final) -> RunResult:
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
            without_labels=planned.plan.without_labels(planned),
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
            device=kind_of(context.device),
            warnings=[
                *data.warnings,
                *planned.plan.site_differences,
                *(f"continued without it: {reason}" for reason in self._refusals()),
                *self._method_warnings(),
            ],
            setting=described_setting(run.method),
            privacy=planned.privacy,
            options=self.folder.identity,
            data=self._data_record() | ({"proxy_a_distance": context.distances_of(planned)} if both else {}),
        )

    def _data_record(self) -> dict[str, Any]:
        """The data that the run was trained and measured on: name, fingerprint, shape and numbers of samples."""
        split, plan = self.planned.split, self.planned.plan
        deviations = ((name, plan.measurement_noise(name), len(rows)) for name, rows in split.measured.items())
        noise = {name: 100.0 * item / samples for name, item, samples in deviations if item is not None and samples}
        return ({"measurement_noise": noise} if noise else {}) | {
            "name": self.planned.data.name,
            "fingerprint": self.planned.plan.fingerprint,
            "input_shape": list(self.planned.data.input_shape),
            "training_samples": {name: len(rows) for name, rows in split.train.items()},
            "held_out_samples": {name: len(rows) for name, rows in split.held_out.items()},
            "measured_samples": {name: len(rows) for name, rows in split.measured.items()},
            "unlabelled_samples": {name: len(rows) for name, rows in split.unlabelled.items()},
        }


@contextmanager
def failures_noted(context: Context, planned: PlannedRun, folder: RunFolder) -> Iterator[None]:
    """Note in the run's folder why it failed, and say which run it was.

    TrainingDiverged if with the run's names and learning rate. UserError if the device has too little memory.
    """
    run, training = planned.run, planned.training
    try:
        yield
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
                f"out of memory on {context.device}: lower training.batch_size, engine.workers or "
                "engine.parallel_runs, or take a smaller model"
            ) from error
        folder.note_failure(error)
        raise
    except (ClaimLost, Stopped):
        raise  # the run is not at fault, and a lost folder is another process's
    except Exception as error:
        folder.note_failure(error)
        raise
