"""Predictions per sample: one Parquet file per run, from which any metric can be computed later."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.site_metrics import Scored
from fedshift.extras import import_extra

PREDICTIONS = "predictions.parquet"
UNLABELLED = "unlabelled"
"""The part of samples without labels: models answer there, and are not measured."""


@dataclass(frozen=True)
class SitePredictions:
    """What a model says of the samples of one site."""

    site: str  # name of the site
    part: str  # "target", "held_out" or `UNLABELLED`
    rows: NDArray[np.int64]  # each sample's row at its site (n,)
    ids: Sequence[str] | None  # each sample's name (n); None if the data have no names
    scored: Scored  # labels, predictions and scores


def as_parquet(sites: Sequence[SitePredictions], classes: Sequence[str], about: Mapping[str, Any]) -> bytes:
    """The content of the file: a line for each sample.

    The columns are site, part, row, id (empty if the data have none), label (empty where it is not known), predicted,
    and ``score_<class>``. Of a
    regression, label and predicted are numbers, and there is no score. Of times to an event, the columns time and event
    take the place of label, and predicted is the logarithm of the relative hazard. Of several labels there are
    ``label_<name>`` and ``predicted_<name>``, 0 or 1, for each.

    Args:
        about: what is noted in the file's metadata, under ``fedshift``, as JSON.

    Example:
        >>> import pyarrow.parquet as pq
        >>> scored = Scored(np.array([0, 1]), np.array([0, 0]), np.array([[0.9, 0.1], [0.5, 0.5]]))
        >>> content = as_parquet([SitePredictions("a", "target", np.arange(2), None, scored)], ["cat", "dog"], {})
        >>> pq.read_table(io.BytesIO(content), columns=["row", "label", "score_dog"]).to_pylist()
        [{'row': 0, 'label': 'cat', 'score_dog': 0.1}, {'row': 1, 'label': 'dog', 'score_dog': 0.5}]
    """
    pa = import_extra("pyarrow", extra="report", what="keeping predictions")
    pq = import_extra("pyarrow.parquet", extra="report", what="keeping predictions")

    def join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts) if parts else np.empty(0)

    def names(numbers: NDArray[Any]) -> Any:
        if numbers.dtype.kind == "f":
            return numbers
        places = (
            pa.array(numbers.astype(np.int32), mask=numbers < 0) if (numbers < 0).any() else numbers.astype(np.int32)
        )
        return pa.DictionaryArray.from_arrays(places, pa.array(list(classes), pa.string()))

    scored = [site.scored for site in sites]
    repeats = [len(site.rows) for site in sites]
    labels, predicted = join([item.labels for item in scored]), join([item.predicted for item in scored])
    columns: dict[str, Any] = {
        "site": pa.array([name for site, n in zip(sites, repeats, strict=True) for name in [site.site] * n]),
        "part": pa.array([name for site, n in zip(sites, repeats, strict=True) for name in [site.part] * n]),
        "row": join([site.rows for site in sites]),
        "id": pa.array([name for site in sites for name in _names(site)], pa.string()),
        **_label_columns(labels, predicted, classes, names),
    }
    scores = join([item.scores for item in scored])
    if labels.dtype.kind != "f" or predicted.ndim == 2:
        columns |= {f"score_{name}": scores[:, number] for number, name in enumerate(classes)}
    table = pa.table(columns).replace_schema_metadata({"fedshift": json.dumps(about)})
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _label_columns(
    labels: NDArray[Any], predicted: NDArray[Any], classes: Sequence[str], names: Callable[[NDArray[Any]], Any]
) -> dict[str, Any]:
    if predicted.ndim == 2:
        columns = {f"label_{name}": labels[:, number] for number, name in enumerate(classes)}
        return columns | {f"predicted_{name}": predicted[:, number] for number, name in enumerate(classes)}
    if labels.ndim == 2:
        return {"time": labels[:, 0], "event": labels[:, 1], "predicted": predicted}
    return {"label": names(labels), "predicted": names(predicted)}


def _names(site: SitePredictions) -> Sequence[str | None]:
    return [None] * len(site.rows) if site.ids is None else site.ids
