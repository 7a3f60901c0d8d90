"""What a data set is to fedshift: named domains of the same classes, each a few arrays that can be indexed by row.

Nothing here decodes, downloads or trains; builders make these objects and everything above reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from fedshift.errors import UserError

Rows = npt.NDArray[np.int64]
Task = Literal["classification", "segmentation"]
"""What is predicted: the class of a sample, or a mask of every structure in an image."""


@dataclass(frozen=True)
class SparseRows:
    """Rows of mostly zeros in compressed form (CSR), for bags of words.

    ``data`` (nonzeros,), ``indices`` (nonzeros,) column of each, ``indptr`` (n + 1,) where a row begins; ``width``
    columns.
    """

    data: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int64]
    indptr: npt.NDArray[np.int64]
    width: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    def dense(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The chosen rows as a dense float32 array (len(rows), width)."""
        out = np.zeros((len(rows), self.width), dtype=np.float32)
        lengths = self.indptr[rows + 1] - self.indptr[rows]
        line = np.repeat(np.arange(len(rows)), lengths)
        first = np.repeat(self.indptr[rows] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
        source = first + np.arange(int(lengths.sum()))
        out[line, self.indices[source]] = self.data[source]
        return out


Inputs = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | SparseRows


@dataclass(frozen=True)
class Domain:
    """The samples of one domain, decoded once, in memory or memory-mapped.

    inputs: uint8 images (n, channels, height, width), float32 features (n, d) or `SparseRows`.
    labels: int64 (n,), class numbers in the order of the data set's ``classes``; all 0 where there are masks.
    groups: int64 (n,) or None. Rows of *any* domain with the same number show the same base sample (Rotated MNIST); a
        careful split keeps such rows on one side.
    train_rows, test_rows: the data set's own split, where it has one.
    masks: for segmentation, uint8 (n, structures, height, width) of 0 and 1, one mask per entry of ``classes``, which
        then names structures; they may overlap.
    """

    name: str
    inputs: Inputs
    labels: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64] | None = None
    train_rows: Rows | None = None
    test_rows: Rows | None = None
    masks: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.labels)


class Preprocessing(BaseModel):
    """How stored inputs become the numbers a network reads; saved beside a model so that prediction does the same.

    Images: ``value / 255``, then ``(value - mean) / std`` per channel. Features: as stored unless mean and std are
    given (per column). ``table`` holds the encoding of a table (see `fedshift.data.tables`). ``shape`` is that of one
    stored sample, (channels, height, width) or (d,); `fedshift.data.checks.checked` fills it in. ``backbone`` says
    which frozen network made features from images, and how (see `fedshift.experiment.features`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["image", "features", "table"]
    channels: int | None = None
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    shape: tuple[int, ...] | None = None
    table: dict[str, object] | None = None
    backbone: dict[str, object] | None = None


@dataclass(frozen=True)
class Manifest:
    """What a data set is and where it comes from. ``sha256`` maps file names to checksums; a user's own has none."""

    title: str
    source: str
    licence: str
    how_to_get: str
    layout: str
    sha256: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: str = ""


@dataclass(frozen=True)
class DataSet:
    """Domains that share classes and input shape. Built by `DataSource.build`, checked by `checked`."""

    name: str
    domains: Mapping[str, Domain]
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    manifest: Manifest
    warnings: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """Segmentation where the domains have masks, else classification."""
        return "classification" if next(iter(self.domains.values())).masks is None else "segmentation"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as the network sees it: (channels, height, width) or (d,)."""
        return tuple(next(iter(self.domains.values())).inputs.shape[1:])


class DataSource(BaseModel):
    """Base of the builders: a frozen description of where data are; `build` reads them.

    A subclass sets ``name`` as a `Literal` with a default, its own fields, and ``manifest()``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str

    @classmethod
    def manifest(cls) -> Manifest:
        raise UserError(f"data set {cls.__name__} has no manifest")

    def build(self) -> DataSet:
        raise UserError(f"data set {self.name} cannot be built")

    @property
    def shares(self) -> tuple[str, ...]:
        """Kinds of content that leave sites to agree on the encoding, before any training; nothing for most."""
        return ()

    def gives(self) -> dict[str, Any] | None:
        """What a site that is alone with its data gives for an encoding common to all, as plain values (kind
        `statistics`); None where there is nothing to agree on. `fedshift.data.agreement` makes an encoding of them.
        """
        return None

    def encoded(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        """The data in an encoding that was agreed on, with the classes in the federation's order."""
        data = self.build()
        if data.classes != classes:
            raise UserError(f"data set {self.name} has the classes {data.classes}, the federation {classes}")
        return replace(data, preprocessing=preprocessing)

    def without(self, unseen: str) -> DataSource:
        """The same source with nothing in its preprocessing that comes from the domain ``unseen``; itself for most."""
        return self
