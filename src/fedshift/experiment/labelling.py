"""Samples of a site without labels that should get some: the list to fill in, and what it says once it is filled."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.table_files import SiteFormat, is_missing
from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.labelling import (
    LEVEL,
    MOST_STRATA,
    Drawn,
    Interval,
    accuracy_of,
    auroc_of,
    draw,
    expected_interval,
    labels_needed,
    strata_of,
)
from fedshift.experiment.predict import TrainedModel, check_scores
from fedshift.files import write_bytes
from fedshift.text import csv_cell, csv_text, from_csv_cell

_HEAD = ("sample", "row", "draw", "label")
"""``draw`` is the same in every line: see `_mark`."""


@dataclass(frozen=True)
class FromLabels:
    """What labels of some samples say of a model on all of them, in percent."""

    labels: int  # how many there are
    samples: int  # of how many samples
    accuracy: Interval  # with its interval of 90 %
    auroc: Interval | None  # likewise; None unless there are two classes, each with a label
    needed: int  # labels for an interval of ``width`` points around the accuracy, those of before among them
    width: float  # in points

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""

        def in_json(interval: Interval | None) -> dict[str, float] | None:
            return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}

        return {
            "labels": self.labels,
            "samples": self.samples,
            "level": 100 * LEVEL,
            "accuracy": in_json(self.accuracy),
            "auroc": in_json(self.auroc),
            "width": self.width,
            "needed": self.needed,
        }


@dataclass(frozen=True)
class ToLabel:
    """Samples to have labelled, drawn from those of a site."""

    names: tuple[str, ...]  # of all samples of the site
    scores: NDArray[np.float32]  # what the model says of them (n, classes)
    classes: tuple[str, ...]  # names of the classes
    drawn: Drawn  # the samples to label

    @property
    def rows(self) -> list[int]:
        """Their rows, in the order in which they are to be labelled."""
        return [int(row) for row in self.drawn.rows]

    def interval_at(self, accuracy: float) -> Interval:
        """The interval that their labels will have at a model of this accuracy, in percent."""
        return expected_interval(self.scores, self.drawn, accuracy)

    def labels_for(self, accuracy: float, width: float) -> int:
        """How many labels an interval of so many points is expected to take at a model of this accuracy."""
        return labels_needed(self.interval_at(accuracy), len(self.rows), len(self.names), width)

    def text(self, labels: Mapping[int, str] | None = None) -> str:
        """The list as CSV, with the labels that are known by row. It says nothing of the model's answers, so that they
        sway nobody who labels."""
        known, mark = labels or {}, _mark(self.scores, self.drawn.asked)
        lines = [[csv_cell(self.names[row]), str(row), mark, csv_cell(known.get(row, ""))] for row in self.rows]
        return csv_text([_HEAD, *lines])

    def write(self, path: Path, labels: Mapping[int, str] | None = None) -> None:
        """Write the list; only the user may read it. UserError if the file exists, or cannot be written."""
        if path.exists():
            raise UserError(f"{path} exists, perhaps with labels in it: name another file")
        write_bytes(path, self.text(labels).encode(), private=True)

    def measure(self, labels: Mapping[int, str], width: float = 10.0) -> FromLabels:
        """What labels say of the model on all samples.

        Args:
            labels: row → class, of some of the samples that were drawn.
            width: of the interval that is asked for, in points.

        Raises:
            UserError: there is no label, one is no class, or is of a sample that was not drawn.
        """
        index = {name: number for number, name in enumerate(self.classes)}
        order = {row: at for at, row in enumerate(self.rows)}
        for row, label in labels.items():
            if row not in order:
                raise UserError(f"labels: row {row} is not among those that were drawn")
            if label not in index:
                raise UserError(
                    f"labels: '{label}' (row {row}) is none of the model's classes; {nearest(label, self.classes)}"
                )
        rows = sorted(labels, key=order.__getitem__)
        kept = np.array([order[row] for row in rows], dtype=np.int64)
        some = Drawn(self.drawn.rows[kept], self.drawn.strata[kept], self.drawn.sizes)
        truth = np.array([index[labels[row]] for row in rows], dtype=np.int64)
        accuracy = accuracy_of(self.scores[some.rows].argmax(axis=1) == truth, some)
        auroc = auroc_of(truth, self.scores[some.rows, 1], some) if len(self.classes) == 2 else None
        needed = labels_needed(accuracy, len(rows), len(self.names), width)
        return FromLabels(len(rows), len(self.names), accuracy, auroc, needed, width)


def samples_to_label(
    trained: TrainedModel,
    data: Path | Any,
    number: int = 50,
    seed: int = 0,
    *,
    strata: bool | None = None,
    most: int = MOST_STRATA,
    written: SiteFormat | None = None,
) -> ToLabel:
    """Draw samples of a site to have labelled.

    Args:
        data: the samples, as for `TrainedModel.read`. Labels that they say are not read.
        seed: of the draw; with one seed a longer list holds a shorter one.
        strata, most: as for `draw`.

    Raises:
        UserError: the data do not fit the model, or it gives no probabilities of classes.
    """
    scores, names = _score(trained, data, written)
    return ToLabel(names, scores, trained.classes, draw(scores, number, seed, strata=strata, most=most))


def list_to_label(
    trained: TrainedModel, data: Path | Any, path: Path, written: SiteFormat | None = None
) -> tuple[ToLabel, dict[int, str]]:
    """Read a list that was written for these data, and the labels that it has by row.

    UserError if it cannot be read, or is of other data.
    """
    scores, names = _score(trained, data, written)
    drawn, labels = _read(path, names, scores)
    return ToLabel(names, scores, trained.classes, drawn), labels


def _score(
    trained: TrainedModel, data: Path | Any, written: SiteFormat | None
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    if trained.segments or trained.objective.task != "classification":
        raise UserError("label is for models that tell classes apart, and this one does not")
    samples = trained.read(data, written)
    scores = trained.scores(samples.inputs)
    check_scores(scores, samples.names)
    return scores, tuple(map(str, samples.names))


def _mark(scores: NDArray[np.float32], asked: int) -> str:
    """How a list was drawn: into how many groups by confidence, and a digest of them. It tells nothing of a sample."""
    return f"{asked}-{hashlib.sha256(strata_of(scores, asked).tobytes()).hexdigest()[:16]}"


def _read(path: Path, names: tuple[str, ...], scores: NDArray[np.float32]) -> tuple[Drawn, dict[int, str]]:
    try:
        lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows, marks, labels = list[int](), set[str](), dict[int, str]()
    for number, line in enumerate(lines, 2):
        try:
            name, row, mark, label = (str(line[column] or "") for column in _HEAD)
            at = int(row)
        except (KeyError, ValueError):
            raise UserError(f"{path}, line {number}: expected {', '.join(_HEAD)}, as 'fedshift label' wrote") from None
        if not 0 <= at < len(names) or names[at] != from_csv_cell(name):
            raise UserError(
                f"{path}, line {number}: row {at} of the data is another sample: is the list of other data?"
            )
        rows.append(at)
        marks.add(mark)
        if not is_missing(label.strip()):
            labels[at] = from_csv_cell(label.strip())
    asked = next((number for number in range(1, MOST_STRATA + 1) if marks == {_mark(scores, number)}), None)
    if len(marks) == 1 and asked is None:
        raise UserError(f"{path}: the list was drawn with another model, or of other data: give those")
    if asked is None or len(set(rows)) != len(rows):
        raise UserError(f"{path}: rows are not as 'fedshift label' wrote them: fill in the column label only")
    strata, chosen = strata_of(scores, asked), np.array(rows, dtype=np.int64)
    return Drawn(chosen, strata[chosen], tuple(np.bincount(strata).tolist()), asked), labels
