"""The folder of one run: its settings, rounds, checkpoint, model and result.

Every file is written atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from fedshift.claims import Claim, network_file_system
from fedshift.digests import BLANK, ENTRY, fill_digest, with_digest
from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.site_bytes import FILE as BYTES
from fedshift.evaluation.site_bytes import write_site_bytes
from fedshift.evaluation.stored import (
    FAILURE,
    ORDER,
    RESULT,
    ROUNDS,
    SETTINGS,
    pack_of,
    read_stored,
    run_folders,
    write_sums,
)
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.plan import Plan, PlannedRun, common_settings
from fedshift.experiment.runs.run_identity import comparable, first_difference
from fedshift.federation.byte_ledger import Totals
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import Content, encode, unshare
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.closed import in_one, in_two, is_closed
from fedshift.files import plain_yaml, write_bytes, yaml_bytes
from fedshift.json_objects import write_object
from fedshift.methods.base import State
from fedshift.methods.composition.averages import Kept
from fedshift.weights import Weights

FORMAT = 1
MODEL, SEALED_MODEL = "model.safetensors", "model.sealed"
_CHECKPOINT = "checkpoint.safetensors"
_CACHED = 2.0
"""Seconds for which FUSE may show a file's length of before."""


class _Averaged(Frozen):
    model_config = ConfigDict(allow_inf_nan=True)

    count: int = 0
    losses: list[float] = Field(default_factory=list)


def _no_bytes() -> Totals:
    return {"up": {}, "down": {}}


class Checkpoint(Frozen):
    """What stands beside the models in a checkpoint. Older versions lack the fields that have a default."""

    model_config = ConfigDict(allow_inf_nan=True)

    round: int
    numbers: dict[str, Any]
    exchange: int
    used: dict[str, int]
    memory: dict[str, dict[str, str]]
    seconds: float = 0.0
    undrawn: int = 0
    averaged: _Averaged = _Averaged()
    budget: dict[str, int] = Field(default_factory=dict)
    bytes: Totals = Field(default_factory=_no_bytes)
    bytes_by_site: dict[str, Totals] | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    rounds_sha256: str | None = None


class RunFolder:
    """``<runs>/<experiment>/<method>/<target>/seed-<n>``, held by one process at a time."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        self._lock: int | None = None
        self._locked_out = False
        """Whether the system itself says that another process holds the folder."""
        self._claim = Claim(path)
        self._rounds = bytearray()
        """What rounds.jsonl holds."""
        self._sum = hashlib.sha256()  # of that

    # Lock and identity ----------------------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Lock the folder for this process. False if another process holds it.

        UserError if the folder cannot be made or locked.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            halves = [*self.path.glob(".*.part")]  # none of them of whoever takes over from this process
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write in {self.path}: {error.strerror}; choose another folder with --runs"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            self._locked_out = True
            return False
        except OSError as error:
            os.close(handle)
            raise UserError(f"cannot lock {self.path}: {error.strerror}; choose a local folder with --runs") from None
        self._locked_out = False
        try:
            taken = self._take_claim()
        except BaseException:
            os.close(handle)
            raise
        if not taken:
            os.close(handle)
            return False
        self._lock = handle
        for half in halves:  # left by a process that was killed while it wrote
            half.unlink(missing_ok=True)
        return True

    def _take_claim(self) -> bool:
        try:
            return self._claim.take()
        except OSError as error:
            raise UserError(f"cannot write in {self.path}: {error.strerror}; free some space and run again") from None

    def is_held(self) -> bool:
        """Whether a process holds the folder."""
        if not self.acquire():
            return True
        self.release()
        return False

    def holder_lives(self) -> bool:
        """Whether the process that held the folder at the last look is at work; False: that is not known yet."""
        return self._locked_out or self._claim.is_alive()

    def doubt_holder(self) -> None:
        """Take the holder for alive only after a new sign."""
        self._claim.doubt()

    def holder(self) -> str:
        """The process that holds the folder, such as "process 312 on server-2"."""
        return self._claim.holder() or "another process"

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._claim.release()
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check_identity(self) -> None:
        """Check that the folder is empty or belongs to this run.

        UserError if another experiment wrote it. The message names the first setting that differs.
        """
        there = self.written_by()
        if there is None:
            if (self.path / _CHECKPOINT).exists() or (self.path / RESULT).exists():
                raise UserError(
                    f"{self.path} was not written by this version of fedshift: choose another folder with --runs"
                )
            return
        difference = first_difference(there, comparable(self.identity))
        if difference is not None and not self._is_replaced():
            path, old, new = difference
            file = read_stored(self.path / SETTINGS)
            where = self.path if file is None or file.run is None else file.where()
            way = f"give this experiment another name, or delete {where} to begin again"
            if path == "data.fingerprint":
                raise UserError(f"the data have changed since {where} was written: put them back, or {way}")
            if path.endswith(".sha256"):
                code_file = self.identity[path.removesuffix(".sha256")]["name"].rpartition(":")[0]
                raise UserError(f"{code_file} has changed since {where} was written: {way}")
            raise UserError(
                f"{where} was written by another experiment: {path} is {old!r} there and {new!r} here; "
                "give this one another name, or another folder with --runs"
            )

    def written_by(self) -> dict[str, Any] | None:
        """The settings of the run in this folder, packed or not; None if it is empty.

        UserError if the file is damaged.
        """
        file = read_stored(self.path / SETTINGS)
        if file is None:
            return None
        try:
            return comparable(plain_yaml(file.data))
        except (yaml.YAMLError, ValueError, TypeError):
            raise UserError(f"{file.where()} is damaged: delete {self.path} and run again") from None

    def write_settings(self) -> None:
        """Write the run's settings. From then on the folder belongs to this run."""
        (self.path / FAILURE).unlink(missing_ok=True)
        data = yaml_bytes(self.identity)
        file = self.path / SETTINGS
        if not file.exists() or file.read_bytes() != data:  # also what is not compared, such as a damaged path
            write_bytes(file, data, before=self._claim.check)

    def note_failure(self, error: Exception) -> None:
        """Write down why the run stopped, for tables and the page."""
        self._claim.check()
        name = "" if isinstance(error, FedshiftError) else f"{type(error).__name__}: "
        write_object(self.path / FAILURE, {"reason": f"{name}{' '.join(str(error).split())}"})

    def _is_replaced(self) -> bool:
        """Whether this run takes the place of one that has no finished round and whose own file has changed since."""
        if (self.path / _CHECKPOINT).exists() or (self.path / RESULT).exists():
            return False
        there = self.written_by()
        difference = first_difference(there, comparable(self.identity)) if there is not None else None
        return difference is not None and difference[0].endswith(".sha256")

    # Results ----------------------------------------------------------------------------------------------------------

    def result(self) -> RunResult | None:
        """The result of the run, packed or not; None if it is unfinished. UserError if the file is damaged."""
        file = read_stored(self.path / RESULT)
        if file is None:
            return None
        try:
            return RunResult.model_validate_json(file.data)
        except (ValidationError, ValueError):
            raise UserError(f"{file.where()} is damaged: delete it and run again") from None

    def finish(self, result: RunResult) -> None:
        """Write the result, which marks the run as finished, and delete its checkpoint."""
        self._claim.check()
        self._mend()
        data = (result.model_dump_json(indent=2) + "\n").encode()
        names = (SETTINGS, ROUNDS, MODEL, SEALED_MODEL, PREDICTIONS)
        write_sums(self.path, {RESULT: data}, names, before=self._claim.check)
        write_bytes(self.path / RESULT, data, before=self._claim.check)
        self._forget_checkpoint()

    def save_model(self, weights: Weights, metadata: Mapping[str, Any]) -> None:
        """Write the final model, see `model_file`."""
        file = self.path / (SEALED_MODEL if is_closed(weights) else MODEL)
        write_bytes(file, model_file(weights, metadata), before=self._claim.check)

    def save_predictions(self, data: bytes) -> None:
        """Write the predictions per sample, which only the user may read."""
        write_bytes(self.path / PREDICTIONS, data, private=True, before=self._claim.check)

    # Rounds and checkpoints -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Path:
        """The folder of the site memory. In a deployment each site has its own."""
        return self.path / "memory"

    def append(self, record: RoundRecord) -> None:
        """Add one line to ``rounds.jsonl`` and flush it to the disk."""
        file = self.path / ROUNDS
        try:
            line = f"{record.model_dump_json()}\n".encode()
            self._mend()
            with open(file, "ab") as lines:
                self._claim.check()  # last, as whoever is stopped behind it may write late
                lines.write(line)
                lines.flush()
                os.fsync(lines.fileno())
            self._rounds += line
            self._sum.update(line)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}; free some space and run again") from None

    def _mend(self) -> None:
        """Write rounds.jsonl anew if a process that had lost the folder wrote to it, late."""
        file = self.path / ROUNDS
        if (file.stat().st_size if file.exists() else 0) != len(self._rounds):
            write_bytes(file, bytes(self._rounds), before=self._claim.check)

    def save_checkpoint(self, state: State, memory: Mapping[str, Mapping[str, str]], header: Mapping[str, Any]) -> None:
        """Write all that a resumed run needs to one file, then delete files of the site memory that it no longer names.

        ``memory``: site → entry → file of its memory; ``header``: exchange number, budgets, bytes, seconds and
        environment.
        """
        content: dict[str, Content] = in_two("weights", state.weights)
        content |= {f"part:{name}": part for name, part in state.parts.items()}
        content |= {f"server:{name}": part for name, part in state.server.items()}
        averaged = state.averaged
        content |= {f"recent:{number:06}": weights for number, weights in enumerate(averaged.recent)}
        content |= {} if averaged.mean is None else {"mean": averaged.mean}
        whole = {
            "format": FORMAT,
            "round": state.round,
            "numbers": dict(state.numbers),
            "averaged": {"count": averaged.count, "losses": list(averaged.losses)},
            "memory": memory,
            "identity": comparable(self.identity),
            "rounds_sha256": self._sum.hexdigest(),
            **header,
        }
        write_message(self.path / _CHECKPOINT, content, whole, before=self._claim.check)
        write_site_bytes(self.path, header.get("bytes_by_site"))
        self._tidy(memory)

    def load_checkpoint(self) -> tuple[State, Checkpoint] | None:
        """The state of the last checkpoint, and what stands beside it; None if there is none.

        UserError if the file is damaged, or belongs to another experiment or version.
        """
        file = self.path / _CHECKPOINT
        if not file.exists():
            return None
        content, header = read_message(file)
        there, here = comparable(header.get("identity")), comparable(self.identity)
        if header.get("format") != FORMAT or first_difference(there, here) is not None:
            raise UserError(f"{file} belongs to another experiment or version: delete {self.path} and run again")
        weights = in_one("weights", content)
        if not isinstance(weights, Weights):
            raise UserError(f"{file} is damaged: delete {self.path} and run again")
        parts = {name.removeprefix("part:"): part for name, part in content.items() if name.startswith("part:")}
        recent = [content[name] for name in sorted(content) if name.startswith("recent:")]
        models, mean = tuple(model for model in recent if isinstance(model, Weights)), content.get("mean")
        beside = Checkpoint.model_validate(header)
        count, losses = beside.averaged.count, tuple(beside.averaged.losses)
        averaged = Kept(models, mean if isinstance(mean, Weights) else None, count, losses)
        server = {
            name.removeprefix("server:"): moment
            for name, moment in content.items()
            if name.startswith("server:") and isinstance(moment, Weights)
        }
        return State(weights, beside.round, parts, beside.numbers, averaged=averaged, server=server), beside

    def records(self, last_round: int, digest: str | None = None) -> list[RoundRecord]:
        """Read the rounds up to ``last_round``, and remove later ones from the file, because they will be run again.

        ``digest``: SHA-256 of the lines up to that round, as the checkpoint has it; None: of an older version.
        UserError if one of the rounds is missing or damaged. The selection rules would choose among fewer rounds.
        """
        file = self.path / ROUNDS
        wanted = (list(range(last_round + 1)), list(range(1, last_round + 1)))
        records, lines = self._lines_to(last_round)
        if [record.round for record in records] not in wanted and network_file_system(self.path):
            time.sleep(_CACHED)
            records, lines = self._lines_to(last_round)
        if [record.round for record in records] not in wanted:
            raise UserError(
                f"{file} is damaged: not every round up to {last_round} is there; delete {self.path} and run again"
            )
        if digest is not None and lines.hexdigest() != digest:
            raise UserError(
                f"{file} is damaged: its rounds are not those that were written; restore it, or delete {self.path} and "
                "run again"
            )
        whole = "".join(record.model_dump_json() + "\n" for record in records).encode()
        write_bytes(file, whole, before=self._claim.check)
        self._rounds, self._sum = bytearray(whole), hashlib.sha256(whole)
        return records

    def _lines_to(self, last_round: int) -> tuple[list[RoundRecord], Any]:
        """The rounds up to ``last_round``, as far as they can be read, and the SHA-256 of their lines."""
        file, records, lines = self.path / ROUNDS, [], hashlib.sha256()
        for line in file.read_bytes().splitlines() if file.exists() else []:
            try:
                record = RoundRecord.model_validate_json(line)
            except ValidationError:
                break  # the process was killed while it wrote this line
            if record.round > last_round:
                break
            records.append(record)
            lines.update(line + b"\n")
        return records, lines

    def restart(self) -> None:
        """Empty `rounds.jsonl`. Called if there is no checkpoint."""
        self._claim.check()
        if (self.path / ROUNDS).exists():
            write_bytes(self.path / ROUNDS, b"", before=self._claim.check)
        self._rounds, self._sum = bytearray(), hashlib.sha256()

    def _tidy(self, memory: Mapping[str, Mapping[str, str]]) -> None:
        wanted = {self.memory / site / file for site, files in memory.items() for file in files.values()}
        unwanted = [file for file in self.memory.glob("*/*") if file not in wanted]
        self._claim.check()  # behind the look: what another process's checkpoint names came later
        for file in unwanted:
            file.unlink(missing_ok=True)

    def _forget_checkpoint(self) -> None:
        for name in (_CHECKPOINT, BYTES):
            (self.path / name).unlink(missing_ok=True)
        self._tidy({})
        with contextlib.suppress(OSError):  # a process that had lost the folder wrote to it, late
            for folder in sorted(self.memory.glob("*")):
                folder.rmdir()
            if self.memory.exists():
                self.memory.rmdir()


def model_file(weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """A model in the format safetensors, under state-dict names, with its digest.

    One with sealed parts is a message with its digest instead (`digests.with_digest`), and has these as they are.

    ``metadata``: all that prediction needs, stored as JSON.
    """
    from safetensors.torch import save

    if is_closed(weights):
        return with_digest(encode(in_two("weights", Weights(weights)), {"fedshift": dict(metadata)}))
    tensors = unshare({name: tensor.contiguous() for name, tensor in weights.items()})
    return fill_digest(save(tensors, {"fedshift": json.dumps(metadata), ENTRY: BLANK}))


def write_order(plan: Plan, folder: Path) -> None:
    """Write the order of methods, targets and seeds, and the headline, unless the packed files have the same."""
    experiment = plan.experiment
    order: dict[str, Any] = {
        "methods": [method.display for method in experiment.methods],
        "targets": list(plan.targets),
        "seeds": list(experiment.protocol.seeds),
    }
    if experiment.evaluation.headline != "accuracy":
        order["headline"] = experiment.evaluation.headline
    pack = pack_of(folder)
    if pack is None or pack.order != order:
        write_object(folder / ORDER, order)


def run_folder(planned: PlannedRun, folder: Path) -> RunFolder:
    """The folder of one run below the experiment's ``folder``."""
    return RunFolder(folder / planned.folder, planned.identity)


def check_place(experiment: Experiment, folder: Path) -> None:
    """Raise UserError if ``folder`` holds runs with other settings, but for those that depend on the data."""
    for method in experiment.methods:
        settings = common_settings(experiment, method)
        for path in run_folders(folder / method.display):
            there = RunFolder(path, {}).written_by()
            if there is not None:
                known = {
                    "data": {**settings["data"], "fingerprint": there["data"].get("fingerprint")},
                    "training": {**settings["training"], "mini_batches": there["training"].get("mini_batches")},
                }
                RunFolder(path, {**there, **settings, **known}).check_identity()
