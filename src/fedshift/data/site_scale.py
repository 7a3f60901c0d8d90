"""Each site's own scale, for ``standardise: per_site``: mean and deviation of its training rows. Nothing of it leaves.

FLamby and most clinical comparisons prepare data so: du Terrail et al., NeurIPS 2022 Datasets and Benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedshift.data.domain import DataSet, Dense, Domain, Preprocessing, Rows, Scale, SparseRows
from fedshift.data.tables import encoding_of, moments
from fedshift.errors import UserError


def sums_of(values: Dense) -> tuple[int, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A site's count, and its sum and sum of squares per channel (of values / 255) or column."""
    if values.dtype == np.float32:  # features, or volumes, whose every position counts
        columns = values.astype(np.float64).swapaxes(0, 1).reshape(values.shape[1], -1)
        return columns.shape[1], columns.sum(axis=1), (columns**2).sum(axis=1)
    level = np.arange(256) / 255
    counts = np.stack([np.bincount(values[:, channel].ravel(), minlength=256) for channel in range(values.shape[1])])
    return int(counts[0].sum()), counts @ level, counts @ level**2


def scale_of(values: Dense, preprocessing: Preprocessing) -> Scale:
    """Mean and deviation of samples; a constant column keeps its deviation, and so do a table's columns of 0 and 1.

    Args:
        values: stored samples of one site (n, …).

    Returns:
        Mean and population standard deviation per channel or column.

    Raises:
        UserError: there are less than two samples.
    """
    check_several(len(values))
    mean, std = moments(*sums_of(values))
    if preprocessing.table is not None:
        numeric = len(encoding_of(preprocessing).numeric)
        mean[numeric:], std[numeric:] = 0.0, 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def check_several(samples: int) -> None:
    """Raise UserError for less than two samples."""
    if samples < 2:
        raise UserError(
            "data.standardise: per_site scales samples by their own mean and deviation, and there is only one: give "
            "all samples of the site together"
        )


def of_these(values: Dense, preprocessing: Preprocessing) -> Preprocessing:
    """A preprocessing for samples of one site, in whose own scale they are read if it says so; else as it is."""
    return preprocessing if preprocessing.standardise is None else preprocessing.at(scale_of(values, preprocessing))


def check_scale(preprocessing: Preprocessing, standardise: bool | str) -> None:
    """Raise UserError where a federation scales inputs otherwise than ``data.standardise`` of a site says."""
    if (preprocessing.standardise is None) != (standardise != "per_site"):
        raise UserError("the federation's data.standardise is not that of this site: all sites write the same")


def scale_domain(domain: Domain, rows: Rows, preprocessing: Preprocessing) -> Domain:
    """A domain in the scale of some of its rows; of all where there are none, as of a site that only measures.

    UserError if there are less than two.
    """
    assert not isinstance(domain.inputs, SparseRows)  # only data sets of arrays and tables have such a scale
    try:
        return replace(domain, scale=scale_of(domain.inputs[rows] if len(rows) else domain.inputs, preprocessing))
    except UserError as error:
        raise UserError(f"site '{domain.name}': {error}") from None


def all_scaled(data: DataSet, rows: Mapping[str, Rows]) -> DataSet:
    """The same data with each domain in its own scale, if they are prepared so.

    ``rows``: domain → its training rows; of others all that are no fixed test set.
    """
    if data.preprocessing.standardise is None:
        return data
    domains = {
        name: scale_domain(domain, rows.get(name, domain.described), data.preprocessing)
        for name, domain in data.domains.items()
    }
    return replace(data, domains=domains)
