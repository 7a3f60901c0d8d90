"""Targets that lack labels: what a run notes of them beside its predictions, and what cannot be run with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import DataSet, DataSource, Preprocessing, Rows, SparseRows
from fedshift.data.input_guard import InputShift, feature_shift, image_shift, image_statistics
from fedshift.evaluation.records import WithoutLabels
from fedshift.experiment.protocols.base import Split

_MEASURED = 100
"""Most columns that can be measurements; where there are more, they are computed features, and are not compared."""


def without_labels(data: DataSet, split: Split, source: DataSource) -> dict[str, WithoutLabels]:
    """The targets of a run that lack labels, and how unlike their samples are to those that trained.

    ``source``: the same data, with an encoding of the sites that trained with their labels.
    """
    result = {}
    for site, rows in split.predicted.items():
        table = source.table_shift(site) if data.preprocessing.kind == "table" else None
        shift = _shift(data, split, site, rows) if table is None else table
        result[site] = WithoutLabels(samples=len(rows), unlike=shift.refusal, unusual=shift.warning, doubt=shift.doubt)
    return result


def _shift(data: DataSet, split: Split, site: str, rows: Rows) -> InputShift:
    """How a site's samples differ from those of the sources. Nothing is known of features of a network."""
    site_inputs = data.domains[site].inputs
    sources = [
        np.asarray(inputs)[chosen]
        for name, chosen in split.train.items()
        if not isinstance(inputs := data.domains[name].inputs, SparseRows)
    ]
    own_scale = data.preprocessing.standardise is not None and data.preprocessing.kind != "image"
    if isinstance(site_inputs, SparseRows) or not sources or own_scale:
        return InputShift()
    if data.preprocessing.kind == "image":
        return image_shift(np.asarray(site_inputs)[rows].astype(np.uint8), image_statistics(sources))
    names = _columns(data.preprocessing, site_inputs.shape[1])
    return _column_shift(np.asarray(site_inputs)[rows], sources, names) if site_inputs.ndim == 2 else InputShift()


def _columns(preprocessing: Preprocessing, width: int) -> dict[str, int]:
    """Name → place of the columns that are numbers, as the data have them."""
    measured = width <= _MEASURED and preprocessing.backbone is None
    return {str(number): number for number in range(width)} if measured else {}


def _column_shift(
    site_inputs: NDArray[np.generic], sources: list[NDArray[np.generic]], names: dict[str, int]
) -> InputShift:
    places = list(names.values())
    if not places:
        return InputShift()
    trained = np.concatenate([rows[:, places] for rows in sources]).astype(np.float64)
    moments = Preprocessing(
        kind="features", mean=tuple(trained.mean(axis=0).tolist()), std=tuple(trained.std(axis=0).tolist())
    )
    return feature_shift(site_inputs[:, places], moments, tuple(names))
