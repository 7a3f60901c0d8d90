"""A trained model watched month by month: its inputs, its answers and its estimated accuracy, in a log of sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from fedshift.data.domain import Preprocessing
from fedshift.data.input_guard import InputShift
from fedshift.data.table_files import SiteFormat
from fedshift.data.tables import encoding_of
from fedshift.errors import UserError
from fedshift.evaluation.estimate.combination import Estimate
from fedshift.evaluation.estimate.drift import ColumnSums, answers, answers_differ, columns_differ
from fedshift.experiment.estimate import estimate_of
from fedshift.experiment.predict import ToPredict, TrainedModel, check_scores
from fedshift.files import hold_lock, read_text, write_bytes
from fedshift.section import Section

ALARMS = 0.01
"""One month in a hundred that are all alike is called a drift."""
BASELINE = 3
"""Months with which the others are compared."""
FEWEST = 20
"""Samples of a month; of fewer nothing but their number is noted, so that no line is about a few people."""
_MOST_COLUMNS = 100


class Month(Section):
    """A line of the log. It holds sums over at least `FEWEST` samples, names of columns and no value of a sample."""

    month: str  # its name in the log
    model: str  # which model it is of
    samples: int = Field(ge=0)  # how many there were
    estimate: float | None = None  # of the accuracy, in percent; None where there is none
    low: float | None = None  # likewise
    high: float | None = None  # likewise
    harmful: bool = False  # whether the model may do much worse than where it was measured
    unlike: tuple[str, ...] = ()  # columns, or "images", that look too unlike the training data
    unusual: tuple[str, ...] = ()  # those that look unlike it at all
    answers: tuple[int, ...] = ()  # samples by predicted class and confidence; empty of too few samples
    # mean and deviation of each numeric column
    columns: dict[str, tuple[int, float, float]] = Field(default_factory=dict)
    drift: dict[str, float] = Field(default_factory=dict)  # what differs from the first months, with its p
    reference: bool = False  # whether later months are compared with it

    @property
    def alarm(self) -> bool:
        """Whether somebody should look at it."""
        return bool(self.unlike or self.drift or self.harmful)


def monitor(
    trained: TrainedModel,
    folder: Path | None,
    data: Path | Any,
    log: Path,
    month: str | None = None,
    *,
    alarms: float = ALARMS,
    baseline: int = BASELINE,
    written: SiteFormat | None = None,
) -> Month:
    """Look at the samples of a new month, compare them with those of the first ones, and append a line to the log.

    Half of the ``alarms`` is for the model's answers, half for the columns, each for its part of it, so that of months
    that are drawn alike no larger share is called a drift. A month that looks too unlike the training data is none of
    the first ones.

    Args:
        folder: of its run; None: there is none, and no estimate.
        data: the samples, as for `TrainedModel.read`. Labels that they say are not read.
        log: the file, which is made where there is none.
        month: its name in the log; by default its number.
        alarms: share of months that may be called a drift though nothing changed.

    Raises:
        UserError: the data do not fit the model, the log is damaged or of another model, or has the month already.
    """
    if not 0 < alarms < 1 or baseline < 1:
        raise UserError("monitor: alarms is a share between 0 and 1, and baseline a number of 1 or more")
    samples = trained.read(data, written)
    digest = _digest(trained)
    with hold_lock(log.with_name(f".{log.name}.lock")):
        before = read_log(log)
        named = str(len(before) + 1) if month is None else month
        _check(before, log, digest, named)
        result = _looked_at(trained, folder, samples, Month(month=named, model=digest, samples=len(samples.names)))
        first = [item for item in before if item.reference]
        if result.answers and len(first) < baseline:
            result = result.model_copy(update={"reference": not result.unlike})
        if result.answers and first:
            result = result.model_copy(update={"drift": dict(_drift(first, result, alarms))})
        lines = [item.model_dump_json() for item in (*before, result)]
        write_bytes(log, ("\n".join(lines) + "\n").encode(), private=True)
    return result


def read_log(path: Path) -> list[Month]:
    """The months of a log; none if there is no file.

    Raises:
        UserError: it cannot be read, or a line is not one of a log.

    Example:
        >>> read_log(Path("no-log.jsonl"))
        []
    """
    if not path.exists():
        return []
    lines = read_text(path).splitlines()
    log = []
    for number, line in enumerate(lines, 1):
        try:
            log.append(Month.model_validate_json(line))
        except ValidationError:
            raise UserError(f"{path}, line {number}: this is no line of 'fedshift monitor': restore the file") from None
    return log


def _check(before: Sequence[Month], log: Path, digest: str, named: str) -> None:
    if any(item.model != digest for item in before):
        raise UserError(f"{log} is the log of another model: name another file for this one")
    if any(item.month == named for item in before):
        raise UserError(f"{log} has month '{named}' already: give another name")


def _digest(trained: TrainedModel) -> str:
    """Tells models apart: the beginning of a digest of their numbers, and of how samples are prepared."""
    whole = hashlib.sha256(trained.preprocessing.model_dump_json().encode())
    for name, tensor in sorted(trained.network.state_dict().items()):
        whole.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def _looked_at(trained: TrainedModel, folder: Path | None, samples: ToPredict, month: Month) -> Month:
    if month.samples < FEWEST:
        return month
    scores = trained.probabilities(samples.inputs)
    check_scores(scores, samples.names)
    estimate = _estimate(trained, folder, samples)
    told = {} if estimate is None else {"estimate": estimate.estimate, "low": estimate.low, "high": estimate.high}
    return month.model_copy(
        update={
            **told,
            "harmful": estimate is not None and estimate.harmful,
            "unlike": _names(samples.shift, refused=True),
            "unusual": _names(samples.shift, refused=False),
            "answers": tuple(answers(scores).tolist()),
            "columns": _columns(samples, trained.stored),
        }
    )


def _estimate(trained: TrainedModel, folder: Path | None, samples: ToPredict) -> Estimate | None:
    return None if trained.objective.task != "classification" else estimate_of(trained, folder, samples)


def _names(shift: InputShift, *, refused: bool) -> tuple[str, ...]:
    """What is unlike, by names alone: the words for it may have values of samples."""
    columns = [column.name for column in shift.columns if (column.is_refused if refused else column.reasons)]
    images = shift.refused_images if refused else shift.images
    return (*(["images"] if images else []), *columns)


def _columns(samples: ToPredict, preprocessing: Preprocessing) -> dict[str, tuple[int, float, float]]:
    """Mean and deviation of each column of numbers, as the network reads it."""
    if preprocessing.kind == "image" or samples.inputs.ndim != 2:
        return {}
    names = (
        [item.name for item in encoding_of(preprocessing).numeric]
        if preprocessing.kind == "table"
        else [str(number) for number in range(samples.inputs.shape[1])]
    )
    values = samples.inputs[:, : len(names)].astype(np.float64)
    means, deviations = values.mean(axis=0), values.std(axis=0)
    every = zip(names[:_MOST_COLUMNS], means.tolist(), deviations.tolist(), strict=False)
    return {name: (len(values), mean, std) for name, mean, std in every}


def _drift(first: Sequence[Month], now: Month, alarms: float) -> Iterator[tuple[str, float]]:
    """What differs from the first months, and its p."""
    before = np.sum([item.answers for item in first], axis=0)
    p = answers_differ(before, now.answers)
    if p <= alarms / 2:
        yield "answers", p
    sums = [{name: ColumnSums(*three) for name, three in item.columns.items()} for item in (*first, now)]
    shared = [name for name in sums[-1] if all(name in item for item in sums)]
    together = {name: reduce(add, (item[name] for item in sums[:-1])) for name in shared}
    result = columns_differ(together, {name: sums[-1][name] for name in shared})
    yield from ((f"column {name}", p) for name, p in result.items() if p <= alarms / 2 / max(1, len(result)))
