"""What stored predictions show: which classes are confused, ROC curves, the worst mistakes, and where samples lie."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.domain import DataSet, SparseRows
from fedshift.data.site_data import SiteData
from fedshift.data.tables import TableEncoding
from fedshift.errors import UserError
from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.evaluation.stored import check_sum
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun
from fedshift.experiment.predict import load_model
from fedshift.experiment.runs.evaluator import answering
from fedshift.report.collect import FinishedRun
from fedshift.report.conditions import role_of
from fedshift.report.run_means import Curve

_PER_SITE = 60
_LARGEST = 128
"""Pixels on the longer side of a picture."""


@dataclass(frozen=True)
class Placed:
    """Where a model places samples."""

    run: FinishedRun  # the run whose model it is
    points: NDArray[np.float32]  # their features in two dimensions (n, 2)
    classes: list[str]  # the name of each sample's class (n)
    sites: list[str]  # the name of each sample's site (n)


class ShownSamples:
    """The samples of an experiment, as the page shows them.

    Args:
        experiment: the experiment. Its data are read when they are first asked for.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    def placement(self, run: FinishedRun) -> Placed | None:
        """t-SNE of the features that a run's model has of some training samples of each source and of its target's.

        The model is the one that predicts at the target. None if its file is gone, or if there are too few samples.
        """
        planned = next((planned_run for planned_run in self._plan.runs if _is(planned_run, run)), None)
        if planned is None:
            return None
        try:
            trained = load_model(run.folder, planned.run.method, self._experiment.model.code)
        except UserError:
            return None
        feature_parts: list[tuple[str, NDArray[np.int64], NDArray[np.float32]]] = []
        data, split = planned.data, planned.split
        parts = [(name, rows, False) for name, rows in split.train.items()]
        parts += [(name, rows, True) for name, rows in split.measured.items()]
        for name, rows, is_target in parts:
            if not len(rows):
                continue
            chosen = rows[np.unique(np.linspace(0, len(rows) - 1, _PER_SITE).astype(int))]
            view = SiteData([(data.domains[name], chosen, 0)], data.preprocessing)
            new_site = planned.experiment.protocol.new_site_of(trained.method, view.input_shape, split)
            network = answering(trained.network, view, new_site if is_target else None)
            with torch.no_grad():
                features = [network.features(inputs).flatten(1) for inputs, _, _ in view.all_batches(_PER_SITE)]
            feature_parts.append((name, view.labels.numpy(), torch.cat(features).numpy()))
        every = np.concatenate([features for *_, features in feature_parts])
        if len(every) < 8 or not np.isfinite(every).all():
            return None
        labels = [data.classes[label] for _, some, _ in feature_parts for label in some]
        return Placed(run, _tsne(every), labels, [name for name, some, _ in feature_parts for _ in some])

    def picture(self, site: str, row: int) -> bytes | None:
        """A PNG of a sample; None if the data are no images."""
        inputs = self._images.domains[site].inputs if site in self._images.domains else None
        if isinstance(inputs, SparseRows) or inputs is None or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
            return None
        pixels = np.asarray(inputs[row]).transpose(1, 2, 0)
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        image.thumbnail((_LARGEST, _LARGEST))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    def words(self, site: str, row: int) -> str:
        """The columns of a table's row, as far as its encoding tells them; "" if the data are no table."""
        data = self._images
        if data.preprocessing.table is None or site not in data.domains:
            return ""
        inputs = data.domains[site].inputs
        assert isinstance(inputs, np.ndarray)
        return ", ".join(_columns(TableEncoding.model_validate(data.preprocessing.table), inputs[row]))

    @cached_property
    def _images(self) -> DataSet:
        """The data as the files have them: with a frozen backbone images, not features."""
        return self._experiment.data.build()

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self._experiment, self._experiment.protocol.taking_part(build_data(self._experiment)))


def _is(planned: PlannedRun, run: FinishedRun) -> bool:
    planned_run, result = planned.run, run.result
    return (planned_run.method.display, planned_run.target, planned_run.seed) == (
        result.method,
        result.target,
        result.seed,
    )


def _tsne(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 2): neighbours stay neighbours. Distances between far points mean nothing."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, (len(features) - 1) / 3)
    # Threads wait for each other thousands of times: beside other work two take minutes where one takes seconds.
    with threadpool_limits(1):
        points: NDArray[np.float32] = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(features)
    return points


def _columns(encoding: TableEncoding, row: NDArray[np.float32]) -> list[str]:
    """Name and value of each column of an encoded row."""
    gone = iter(row[len(encoding.numeric) :])
    texts = []
    for value, numeric in zip(row, encoding.numeric, strict=False):
        missing = numeric.can_be_missing and next(gone) > 0
        texts.append(f"{numeric.name} {'missing' if missing else f'{value * numeric.std + numeric.mean:.4g}'}")
    flags = list(gone)
    for categorical in encoding.categorical:
        here, flags = flags[: len(categorical.categories)], flags[len(categorical.categories) :]
        named = [name for name, flag in zip(categorical.categories, here, strict=True) if flag > 0]
        texts.append(f"{categorical.name} {named[0] if named else 'unknown'}")
    return texts


MOST_CLASSES = 20
_MOST_TARGETS = 6
_MISTAKES = 15
_MOST_PLACED = 4
_POINTS = 60
"""Points of a ROC curve that are drawn."""


@dataclass(frozen=True)
class Mistake:
    """A sample that was wrong."""

    name: str  # its id, or its row if the data have no ids
    site: str  # its site
    label: str  # names of classes; of the seed that was surest
    predicted: str  # likewise
    score: float  # of the wrong class, mean over seeds (0 where a seed was right)
    wrong: int  # seeds that were wrong
    seeds: int  # of all
    picture: bytes | None = None  # a PNG of it; None if it is not shown, or is no image
    words: str = ""  # its columns, where it is shown and a row of a table


@dataclass(frozen=True)
class Predictions:
    """What the predictions of all runs show."""

    classes: Sequence[str]  # the names of the classes
    # method → counts (true class, predicted class) of all targets and seeds; of at most 20 classes
    confusion: Mapping[str, NDArray[Any]]
    roc: Mapping[str, Mapping[str, Curve]]  # target → method → ROC curve of the samples of all seeds
    method: str | None  # the method whose mistakes are listed
    mistakes: tuple[Mistake, ...]  # the worst ones
    shown: bool  # whether samples themselves are shown


@dataclass(frozen=True)
class _Predicted:
    """What one run predicted at its target: site, row and name of each sample, class numbers (n,), scores (n, c)."""

    run: FinishedRun
    sites: Sequence[str]
    rows: Sequence[int]
    names: Sequence[str]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    scores: NDArray[np.float64]


def predictions_of(
    runs: Sequence[FinishedRun], method: str | None, samples: ShownSamples | None = None
) -> Predictions | None:
    """What the stored predictions show, and the mistakes of ``method``; None for tasks that are no classification.

    It is empty where none were kept. With ``samples`` the samples themselves are shown.
    """
    classes = runs[0].result.classes
    if runs[0].result.metric != "accuracy" or any(run.result.classes != classes for run in runs):
        return None
    predictions = [predicted for run in runs if (predicted := _read(run, classes)) is not None]
    chosen = [run for run in predictions if run.run.result.method == method]
    return Predictions(
        classes,
        _confusion(predictions, classes) if len(classes) <= MOST_CLASSES else {},
        _roc(predictions),
        method,
        _mistakes(chosen, classes, samples),
        samples is not None,
    )


def _read(run: FinishedRun, classes: Sequence[str]) -> _Predicted | None:
    """A run's predictions at its target; None if they were not kept."""
    path = run.folder / PREDICTIONS
    if not path.exists():
        return None
    check_sum(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, filters=[("part", "=", "target")])
        columns = {name: table.column(name).to_pylist() for name in ("site", "row", "id", "label", "predicted")}
        scores = np.stack([table.column(f"score_{name}").to_numpy() for name in classes], axis=1)
        position = {name: number for number, name in enumerate(classes)}
        labels, predicted = ([position[name] for name in columns[what]] for what in ("label", "predicted"))
    except (OSError, KeyError, pa.ArrowException):
        return None  # of another program, or damaged: the page has the numbers of result.json
    names = [name or f"row {row}" for name, row in zip(columns["id"], columns["row"], strict=True)]
    return _Predicted(
        run, columns["site"], columns["row"], names, np.array(labels, int), np.array(predicted, int), scores
    )


def _confusion(predictions: Sequence[_Predicted], classes: Sequence[str]) -> dict[str, NDArray[Any]]:
    counts = {run.run.result.method: np.zeros((len(classes), len(classes)), int) for run in predictions}
    for run in predictions:
        np.add.at(counts[run.run.result.method], (run.labels, run.predicted), 1)
    return counts


def _roc(predictions: Sequence[_Predicted]) -> dict[str, dict[str, Curve]]:
    """A ROC curve for each target and method, over the samples of all seeds."""
    curves: dict[str, dict[str, Curve]] = {}
    for target in list(dict.fromkeys(run.run.result.target for run in predictions))[:_MOST_TARGETS]:
        for method in dict.fromkeys(run.run.result.method for run in predictions):
            here = [run for run in predictions if (run.run.result.method, run.run.result.target) == (method, target)]
            labels = np.concatenate([run.labels for run in here]) if here else np.empty(0, np.int64)
            scores = np.concatenate([run.scores for run in here]) if here else np.empty((0, 1))
            if len(np.unique(labels)) >= 2 and np.isfinite(scores).all():
                curves.setdefault(target, {})[method] = _mean_roc(labels, scores)
    return curves


def _mean_roc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Curve:
    """The ROC curve of the second of two classes; of more classes the mean over those of each against all others."""
    from sklearn.metrics import roc_curve

    if scores.shape[1] == 2:
        wrong, right, _ = roc_curve(labels, scores[:, 1])
        at = np.unique(np.linspace(0, len(wrong) - 1, _POINTS).round().astype(int))
        return (100 * wrong[at]).tolist(), (100 * right[at]).tolist(), None
    places = np.linspace(0, 1, _POINTS)
    single = [roc_curve(labels == label, scores[:, label])[:2] for label in np.unique(labels)]
    mean = np.mean([np.interp(places, wrong, right) for wrong, right in single], axis=0)
    return [0.0, *(100 * places).tolist()], [0.0, *(100 * mean).tolist()], None


def _mistakes(
    chosen: Sequence[_Predicted], classes: Sequence[str], samples: ShownSamples | None
) -> tuple[Mistake, ...]:
    """The samples that were wrong with the highest mean score of the wrong class."""
    seen: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
    names: dict[tuple[str, int], str] = {}
    for run in chosen:
        surest = run.scores[np.arange(len(run.labels)), run.predicted]
        for at, sample in enumerate(zip(run.sites, run.rows, strict=True)):
            names[sample] = run.names[at]
            seen.setdefault(sample, []).append((int(run.labels[at]), int(run.predicted[at]), float(surest[at])))
    wrong = []
    for (site, row), answers in seen.items():
        scores = [score if label != predicted else 0.0 for label, predicted, score in answers]
        if any(scores):
            label, predicted, _ = max(answers, key=lambda answer: answer[2] if answer[0] != answer[1] else 0.0)
            times = sum(answer[0] != answer[1] for answer in answers)
            wrong.append((float(np.mean(scores)), site, row, label, predicted, times, len(answers)))
    wrong.sort(key=lambda wrong_sample: (-wrong_sample[0], wrong_sample[1], wrong_sample[2]))
    return tuple(
        Mistake(
            names[site, row],
            site,
            classes[label],
            classes[predicted],
            score,
            times,
            seeds,
            None if samples is None else samples.picture(site, row),
            "" if samples is None else samples.words(site, row),
        )
        for score, site, row, label, predicted, times, seeds in wrong[:_MISTAKES]
    )


def placed_of(runs: Sequence[FinishedRun], methods: Sequence[str], samples: ShownSamples) -> tuple[Placed, ...]:
    """Where the models of some methods place samples, at the first target; none for tasks that are no classification.

    A method that trains a model for each site is left out.
    """
    if runs[0].result.metric != "accuracy":
        return ()
    first = {method: next(run for run in runs if run.result.method == method) for method in methods}
    one_model = [run for run in first.values() if role_of(run.result) != "alone"]
    return tuple(placement for run in one_model[:_MOST_PLACED] if (placement := samples.placement(run)) is not None)
