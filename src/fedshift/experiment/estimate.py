"""How well the model of a run will do on samples without labels, from the runs beside it that left other sites out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from fedshift.data.domain import UNKNOWN, DataSet, DataSource
from fedshift.data.table_files import SiteFormat
from fedshift.errors import UserError
from fedshift.evaluation.estimate.changes import nearby_answers
from fedshift.evaluation.estimate.combination import NOT_LOOKED_AT, Estimate, LeftOut, estimate_accuracy, read
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.plain_sums import MOST_CLASSES, plain_reading, plain_sums
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.evaluation.estimate.two_classes import Range
from fedshift.evaluation.predictions import PREDICTIONS, UNLABELLED
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.site_metrics import common_threshold
from fedshift.evaluation.stored import RESULT, SETTINGS, check_sum, read_stored
from fedshift.experiment.changed_samples import changeable, looked_at, samples_at, usual_values
from fedshift.experiment.config.data_section import data_source
from fedshift.experiment.predict import ToPredict, TrainedModel, load_model
from fedshift.experiment.runs.run_folder import MODEL
from fedshift.extras import import_extra

_SAME, _DIGITS = 10, 5
"""So many samples of a site, and half of them, are among the data if their scores agree to so many digits."""
_MOST_SEEDS = 4
AT_SITE = "the site keeps it beside its predictions, in the folder that received names in its SITE.yaml"


@dataclass(frozen=True)
class Measured:
    """What a run noted of the samples of one site.

    Attributes:
        site: its name.
        part: of the predictions: target, held_out or unlabelled.
        unseen: whether the model did not train there.
        rows: each sample's row at its site (n,).
        known: scores and labels; labels are −1 where there are none.
        sources: the sites that the model trained at.
    """

    site: str
    part: str
    unseen: bool
    rows: NDArray[np.int64]
    known: LeftOut
    sources: frozenset[str]


def estimate_at(
    trained: TrainedModel,
    folder: Path | None,
    data: Path | Any,
    written: SiteFormat | None = None,
    source: DataSource | None = None,
) -> Estimate:
    """Estimate the accuracy of a model on samples without labels.

    The cases with known truth are the other targets of the run's experiment, of the same method and seed, each as the
    run that left it out measured it; and the run's own target, unless these are its samples. Labels that the data say
    are not read.

    Args:
        trained: the model.
        folder: of its run; None or one without runs beside it: there are no cases, and no estimate.
        data: the samples, as for `TrainedModel.read`.
        written: how a table is written.
        source: has the samples of the run's sites, which are changed and looked at again; None: what the run says of
            its data. Where they cannot be read, or are others, the estimate rests on the scores that the runs noted.

    Raises:
        UserError: the data do not fit the model, it gives no probabilities of classes, or predictions are damaged.

    Example:
        >>> estimate_at(load_model(Path("no-run")), None, "x.csv")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        fedshift.errors.UserError: there is no file
    """
    if trained.segments or trained.objective.task != "classification":
        raise UserError(f"estimate is for models that tell classes apart, and this one is for {_task(trained)}")
    return estimate_of(trained, folder, trained.read(data, written), source)


def estimate_of(
    trained: TrainedModel, folder: Path | None, samples: ToPredict, source: DataSource | None = None
) -> Estimate:
    """As `estimate_at`, of samples that were read."""
    scores = trained.scores(samples.inputs).astype(np.float64)
    source = source or (None if folder is None else _source_of(folder))
    read = None if source is None else _Read(source)
    left_out, trained_on = _cases(trained, folder, scores, read)
    nearby, apart = _looked_at_here(trained, samples.inputs, left_out, read)
    estimate = estimate_accuracy(
        left_out,
        scores,
        [] if folder is None else list(_other_seeds(folder, trained, samples.inputs)),
        unlike=samples.shift.refusal,
        unusual="; ".join(text for text in (samples.shift.warning, samples.left_out) if text) or None,
        nearby=nearby,
        threshold=0.5 if folder is None else threshold_of(folder),
        apart=apart,
        odd_rows=samples.shift.doubt,
        copied=share_of_copies(samples.inputs)
        - max((share_of_copies(site.scores) for site in left_out.values()), default=0.0),
    )
    if left_out and nearby is None:
        estimate = replace(estimate, reasons=(*estimate.reasons, NOT_LOOKED_AT))
    if not trained_on:
        return estimate
    why = f"the model trained at '{trained_on[0]}', whose samples these are: an estimate is for a new site"
    return replace(
        estimate,
        estimate=None,
        low=None,
        high=None,
        abstain=True,
        reasons=(why, *estimate.reasons),
        measures={name: Range(None, reason=why) for name in estimate.measures},
    )


def _task(trained: TrainedModel) -> str:
    return "segmentation" if trained.segments else trained.objective.task.replace("_", " ")


def _cases(
    trained: TrainedModel, folder: Path | None, scores: NDArray[np.float64], read: _Read | None
) -> tuple[dict[str, LeftOut], list[str]]:
    """The sites that were left out, without the one whose samples these are; and the sources whose samples they are."""
    if folder is None:
        return {}, []
    this_run = folder.absolute()
    known = {row.tobytes() for row in scores.round(_DIGITS)}
    cases, trained_on = {}, []
    for run in _siblings(folder):
        for item in measured_sites(run, trained.classes):
            if run == this_run and _same(item.known.scores, known):
                trained_on += [] if item.unseen else [item.site]
            elif item.unseen:
                cases[item.site] = item.known if read is None else _looked_at(run, item, read)
    return cases, trained_on


def _siblings(folder: Path) -> list[Path]:
    """The folders of the runs of the same method and seed, that of the run itself among them."""
    path = folder.absolute()
    return sorted(path.parents[1].glob(f"*/{path.name}")) if len(path.parents) > 1 else []


def _source_of(run: Path) -> DataSource | None:
    """The data that a run says it read, if they can be found without code of others."""
    try:
        if (settings := read_stored(run / SETTINGS)) is None:
            return None
        section = yaml.safe_load(settings.data)["data"]
        name = str(section["name"])
        if ":" in name or name.endswith(".py"):
            return None
        return data_source({key: value for key, value in section.items() if key != "fingerprint"}, run)
    except (UserError, OSError, yaml.YAMLError, KeyError, TypeError):
        return None


class _Read:
    """The data of a run's sites, read once for each encoding."""

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._read: list[tuple[DataSource, DataSet]] = []

    def encoded_for(self, trained: TrainedModel) -> DataSet:
        """The data as a model reads them: by sums of its sources, and of the site that it was adapted to.

        Raises:
            UserError: they cannot be read.
        """
        source, adapted = self._source, str(trained.metadata.get("adapted_to", "")).split("+")
        sources = {*trained.metadata["sources"], *adapted}
        for name in self._of(source).domains:
            source = source if name in sources else source.without(name)
        return self._of(source)

    def _of(self, source: DataSource) -> DataSet:
        for known, data in self._read:
            if known == source:
                return data
        self._read.append((source, source.build()))
        return self._read[-1][1]


def _looked_at_here(
    trained: TrainedModel, inputs: NDArray[Any], left_out: Mapping[str, LeftOut], read: _Read | None
) -> tuple[NDArray[np.float64] | None, Apart | None]:
    """What the model says near the samples, and how far these are; None if not all left-out sites were looked at so."""
    if read is None or not left_out or not all(site.looked_at for site in left_out.values()):
        return None, None
    if not np.isfinite(inputs).all():
        return None, None
    data = read.encoded_for(trained)
    usual = usual_values(data, list(left_out))
    if not len(inputs) or not changeable(inputs) or inputs.shape[1:] != usual.mean.shape:
        return None, None
    return nearby_answers(trained.scores, inputs, usual), samples_at(data, list(left_out)).apart(inputs)


def _looked_at(run: Path, item: Measured, read: _Read) -> LeftOut:
    """What the run's model says of a site's samples when they are changed.

    It is what the run noted, and no more, if data or model cannot be read, or if the model says something else of the
    samples than it did then.
    """
    try:
        left_out = load_model(run / MODEL)
        data = read.encoded_for(left_out)
    except UserError:
        return item.known
    return looked_at(left_out, data, item.site, item.rows, item.known)


def _same(scores: NDArray[Any], known: set[bytes]) -> bool:
    """Whether these are the samples with the ``known`` scores. Scores that are all alike tell nothing."""
    mine = {row.tobytes() for row in scores.astype(np.float64).round(_DIGITS)}
    both = len(mine & known)
    return both >= _SAME and 2 * both >= len(mine)


def estimate_at_run(run: Path, result: RunResult) -> Estimate:
    """Estimate the accuracy of a run at its target that has no labels, from the predictions that it noted.

    The cases with known truth are those of `estimate_at`, but only scores are read: no site's samples are needed.

    Args:
        run: its folder.
        result: its result.

    Raises:
        UserError: predictions are damaged.
    """
    classes = tuple(result.classes)
    answers = [label for label in noted_sites(run, classes) if label.part == UNLABELLED]
    if any(label.at_site for label in result.without_labels.values()):
        return Estimate(None, None, None, abstain=True, reasons=(AT_SITE,))
    if result.metric != "accuracy" or not answers:
        why = "no predictions were kept" if result.metric == "accuracy" else "estimates are of accuracies only"
        return Estimate(None, None, None, abstain=True, reasons=(why,))
    (answered,) = answers
    scores, text = answered.known.scores.astype(np.float64), result.without_labels[answered.site]
    left_out = {
        label.site: label.known
        for other in _siblings(run)
        if other != run.absolute()
        for label in measured_sites(other, classes)
        if label.unseen
    }
    estimate = estimate_accuracy(
        left_out,
        scores,
        unlike=text.unlike,
        unusual=text.unusual,
        threshold=answered.known.threshold,
        odd_rows=text.doubt,
    )
    return replace(estimate, reasons=(*estimate.reasons, NOT_LOOKED_AT)) if left_out else estimate


def left_out_sums(trained: TrainedModel, folder: Path | None) -> dict[str, Any] | None:
    """What an estimate elsewhere needs of the sites that runs beside a model's left out: no sample, but sums over them.

    Args:
        trained: the model.
        folder: of its run.

    Returns:
        The threshold, and of each site sums and a reading, as `checked_sites` reads them; None where there can be no
        estimate: for less than two such sites, more than `MOST_CLASSES` classes, or another task.

    Raises:
        UserError: predictions are damaged.
    """
    several = trained.segments or trained.objective.task != "classification" or len(trained.classes) > MOST_CLASSES
    if folder is None or several:
        return None
    every = [item for run in _siblings(folder) for item in measured_sites(run, trained.classes) if item.unseen]
    known = {item.site: item.known for item in every}
    if len(known) < 2:
        return None
    sums = {name: sums_of(item.scores, item.labels, item.threshold) for name, item in known.items()}
    others = {name: reduce(add, (item for other, item in sums.items() if other != name)) for name in sums}
    sites = {
        name: {
            "sums": plain_sums(sums[name]),
            "reading": plain_reading(read(others[name], site.scores)),
            "copied": share_of_copies(site.scores),
        }
        for name, site in known.items()
    }
    return {"threshold": threshold_of(folder), "sites": sites}


def measured_sites(run: Path, classes: tuple[str, ...]) -> Iterator[Measured]:
    """What a run noted of each site that it was measured at: see `noted_sites`."""
    return (item for item in noted_sites(run, classes) if item.part != UNLABELLED)


def noted_sites(run: Path, classes: tuple[str, ...]) -> Iterator[Measured]:
    """What a run noted of each site; nothing if it kept no predictions or is of other classes.

    Args:
        run: its folder.
        classes: names of the classes.

    Raises:
        UserError: the file is damaged.

    Example:
        >>> list(noted_sites(Path("no-run"), ("healthy", "ill")))
        []
    """
    path = run / PREDICTIONS
    if not path.is_file():
        return
    check_sum(path)
    pa = import_extra("pyarrow", extra="report", what=f"reading {path.name}")
    pq = import_extra("pyarrow.parquet", extra="report", what=f"reading {path.name}")

    try:
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"fedshift"])
        if tuple(about["classes"]) != classes:
            return
        sites, parts = (np.array(table.column(name).to_pylist()) for name in ("site", "part"))
        scores = np.stack([table.column(f"score_{name}").to_numpy() for name in classes], axis=1)
        class_numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: UNKNOWN}
        numbers = np.array([class_numbers[name] for name in table.column("label").to_pylist()], dtype=np.int64)
        numbered, sources = table.column("row").to_numpy(), set(about["sources"])
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        raise UserError(f"{path} is damaged: restore it, or delete {run} and run again") from None
    threshold = threshold_of(run) if len(classes) == 2 else 0.5
    for site, part in sorted({*zip(sites.tolist(), parts.tolist(), strict=True)}):
        rows = (sites == site) & (parts == part)
        unseen = part == "target" and site not in sources
        known = LeftOut(scores[rows], numbers[rows], threshold=threshold)
        yield Measured(site, part, unseen, numbered[rows], known, frozenset(sources))


def threshold_of(run: Path) -> float:
    """The score from which a run's model calls the second of two classes; 0.5 where its sources chose none.

    Raises:
        UserError: the run's result is damaged.

    Example:
        >>> threshold_of(Path("no-run"))
        0.5
    """
    if (text := read_stored(run / RESULT)) is None:
        return 0.5
    try:
        sites = RunResult.model_validate_json(text.data).sites
    except ValueError:
        raise UserError(f"{text.where()} cannot be read: remove it and run the experiment again") from None
    chosen = common_threshold([site for site in sites if site.part == "held_out"])
    return 0.5 if chosen is None else chosen


def _other_seeds(folder: Path, trained: TrainedModel, inputs: Any) -> Iterator[NDArray[np.float32]]:
    """What the models of other seeds of the same run say of the samples, where they can be loaded without trust."""
    files = (run / MODEL for run in sorted(folder.absolute().parent.glob("seed-*")) if run.name != folder.name)
    for file in [file for file in files if file.is_file()][:_MOST_SEEDS]:
        try:
            other = load_model(file)
        except UserError:
            continue
        if other.classes == trained.classes and other.preprocessing == trained.preprocessing:
            yield other.scores(inputs)
