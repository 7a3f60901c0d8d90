"""A run over a federation that is ready, whatever its engine: round after round, measured, written down, resumable."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fedshift.data.domain import DataSet, SparseRows
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.selection import selected_rounds
from fedshift.experiment.config.experiment import method_record
from fedshift.experiment.config.sections import LeaveOneOut, SourceTarget
from fedshift.experiment.environment import versions
from fedshift.experiment.plan import Run
from fedshift.experiment.protocol import Split, roles_of
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.federation import Federation
from fedshift.federation.messages import RawData
from fedshift.methods.base import Method, State
from fedshift.methods.settings import setting_of
from fedshift.models.network import Network
from fedshift.weights import Weights


class Measuring(Protocol):
    """What measures a model after a round."""

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """``target_accuracy``, ``source_accuracy`` and ``per_class``, as a `RoundRecord` holds them."""
        ...


def conduct(
    context: Context,
    run: Run,
    folder: RunFolder,
    federation: Federation,
    evaluator: Measuring,
    split: Split,
    network: Network,
) -> RunResult:
    """A run over a federation that is ready, whatever its engine. ``network``: with the weights a run starts from."""
    experiment, method = context.experiment, run.method
    loop = _RunLoop(context, run, folder, federation, evaluator, split)
    try:
        return loop.to_the_end(network, method.evaluated_network(network, len(split.train)))
    except TrainingDiverged as error:
        lr = f"{experiment.training.lr:g}"
        more = "" if lr in str(error) else f" (training.lr is {lr})"
        where = f"{method.display}, target {run.target}, seed {run.seed}"
        raise TrainingDiverged(f"{where}: {error}{more}") from error
    except torch.OutOfMemoryError as error:
        raise FedshiftError(
            f"out of memory on {context.device}: lower training.batch_size or engine.workers"
        ) from error


@dataclass
class _RunLoop:
    """The state of one run in this process."""

    context: Context
    run: Run
    folder: RunFolder
    federation: Federation
    evaluator: Measuring
    split: Split
    records: list[RoundRecord] = field(default_factory=list)
    seconds: float = 0.0
    clock: float = field(default_factory=time.perf_counter)

    def to_the_end(self, trained: Network, evaluated: Network) -> RunResult:
        """Resume or start, then round after round until the budget is used.

        trained: what sites train, with the weights that a run starts from. evaluated: what ``state.weights`` belong to.
        """
        method, federation = self.run.method, self.federation
        state = self._resume()
        total = sum(federation.budget.values())
        self.context.reporter.run(self.run, total, sum(federation.progress.used.values()))
        if state is None:
            start = Weights({name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()})
            self.folder.restart()
            self._record_pooling()
            state = method.start(federation, start)
            state = self._close_round(evaluated, state, last=False)
        while not federation.exhausted():
            before = sum(federation.progress.used.values())
            federation.round = state.round + 1
            state = method.round(federation, state)
            if state.round != federation.round:
                raise FedshiftError(f"{method.name}: round() must return state.advance(...)")
            federation.settle()
            # A method that trains nothing has had its rounds, too.
            idle = sum(federation.progress.used.values()) == before and state.round >= federation.rounds
            state = self._close_round(evaluated, state, last=idle or federation.exhausted())
            if idle:
                break
        return self._finish(state)

    def _resume(self) -> State | None:
        found = self.folder.load_checkpoint()
        if found is None:
            return None
        state, header = found
        progress, ledger = self.federation.progress, self.federation.ledger
        progress.exchange, progress.used = header["exchange"], header["used"]
        self.federation.budget.update(header.get("budget", {}))
        ledger.total = header["bytes"]
        self.seconds = header["seconds"]
        now = {"threads": self.context.threads, "device": self.context.device, **versions()}
        for name, then in header.get("environment", {}).items():
            if now.get(name) != then:
                self.context.reporter.warn(
                    f"{self.folder.path} was begun with {name} {then} and goes on with {now.get(name)}: weights may "
                    "differ in their last bits from an uninterrupted run"
                )
        try:
            self.federation.load_memory(self.folder.memory, header["memory"])
        except UserError as error:
            raise UserError(f"{error}; to begin this run again, delete {self.folder.path}") from None
        self.records = self.folder.records(state.round)
        return state

    def _record_pooling(self) -> None:
        """A pooled baseline begins with every sample leaving its site."""
        if not self.run.method.pooled:
            return
        for name, size in pooled_bytes(self.run.method, self.context.data, self.split).items():
            samples = RawData({"samples": torch.empty(size, dtype=torch.uint8, device="meta")})
            self.federation.ledger.record(0, "pool", name, "up", {"samples": samples})

    def _close_round(self, network: Network, state: State, *, last: bool) -> State:
        """Measure, write the line, then the checkpoint: a kill between any two loses nothing but this round."""
        self.federation.settle()
        if state.round == 0 and self.federation.progress.exchange == 0:
            return state  # nothing has been trained: a run that is killed now begins again
        state = state.remembering(self.run.method.average_rounds)
        measured = last or state.round % self.context.experiment.training.measure_every == 0
        results = self.evaluator.measure(network, state.handed_out) if measured else {"target_accuracy": {}}
        _, page = self.federation.ledger.settle()
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.seconds += seconds
        report = dict(state.report)
        known = self._said()
        for warning in report.get("warnings", []):
            if warning not in known:
                self.context.reporter.warn(f"{self.run.target}, seed {self.run.seed}: {warning}")
        if self.federation.missing:
            report["missing"] = dict(self.federation.missing)
            for reason in self.federation.missing.values():
                self.context.reporter.warn(f"{self.run.method.display} goes on without a site: {reason}")
            self.federation.missing.clear()
        if self.federation.refused:
            report["refused"] = dict(self.federation.refused)
            before = self._refusals()
            for reason in itertools.chain.from_iterable(self.federation.refused.values()):
                if reason not in before:
                    self.context.reporter.warn(f"{self.run.method.display} goes on without it: {reason}")
            self.federation.refused.clear()
        record = RoundRecord(
            round=state.round,
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
        memory = self.federation.save_memory(self.folder.memory)
        progress = self.federation.progress
        header = {
            "exchange": progress.exchange,
            "used": progress.used,
            "budget": self.federation.budget,
            "bytes": self.federation.ledger.total,
            "seconds": self.seconds,
            "environment": {"threads": self.context.threads, "device": self.context.device, **versions()},
        }
        self.folder.save_checkpoint(state, memory, header)
        return state

    def _refusals(self) -> list[str]:
        """What sites did not let out in the rounds so far, each refusal once."""
        pages = [record.extra.get("refused", {}) for record in self.records]
        return list(dict.fromkeys(reason for page in pages for reasons in page.values() for reason in reasons))

    def _said(self) -> list[str]:
        """What the method warned of in the rounds so far, each warning once."""
        return list(dict.fromkeys(said for record in self.records for said in record.extra.get("warnings", [])))

    def _mini_batches(self) -> int:
        """Mini-batches so far per source domain, the mean over them; a pool does the work of all its domains."""
        return round(sum(self.federation.progress.used.values()) / len(self.split.train))

    def _finish(self, state: State) -> RunResult:
        context, run = self.context, self.run
        labelled, unlabelled = roles_of(context.experiment.protocol, context.data, run.target)
        both = isinstance(context.experiment.protocol, SourceTarget)
        apart = {"proxy_a_distance": context.distances_of(run, context.data, self.split)} if both else {}
        result = RunResult(
            method=run.method.display,
            target=run.target,
            labelled=list(labelled) if both else [],
            unlabelled=list(unlabelled) if both else [],
            seed=run.seed,
            metric="accuracy" if context.data.task == "classification" else "dice",
            selected=selected_rounds(self.records),
            classes=list(context.data.classes),
            rounds=state.round,
            seconds=self.seconds,
            mini_batches=self._mini_batches(),
            bytes_up=self.federation.ledger.total["up"],
            bytes_down=self.federation.ledger.total["down"],
            versions=versions(),
            threads=context.threads,
            device=context.device,
            warnings=[
                *context.data.warnings,
                *(f"gone on without it: {reason}" for reason in self._refusals()),
                *self._said(),
            ],
            setting=setting_of(run.method),
            options=self.folder.identity,
            data={
                "name": context.data.name,
                "fingerprint": context.fingerprint,
                "training_samples": {name: len(rows) for name, rows in self.split.train.items()},
                "held_out_samples": {name: len(rows) for name, rows in self.split.held_out.items()},
                "measured_samples": {name: len(rows) for name, rows in self.split.measured.items()},
                "unlabelled_samples": {name: len(rows) for name, rows in self.split.unlabelled.items()},
                **apart,
            },
        )
        self.folder.save_model(state.handed_out, model_metadata(context, run))
        self.folder.finish(result)
        return result


def model_metadata(context: Context, run: Run) -> dict[str, Any]:
    """What a model file says of itself, enough to predict with it."""
    sources, targets = roles_of(context.experiment.protocol, context.data, run.target)
    return {
        "method": method_record(run.method),
        "model": context.experiment.model.model_dump(mode="json"),
        "input_shape": list(context.data.input_shape),
        "classes": list(context.data.classes),
        "preprocessing": context.data.preprocessing.model_dump(mode="json"),
        "sources": list(sources),
        "unseen" if isinstance(context.experiment.protocol, LeaveOneOut) else "adapted_to": "+".join(targets),
        "seed": run.seed,
        "experiment": context.experiment.name,
        "versions": versions(),
    }


def pooled_bytes(method: Method, data: DataSet, split: Split) -> dict[str, int]:
    """Bytes of the training samples of each site, masks included, which leave it when ``method`` pools data."""
    sizes = {}
    pooled = {**split.train, **(split.unlabelled if method.needs_target else {})} if method.pooled else {}
    for name, rows in pooled.items():
        inputs = data.domains[name].inputs
        item = 4 if isinstance(inputs, SparseRows) else inputs.itemsize
        sizes[name] = len(rows) * math.prod(inputs.shape[1:]) * item
        masks = data.domains[name].masks
        if masks is not None and name in split.train:
            sizes[name] += len(rows) * math.prod(masks.shape[1:])
    return sizes
