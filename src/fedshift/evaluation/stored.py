"""Reading the runs of an experiment, packed or not.

An unpacked run is in `<experiment>/<method>/<target>/seed-<n>/`; a packed run has that folder as its name. Each run is
read from its folder if it is finished there, else from the experiment's packed files, else from its unfinished folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedshift.digests import Damaged
from fedshift.errors import UserError
from fedshift.evaluation import packs
from fedshift.evaluation.packs import PackedRounds, PackedRun
from fedshift.evaluation.records import RoundRecord, RunResult, SiteMetric
from fedshift.files import write_bytes, yaml_bytes
from fedshift.json_objects import read_object

FAILURE = "failure.json"
"""Why an unfinished run stopped."""
RESULT, ROUNDS, ORDER, SETTINGS = "result.json", "rounds.jsonl", "order.json", "experiment.yaml"
_SEED = re.compile(r"seed-\d+")
_DEPTH = 3
"""How many folders deep a run is below its experiment."""


Model = TypeVar("Model", bound=BaseModel)


class Order(BaseModel):
    """The planned methods, targets and seeds, in the order of the experiment file, and its headline."""

    methods: list[str] = []
    targets: list[str] = []
    seeds: list[int] = []
    headline: SiteMetric = "accuracy"


@dataclass(frozen=True)
class Stored:
    """The content of a run's file, and where it comes from."""

    data: bytes  # the content
    file: Path  # the file on disk, which may be a packed one
    run: str | None = None  # the run in a packed file; else None

    def where(self, line: int | None = None) -> str:
        """How a message names the file, or a line of it (from 1)."""
        whose = "" if self.run is None else f" of the run {self.run}"
        return f"{self.file} line {line}{whose}" if line else f"{self.file}{whose}"


@dataclass(frozen=True)
class Pack:
    """An experiment's packed files."""

    folder: Path  # the experiment's folder
    runs: Mapping[str, PackedRun]  # the runs by name, without their rounds
    order: Mapping[str, Any]  # the planned order

    def lines(self, name: str) -> bytes | None:
        """The content of a run's `rounds.jsonl`; None if it has none.

        UserError if the file of the rounds is damaged.
        """
        file = self.folder / packs.ROUNDS
        return _rounds(file, _stamp(file)).lines(self.runs[name])


def read_stored(path: Path) -> Stored | None:
    """The content of a run's `result.json`, `rounds.jsonl` or `experiment.yaml`, or of an experiment's `order.json`.

    Args:
        path: where the file is, or would be if the run were not packed.

    Returns:
        The content; None if there is no such file, packed or not.

    Raises:
        UserError: a file cannot be read.

    Example:
        >>> import tempfile
        >>> from fedshift.json_objects import write_object
        >>> with tempfile.TemporaryDirectory() as place:
        ...     file = Path(place) / "order.json"
        ...     before, _ = read_stored(file), write_object(file, {"seeds": [0]})
        ...     before, read_stored(file).data
        (None, b'{"seeds": [0]}')
    """
    folder = path.parent.absolute()
    if path.name == ORDER:
        if path.exists():
            remedy = "restore it, or delete it: names then come in natural order"
            return Stored(_json(read_object(path, remedy, older=True)), path)
        pack = pack_of(folder)
        return None if pack is None else Stored(_json(pack.order), folder / packs.RUNS)
    pack, name = (None, "") if (folder / RESULT).exists() else _pack_and_name(folder)
    if pack is None or name not in pack.runs:
        return Stored(_read_checked(path), path) if path.exists() else None
    if path.name == ROUNDS:
        lines = pack.lines(name)
        return None if lines is None else Stored(lines, pack.folder / packs.ROUNDS, name)
    run = pack.runs[name]
    data = _json(run.result) if path.name == RESULT else yaml_bytes(run.identity)
    return Stored(data, pack.folder / packs.RUNS, name)


SUMS = "SHA256SUMS"
"""The digests of a finished run's files, or of an experiment's packed ones, as ``sha256sum --check`` reads them."""


def read_result(path: Path) -> RunResult:
    """Read a `result.json`, packed or not.

    Raises:
        UserError: it cannot be read, or is not a run's result.

    Example:
        >>> read_result(Path("nowhere/result.json"))
        Traceback (most recent call last):
            ...
        fedshift.errors.UserError: cannot read nowhere/result.json: there is no such file
    """
    file = read_stored(path)
    if file is None:
        raise UserError(f"cannot read {path}: there is no such file")
    return _parse(RunResult, file.data, file.where(), "remove it and run the experiment again to redo this run")


def read_order(path: Path) -> Order:
    """Read an `order.json`, packed or not; empty if there is none.

    Raises:
        UserError: it cannot be read, or is not an order of methods and targets.

    Example:
        >>> read_order(Path("nowhere/order.json")).methods
        []
    """
    file = read_stored(path)
    if file is None:
        return Order()
    return _parse(Order, file.data, file.where(), "remove it; methods and targets then come in alphabetical order")


def read_rounds(path: Path) -> list[RoundRecord]:
    """Read a `rounds.jsonl`, packed or not; empty if there is none.

    An incomplete last line is skipped: the run was killed while it wrote the line.

    Raises:
        UserError: the file cannot be read, another line is not a round's record, or a round is there twice.

    Example:
        >>> read_rounds(Path("nowhere/rounds.jsonl"))
        []
    """
    file = read_stored(path)
    if file is None:
        return []
    lines = file.data.splitlines()
    if file.data and not file.data.endswith(b"\n"):
        lines.pop()
    records: list[RoundRecord] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _parse(RoundRecord, line, file.where(number), "remove this run and run it again")
            if records and record.round <= records[-1].round:
                raise UserError(
                    f"{file.where(number)} has round {record.round} after round {records[-1].round}: two processes "
                    "wrote it; remove this run and run it again"
                )
            records.append(record)
    return records


def _parse(model: type[Model], text: bytes, where: str, advice: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        what = " ".join(f"{field + ': ' if field else ''}{first['msg']}".split())
        raise UserError(f"{where} is corrupt or was not written by fedshift ({what}): {advice}") from error


def write_sums(
    folder: Path, data: Mapping[str, bytes], names: Iterable[str], before: Callable[[], None] | None = None
) -> None:
    """Write the digests of a finished run's files.

    Args:
        data: name → content of files that are about to be written.
        before: as in `write_bytes`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_sums(folder, {"result.json": b"{}"}, [])
        >>> (folder / SUMS).read_text().split()
        ['44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a', 'result.json']
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    for name in names:
        if name not in data and (folder / name).exists():
            digests[name] = _digest(folder / name)
    _write_sums(folder, digests, before)


def check_sum(path: Path, data: bytes | None = None) -> None:
    """Compare a file with its digest, if there is one beside it; runs and packed files of an older version have none.

    Args:
        data: its content; None: it is read.

    Raises:
        UserError: it is not what was written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_sums(folder, {"result.json": b"{}"}, [])
        >>> check_sum(folder / "result.json", b"{}")
    """
    known = _sums_of(path.parent).get(path.name)
    if known is not None and known != (_digest(path) if data is None else hashlib.sha256(data).hexdigest()):
        raise Damaged(path, f"{SUMS} beside it has another SHA-256; restore it, or delete {path.parent} and run again")


def change_sums(folder: Path, data: Mapping[str, bytes], gone: Iterable[str] = ()) -> None:
    """Change some of the digests in a folder, and remove those of files that are gone; without any, remove `SUMS`.

    Args:
        folder: of a run or of packed files.
        data: name → content of files that are about to be written, or were.
        gone: names of files that are about to be removed or written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> change_sums(folder, {"result.json": b"{}"})
        >>> change_sums(folder, {}, ["result.json"])
        >>> (folder / SUMS).exists()
        False
    """
    stay = {name: digest for name, digest in _sums_of(folder).items() if (folder / name).exists()}
    digests = {name: digest for name, digest in stay.items() if name not in set(gone)}
    digests |= {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    if digests:
        _write_sums(folder, digests)
    else:
        (folder / SUMS).unlink(missing_ok=True)


def read_failure(folder: Path) -> str | None:
    """Why the unfinished run in a folder stopped; None if nobody wrote that down.

    Example:
        >>> read_failure(Path("no-such-run")) is None
        True
    """
    try:
        result = read_object(folder / FAILURE, "delete it")
    except Damaged as error:
        return str(error)
    return (str(result["reason"]) or "it failed") if result else None


def _sums_of(folder: Path) -> dict[str, str]:
    file = folder / SUMS
    text = _read(file).decode(errors="replace") if file.is_file() else ""
    return {name: digest for digest, _, name in (line.rpartition("  ") for line in text.split("\n")) if name}


def _write_sums(folder: Path, digests: Mapping[str, str], before: Callable[[], None] | None = None) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_bytes(folder / SUMS, text.encode(), before=before)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def run_folders(root: Path) -> list[Path]:
    """The folders of all runs in or below ``root``, finished or not, packed or not.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     (Path(place) / "demo" / "fedavg" / "D0" / "seed-0").mkdir(parents=True)
        ...     [folder.relative_to(place).as_posix() for folder in run_folders(Path(place))]
        ['demo/fedavg/D0/seed-0']
    """
    root = root.absolute()
    result: set[Path] = set()
    for index, below, files in os.walk(root):
        folder = Path(index)
        if _SEED.fullmatch(folder.name) or RESULT in files:
            below.clear()
            result.add(folder)
        elif packs.RUNS in files:
            result.update(_packed_folders(folder))
    for experiment in root.parents[:_DEPTH]:
        result.update(folder for folder in _packed_folders(experiment) if folder.is_relative_to(root))
    return sorted(result)


def is_finished(folder: Path) -> bool:
    """Whether the run that has this folder is finished.

    Raises:
        UserError: the packed files are damaged.

    Example:
        >>> is_finished(Path("no-such-experiment/fedavg/D0/seed-0"))
        False
    """
    if (folder / RESULT).exists():
        return True
    pack, name = _pack_and_name(folder)
    return pack is not None and name in pack.runs


def packed_run(folder: Path) -> PackedRun | None:
    """The packed run that has this folder as its name; None if there is none.

    Raises:
        UserError: the packed files are damaged.

    Example:
        >>> packed_run(Path("no-such-experiment/fedavg/D0/seed-0")) is None
        True
    """
    pack, name = _pack_and_name(folder)
    return pack.runs[name] if pack and name in pack.runs else None


def pack_of(experiment: Path) -> Pack | None:
    """The packed files of an experiment; None if it has none.

    Raises:
        UserError: the packed files are damaged.

    Example:
        >>> pack_of(Path("no-such-experiment")) is None
        True
    """
    runs = experiment / packs.RUNS
    return _pack(experiment, _stamp(runs)) if runs.exists() else None


def _pack_and_name(folder: Path) -> tuple[Pack | None, str]:
    """The packed files that may hold the run of this folder, and the run's name."""
    folder = folder.absolute()
    if len(folder.parents) < _DEPTH:
        return None, ""
    experiment = folder.parents[_DEPTH - 1]
    return pack_of(experiment), folder.relative_to(experiment).as_posix()


def _packed_folders(experiment: Path) -> list[Path]:
    pack = pack_of(experiment)
    return [experiment / name for name in pack.runs] if pack else []


@functools.lru_cache(maxsize=8)
def _pack(experiment: Path, *_: object) -> Pack:
    """The packed files, read again when they have changed."""
    return Pack(experiment, *packs.decode(_read_checked(experiment / packs.RUNS), f"{experiment}{os.sep}"))


@functools.lru_cache(maxsize=1)
def _rounds(file: Path, *_: object) -> PackedRounds:
    """The rounds of all packed runs, read again when their file has changed."""
    return packs.decode_rounds(_read_checked(file), f"{file.parent}{os.sep}")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes when a file changes; None if there is none."""
    try:
        there = file.stat()
    except OSError:
        return None
    return there.st_ino, there.st_size, there.st_mtime_ns


def _read_checked(path: Path) -> bytes:
    data = _read(path)
    check_sum(path, data)
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
