"""Pack an experiment's finished runs into two files, and unpack them into one folder per run."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedshift.errors import UserError
from fedshift.evaluation import packs
from fedshift.evaluation.packs import PackedRun, rows_of, with_kept_digits
from fedshift.evaluation.stored import (
    ORDER,
    RESULT,
    ROUNDS,
    SETTINGS,
    Pack,
    Stored,
    change_sums,
    is_finished,
    pack_of,
    read_stored,
    run_folders,
)
from fedshift.files import below, plain_yaml, write_bytes, yaml_bytes
from fedshift.json_objects import write_object

_LOCK = ".lock"
_PACKED = (packs.ROUNDS, packs.RUNS)
"""The packed files in the order in which they are written: the last one lists the runs."""


@dataclass(frozen=True)
class Change:
    """What packing or unpacking did to an experiment."""

    experiment: Path  # its folder
    moved: int  # number of runs moved into or out of the packed files
    left: int  # number of unfinished runs


def experiments_below(folder: Path) -> list[Path]:
    """The folders of all experiments in or below ``folder``.

    Raises:
        UserError: there is none, or ``folder`` is only a part of one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     (Path(place) / "demo" / "fedavg" / "D0" / "seed-0").mkdir(parents=True)
        ...     [experiment.name for experiment in experiments_below(Path(place))]
        ['demo']
    """
    if not folder.is_dir():
        raise UserError(f"no folder '{folder}': give the folder of an experiment's runs, or one that holds several")
    result = sorted({run.parents[2] for run in run_folders(folder)})
    if not result:
        raise UserError(f"'{folder}' holds no run: give a folder that 'fedshift run' made, such as runs/<experiment>")
    for experiment in result:
        if not experiment.is_relative_to(folder.absolute()):
            raise UserError(f"'{folder}' is only a part of the experiment {experiment}: give that folder")
    return result


def pack(experiment: Path) -> Change:
    """Move the finished runs of an experiment into its packed files.

    Losses, weights, seconds of rounds and accuracies of classes keep five digits (see `packs`). Unfinished runs and
    models (`model.safetensors`) stay in their folders. A folder is removed only after the packed files are written and
    checked. So an interrupted call can be repeated.

    Raises:
        UserError: a file is damaged, or a run is already packed with other results. Nothing is changed then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     run = Path(place) / "demo" / "fedavg" / "D0" / "seed-0"
        ...     write_bytes(run / "result.json", b'{"method": "fedavg", "target": "D0", "seed": 0}')
        ...     write_bytes(run / "experiment.yaml", b"rounds: 1")
        ...     pack(Path(place) / "demo").moved, run.exists(), is_finished(run)
        (1, False, True)
    """
    there = pack_of(experiment)
    folders = [run for run in run_folders(experiment) if run.exists()]
    finished = [folder for folder in folders if (folder / RESULT).exists()]
    left = sum(not is_finished(folder) for folder in folders)
    order = read_stored(experiment / ORDER)
    if not finished and (there is None or not (experiment / ORDER).exists()):
        return Change(experiment, 0, left)
    runs = {run.name: run for run in _whole(there)}
    for folder in finished:
        run = _of_folder(folder, experiment)
        if run.name in runs and _content(runs[run.name]) != _content(run):
            raise _twice(folder, experiment)
        runs[run.name] = run
    planned = json.loads(order.data) if order else {}
    if there is None or set(runs) != set(there.runs) or _same(planned) != _same(there.order):
        files = packs.encode(runs.values(), planned)
        _check(files, runs, planned, experiment)
        change_sums(experiment, {}, _PACKED)  # of what was there before
        for name in _PACKED:
            write_bytes(experiment / name, files[name])
        change_sums(experiment, files)
    for folder in finished:
        _remove(folder, experiment)
    (experiment / ORDER).unlink(missing_ok=True)
    return Change(experiment, len(finished), left)


def unpack(experiment: Path) -> Change:
    """Write every packed run into a folder of its own, and remove the packed files.

    Raises:
        UserError: a packed file is damaged, or a packed run is finished in its folder with other results. Nothing is
            changed then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     run = Path(place) / "demo" / "fedavg" / "D0" / "seed-0"
        ...     write_bytes(run / "result.json", b'{"method": "fedavg", "target": "D0", "seed": 0}')
        ...     write_bytes(run / "experiment.yaml", b"rounds: 1")
        ...     _ = pack(Path(place) / "demo")
        ...     unpack(Path(place) / "demo").moved, (run / "result.json").exists()
        (1, True)
    """
    there = pack_of(experiment)
    if there is None:
        return Change(experiment, 0, 0)
    runs = _whole(there)
    folders = {
        run.name: below(experiment, *run.folder_names) for run in runs
    }  # all of them, before anything is written
    for run in runs:
        folder = folders[run.name]
        if (folder / RESULT).exists() and _content(_of_folder(folder, experiment)) != _content(run):
            raise _twice(folder, experiment)
    for run in runs:
        folder = folders[run.name]
        files = {SETTINGS: yaml_bytes(run.identity), ROUNDS: run.rounds, RESULT: _json(run.result)}
        written = {name: data for name, data in files.items() if data is not None}
        change_sums(folder, written)
        for name, data in written.items():  # the result last, because it marks the run as finished
            write_bytes(folder / name, data)
    if there.order and not (experiment / ORDER).exists():
        write_object(experiment / ORDER, there.order)
    change_sums(experiment, {}, _PACKED)
    for name in reversed(_PACKED):
        (experiment / name).unlink(missing_ok=True)
    return Change(experiment, len(runs), 0)


def _twice(folder: Path, experiment: Path) -> UserError:
    return UserError(
        f"{folder} and {experiment / packs.RUNS} hold the same run with other results: remove the folder, or move it "
        "elsewhere"
    )


def _whole(there: Pack | None) -> list[PackedRun]:
    return [] if there is None else [replace(run, rounds=there.lines(name)) for name, run in there.runs.items()]


def _of_folder(folder: Path, experiment: Path) -> PackedRun:
    result, settings, rounds = (read_stored(folder / name) for name in (RESULT, SETTINGS, ROUNDS))
    if result is None or settings is None:
        raise UserError(f"{folder} holds no {SETTINGS}: it was not written by this version of fedshift")
    run = PackedRun(_mapping(result), _mapping(settings), rounds.data if rounds else None)
    try:
        rows_of(run.rounds)
    except ValueError as error:
        raise UserError(f"{folder / ROUNDS} {error} is corrupt: remove {folder} and run again") from None
    try:
        name = run.name
    except KeyError as error:
        raise UserError(f"{result.where()} is corrupt ({error} is missing): remove {folder} and run again") from None
    if experiment / name != folder:
        raise UserError(f"{folder} holds the run {name}: move it to {experiment / name}")
    return run


def _mapping(file: Stored) -> dict[str, Any]:
    try:
        text, as_json = file.data, file.file.suffix == ".json"
        mapping = json.loads(text) if as_json else plain_yaml(text)
    except (ValueError, yaml.YAMLError):
        mapping = None
    if not isinstance(mapping, dict):
        raise UserError(f"{file.where()} is corrupt or was not written by fedshift: remove its folder and run again")
    return mapping


def _content(run: PackedRun) -> tuple[str, str, str]:
    """What makes two runs the same: the JSON of what packing keeps of them, whatever the order of names in it."""
    return _same(with_kept_digits(run.result)), _same(run.identity), _same(rows_of(run.rounds))


def _same(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


def _check(files: dict[str, bytes], runs: dict[str, PackedRun], order: dict[str, Any], experiment: Path) -> None:
    """Raise UserError if the packed files do not read back as the same runs. Called before anything is written."""
    read, planned = packs.decode(files[packs.RUNS])
    rounds = packs.decode_rounds(files[packs.ROUNDS])
    for name, run in runs.items():
        if _content(replace(read[name], rounds=rounds.lines(read[name]))) != _content(run):
            raise UserError(f"{experiment / name} cannot be packed without loss: please report this")
    if _same(planned) != _same(order):
        raise UserError(f"{experiment / ORDER} cannot be packed without loss: please report this")


def _remove(folder: Path, experiment: Path) -> None:
    """Remove the files that were packed, and folders that are empty after that."""
    for name in (RESULT, ROUNDS, SETTINGS, _LOCK):
        (folder / name).unlink(missing_ok=True)
    change_sums(folder, {})
    with contextlib.suppress(OSError):  # the folder holds something else, such as a model
        while folder != experiment:
            os.rmdir(folder)
            folder = folder.parent


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
