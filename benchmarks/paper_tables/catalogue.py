"""The catalogue of the papers' tables and figures, and how far the experiments behind them are.

A folder such as the repository's ``benchmarks/`` holds ``papers.yaml`` (the entries), ``published.json`` (the papers'
numbers), ``experiments/`` and ``results/``. It is no part of the installed package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedshift.data.domain import DataSource
from fedshift.data.locate import data_root, find
from fedshift.errors import UserError, nearest
from fedshift.evaluation.stored import ORDER, is_finished, read_order, run_folders
from fedshift.evaluation.summary import AVERAGE
from fedshift.experiment.config.experiment import Experiment, load

ENTRIES, PUBLISHED, EXPERIMENTS, RESULTS = "papers.yaml", "published.json", "experiments", "results"
Kind = Literal["cells", "rounds", "weights", "report", "leakage", "distances", "features"]
By = Literal["class", "site"]
Quantity = Literal["score", "labelled", "unlabelled", "megabytes", "seconds", "memory"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CellSource(_Strict):
    """The runs behind a number of ours. A cell's place is its row's, with what its column changes."""

    experiment: str = Field("", description="the experiment's name, or none; the entry's first if empty")
    method: str = Field("", description="the method's label")
    target: str = Field(AVERAGE, description="a target, or the average over all")
    value: Quantity = Field(
        "score",
        description="score: accuracy, or the harmonic mean where both sides are measured; seconds: the processor's in "
        "a round; memory: most MiB of the process",
    )

    def at(self, column: CellSource) -> CellSource:
        """This place with what ``column`` says."""
        return self.model_copy(update={name: getattr(column, name) for name in column.model_fields_set})


def _method(value: object) -> object:
    return {"method": value} if isinstance(value, str) else value


def _target(value: object) -> object:
    return {"target": value} if isinstance(value, str) else value


class Panel(_Strict):
    """One table, or one panel of a figure.

    ``kind`` says what is shown: cells are numbers of finished runs, rows × columns; the lines of ``rows`` over rounds
    are accuracies (rounds), weights of sites (weights), or another number that the method reports (report), on average
    over all targets or at one. The points of ``features`` are where the model of a row's method places samples.
    """

    title: str = ""
    kind: Kind = "cells"
    published: str = Field("", description="the key of the published numbers")
    comparable: bool = Field(
        True, description="whether both are of the same data, so that their difference says anything"
    )
    rows: dict[str, Annotated[CellSource, BeforeValidator(_method)]] = Field(default_factory=dict)
    columns: dict[str, Annotated[CellSource, BeforeValidator(_target)]] = Field(
        default_factory=lambda: {AVERAGE: CellSource(target=AVERAGE)}
    )
    along: Literal["rows", "columns"] = Field("columns", description="what the horizontal axis shows")
    axis: str = Field("", description="the label of the horizontal axis")
    measure: str = Field("accuracy, %", description="the label of the vertical axis")
    baseline: str = Field("", description="the row with which the others are compared on average")
    site: str = Field("", description="weights: the site whose weight is shown; every site's if empty")
    layer: str = Field("", description="weights: the layer, for methods whose weights differ between layers")
    by: By = Field("class", description="features: what the colours show")
    number: str = Field("", description="report: the name of the number")


class Source(_Strict):
    """An experiment file, the fields that are set in it, and for an audit how many iterations it makes."""

    file: str
    set: tuple[str, ...] = ()
    audit_iterations: int = Field(0, description="above 0: the numbers come from `fedshift audit leakage`")


def _file(source: object) -> object:
    return {"file": source} if isinstance(source, str) else source


class Entry(_Strict):
    """A table or a figure of a paper."""

    name: str
    paper: str
    shows: str
    experiments: tuple[Annotated[Source, BeforeValidator(_file)], ...] = ()
    panels: tuple[Panel, ...] = ()
    instead: str = Field("", description="what differs from the paper's data or setting")
    missing: str = Field("", description="what has to be there before it can run; empty where it can")

    @model_validator(mode="after")
    def _runs_or_says_why(self) -> Entry:
        if not self.experiments and not self.missing:
            raise ValueError(f"{self.name}: name an experiment, or say what is missing")
        return self


@dataclass(frozen=True)
class State:
    """How far an experiment is.

    Attributes:
        experiment: the experiment.
        finished: number of its finished runs.
        planned: number of its runs; None where only the data say it.
        absent: the files or folders that are not here, if it has runs to do.
    """

    experiment: Experiment
    finished: int
    planned: int | None
    absent: str = ""

    @property
    def done(self) -> bool:
        return self.finished == self.planned

    @property
    def text(self) -> str:
        """How many runs are finished, in words: "54 runs finished" or "20 of 54 runs finished"."""
        of = "" if self.done or self.planned is None else f" of {self.planned}"
        runs = "run" if self.finished == self.planned == 1 else "runs"
        begun = f"{self.finished}{of} {runs} finished" if self.finished else "not begun"
        return f"{begun}; not here: {self.absent}" if self.absent else begun


@dataclass(frozen=True)
class Catalogue:
    """The entries of a folder and the published numbers.

    Attributes:
        folder: the folder.
        entries: the entries in their order.
        published: key → ``source`` and ``rows``, as in the file.
    """

    folder: Path
    entries: tuple[Entry, ...]
    published: Mapping[str, Mapping[str, Any]]

    @property
    def results(self) -> Path:
        """The folder that holds a folder of runs for each experiment."""
        return self.folder / RESULTS

    def entry(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            UserError: there is none.
        """
        match = next((entry for entry in self.entries if entry.name == name), None)
        if match is None:
            names = [entry.name for entry in self.entries]
            raise UserError(f"no table or figure is called '{name}'; {nearest(name, names)} (papers.py list)")
        return match

    def file(self, source: Source) -> Path:
        """The experiment file of a source."""
        return self.folder / EXPERIMENTS / f"{source.file}.yaml"

    def experiment(self, source: Source) -> Experiment:
        """The experiment of a source."""
        return load(self.file(source), source.set)

    def state(self, source: Source) -> State:
        """How far the experiment of ``source`` is. Data and results are not read."""
        experiment = self.experiment(source)
        folder = self.results / experiment.name
        if source.audit_iterations:
            return State(experiment, int((folder / "leakage.json").exists()), 1)
        finished = {run.relative_to(folder.absolute()).parts for run in run_folders(folder) if is_finished(run)}
        targets = experiment.protocol.named_targets or tuple(
            dict.fromkeys([*read_order(folder / ORDER).targets, *(target for _, target, _ in finished)])
        )
        planned = {
            (method.display, target, f"seed-{seed}")
            for method in experiment.methods
            for target in targets
            for seed in experiment.protocol.seeds
        }
        done = bool(planned) and planned <= finished
        return State(
            experiment,
            len(planned & finished),
            len(planned) if targets else None,
            "" if done else absent(experiment.data),
        )


def read(folder: Path) -> Catalogue:
    """Read a folder's catalogue.

    Raises:
        UserError: there is none, or it has a mistake.
    """
    try:
        raw = yaml.safe_load((folder / ENTRIES).read_text(encoding="utf-8"))
        published = json.loads((folder / PUBLISHED).read_text(encoding="utf-8"))
        entries = tuple(Entry.model_validate(entry) for entry in raw)
    except FileNotFoundError:
        raise UserError(
            f"'{folder}' has no {ENTRIES} with {PUBLISHED}: call this from a clone of fedshift's repository, "
            "or give its benchmarks folder with --folder"
        ) from None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{folder / ENTRIES} or {PUBLISHED} cannot be read: {' '.join(message.split())}") from error
    for entry in entries:
        for panel in entry.panels:
            if panel.published and panel.published not in published:
                raise UserError(f"{folder / ENTRIES}: {entry.name}: {PUBLISHED} has no '{panel.published}'")
    return Catalogue(folder, entries, published)


def absent(source: DataSource) -> str:
    """The files or the folder of a data set that are not here; "" if all are."""
    root = getattr(source, "root", None)
    if root is not None:
        return "" if Path(root).is_dir() else f"the folder {root}"
    lacking = [file for file in type(source).manifest().sha256 if data_root() is None or find([file]) is None]
    return ", ".join(lacking)
