"""How well the model of a run will do on samples without labels, from the runs beside it that left other sites out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import UNKNOWN
from fedshift.data.table_files import SiteFormat
from fedshift.errors import UserError
from fedshift.evaluation.estimate.combination import Estimate, LeftOut, estimate_accuracy
from fedshift.evaluation.predictions import PREDICTIONS, UNLABELLED
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.stored import check_sum
from fedshift.experiment.predict import ToPredict, TrainedModel, load_model
from fedshift.experiment.runs.run_folder import MODEL

_SAME, _DIGITS = 10, 5
"""So many samples of a site, and half of them, are among the data if their scores agree to so many digits."""
_MOST_SEEDS = 4


@dataclass(frozen=True)
class Measured:
    """What a run noted of the samples of one site.

    Attributes:
        site: its name.
        part: of the predictions: target, held_out or unlabelled.
        unseen: whether the model did not train there.
        rows: each sample's row at its site (n,).
        known: scores and labels; labels are −1 where there are none.
    """

    site: str
    part: str
    unseen: bool
    rows: NDArray[np.int64]
    known: LeftOut


def estimate_at(
    trained: TrainedModel, folder: Path | None, data: Path | Any, written: SiteFormat | None = None
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

    Raises:
        UserError: the data do not fit the model, it gives no probabilities of classes, or predictions are damaged.

    Example:
        >>> estimate_at(load_model(Path("no-run")), None, "x.csv")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        fedshift.errors.UserError: there is no file
    """
    if trained.segments or trained.objective.task != "classification":
        raise UserError(f"estimate is for models that tell classes apart, and this one is for {_task(trained)}")
    return estimate_of(trained, folder, trained.read(data, written))


def estimate_of(trained: TrainedModel, folder: Path | None, samples: ToPredict) -> Estimate:
    """As `estimate_at`, of samples that were read."""
    scores = trained.scores(samples.inputs).astype(np.float64)
    left_out, trained_on = _cases(trained, folder, scores)
    estimate = estimate_accuracy(
        left_out,
        scores,
        [] if folder is None else list(_other_seeds(folder, trained, samples.inputs)),
        unlike=samples.shift.refusal,
        unusual="; ".join(text for text in (samples.shift.warning, samples.left_out) if text) or None,
    )
    if not trained_on:
        return estimate
    why = f"the model trained at '{trained_on[0]}', whose samples these are: an estimate is for a new site"
    return replace(estimate, estimate=None, low=None, high=None, abstain=True, reasons=(why, *estimate.reasons))


def _task(trained: TrainedModel) -> str:
    return "segmentation" if trained.segments else trained.objective.task.replace("_", " ")


def _cases(
    trained: TrainedModel, folder: Path | None, scores: NDArray[np.float64]
) -> tuple[dict[str, LeftOut], list[str]]:
    """The sites that were left out, without the one whose samples these are; and the sources whose samples they are."""
    if folder is None:
        return {}, []
    own = folder.absolute()
    known = {row.tobytes() for row in scores.round(_DIGITS)}
    cases, trained_on = {}, []
    for run in _siblings(folder):
        for one in measured(run, trained.classes):
            if run == own and _same(one.known.scores, known):
                trained_on += [] if one.unseen else [one.site]
            elif one.unseen:
                cases[one.site] = one.known
    return cases, trained_on


def _siblings(folder: Path) -> list[Path]:
    """The folders of the runs of the same method and seed, that of the run itself among them."""
    own = folder.absolute()
    return sorted(own.parents[1].glob(f"*/{own.name}")) if len(own.parents) > 1 else []


def _same(scores: NDArray[Any], known: set[bytes]) -> bool:
    """Whether these are the samples with the ``known`` scores. Scores that are all alike tell nothing."""
    mine = {row.tobytes() for row in scores.astype(np.float64).round(_DIGITS)}
    both = len(mine & known)
    return both >= _SAME and 2 * both >= len(mine)


def estimate_at_run(run: Path, result: RunResult) -> Estimate:
    """Estimate the accuracy of a run at its target that has no labels, from the predictions that it noted.

    The cases with known truth are those of `estimate_at`.

    Args:
        run: its folder.
        result: its result.

    Raises:
        UserError: predictions are damaged.
    """
    classes = tuple(result.classes)
    answers = [one for one in noted(run, classes) if one.part == UNLABELLED]
    if result.metric != "accuracy" or not answers:
        why = "no predictions were kept" if result.metric == "accuracy" else "estimates are of accuracies only"
        return Estimate(None, None, None, abstain=True, reasons=(why,))
    (answered,) = answers
    scores, said = answered.known.scores.astype(np.float64), result.without_labels[answered.site]
    left_out = {
        one.site: one.known
        for other in _siblings(run)
        if other != run.absolute()
        for one in measured(other, classes)
        if one.unseen
    }
    return estimate_accuracy(left_out, scores, unlike=said.unlike, unusual=said.unusual)


def measured(run: Path, classes: tuple[str, ...]) -> Iterator[Measured]:
    """What a run noted of each site that it was measured at: see `noted`."""
    return (one for one in noted(run, classes) if one.part != UNLABELLED)


def noted(run: Path, classes: tuple[str, ...]) -> Iterator[Measured]:
    """What a run noted of each site; nothing if it kept no predictions or is of other classes.

    Args:
        run: its folder.
        classes: names of the classes.

    Raises:
        UserError: the file is damaged.

    Example:
        >>> list(noted(Path("no-run"), ("healthy", "ill")))
        []
    """
    path = run / PREDICTIONS
    if not path.is_file():
        return
    check_sum(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"fedshift"])
        if tuple(about["classes"]) != classes:
            return
        sites, parts = (np.array(table.column(name).to_pylist()) for name in ("site", "part"))
        scores = np.stack([table.column(f"score_{name}").to_numpy() for name in classes], axis=1)
        place: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: UNKNOWN}
        numbers = np.array([place[name] for name in table.column("label").to_pylist()], dtype=np.int64)
        numbered, sources = table.column("row").to_numpy(), set(about["sources"])
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        raise UserError(f"{path} is damaged: restore it, or delete {run} and run again") from None
    for site, part in sorted({*zip(sites.tolist(), parts.tolist(), strict=True)}):
        rows = (sites == site) & (parts == part)
        unseen = part == "target" and site not in sources
        yield Measured(site, part, unseen, numbered[rows], LeftOut(scores[rows], numbers[rows]))


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
