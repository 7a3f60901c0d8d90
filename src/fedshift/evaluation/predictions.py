"""Predictions per sample: one Parquet file per run, from which any metric can be computed later."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.site_metrics import Scored

PREDICTIONS = "predictions.parquet"
MISSING = (
    "predictions per sample are not kept, since pyarrow is not installed: install fedshift[tables], or write "
    "evaluation: {predictions: false}"
)


@dataclass(frozen=True)
class SitePredictions:
    """What a model says of the samples of one site.

    Attributes:
        site: name of the site.
        part: "target" or "held_out".
        rows: each sample's row at its site (n,).
        ids: each sample's name (n); None if the data have no names.
        scored: labels, predictions and scores.
    """

    site: str
    part: str
    rows: NDArray[np.int64]
    ids: Sequence[str] | None
    scored: Scored


def can_be_kept() -> bool:
    """Whether pyarrow is installed.

    Example:
        >>> can_be_kept()  # with fedshift[tables]
        True
    """
    return find_spec("pyarrow") is not None


def as_parquet(sites: Sequence[SitePredictions], classes: Sequence[str], about: Mapping[str, Any]) -> bytes:
    """The content of the file: a line for each sample.

    The columns are site, part, row, id (empty if the data have none), label, predicted, and ``score_<class>``.

    Args:
        sites: the samples.
        classes: names of the classes.
        about: what is noted in the file's metadata, under ``fedshift``, as JSON.

    Example:
        >>> import pyarrow.parquet as pq
        >>> scored = Scored(np.array([0, 1]), np.array([0, 0]), np.array([[0.9, 0.1], [0.5, 0.5]]))
        >>> content = as_parquet([SitePredictions("a", "target", np.arange(2), None, scored)], ["cat", "dog"], {})
        >>> pq.read_table(io.BytesIO(content), columns=["row", "label", "score_dog"]).to_pylist()
        [{'row': 0, 'label': 'cat', 'score_dog': 0.1}, {'row': 1, 'label': 'dog', 'score_dog': 0.5}]
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts) if parts else np.empty(0)

    def names(numbers: NDArray[np.int64]) -> Any:
        return pa.DictionaryArray.from_arrays(numbers.astype(np.int32), pa.array(list(classes), pa.string()))

    scored = [site.scored for site in sites]
    repeats = [len(site.rows) for site in sites]
    columns: dict[str, Any] = {
        "site": pa.array([name for site, n in zip(sites, repeats, strict=True) for name in [site.site] * n]),
        "part": pa.array([name for site, n in zip(sites, repeats, strict=True) for name in [site.part] * n]),
        "row": joined([site.rows for site in sites]),
        "id": pa.array([name for site in sites for name in _names(site)], pa.string()),
        "label": names(joined([one.labels for one in scored])),
        "predicted": names(joined([one.predicted for one in scored])),
    }
    scores = joined([one.scores for one in scored])
    columns |= {f"score_{name}": scores[:, number] for number, name in enumerate(classes)}
    table = pa.table(columns).replace_schema_metadata({"fedshift": json.dumps(about)})
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _names(site: SitePredictions) -> Sequence[str | None]:
    return [None] * len(site.rows) if site.ids is None else site.ids
