"""What the page shows of samples besides their scores: where models place them, and the samples themselves.

Records hold neither. Both come from the experiment's data and from the models of its runs.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.domain import DataSet, SparseRows
from fedshift.data.site_data import SiteData
from fedshift.data.tables import TableEncoding
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun
from fedshift.experiment.predict import load_model
from fedshift.experiment.runs.evaluator import answering
from fedshift.report.collect import FinishedRun

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
