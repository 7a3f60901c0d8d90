"""The data set as an object: named domains with common classes, each a few arrays indexed by row.

Builders make these objects. Nothing here decodes, downloads or trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from fedshift.data.codings import Counted
from fedshift.errors import UserError
from fedshift.section import Section, Sparing

Rows = npt.NDArray[np.int64]
Task = Literal["classification", "segmentation", "regression", "time_to_event", "multi_label"]
"""What is predicted: the class of a sample, a mask of every structure in an image, a quantity, who has an event
sooner, or which of several labels a sample has."""

ALL_TASKS: tuple[Task, ...] = get_args(Task)
UNKNOWN = -1
"""The number of a class that is not known."""
WITHOUT_MASKS: tuple[Task, ...] = tuple(task for task in ALL_TASKS if task != "segmentation")


@dataclass(frozen=True)
class SparseRows:
    """Rows of mostly zeros in compressed form (CSR), for bags of words."""

    data: npt.NDArray[np.float32]  # values that are not zero, row after row (nonzeros,)
    indices: npt.NDArray[np.int64]  # the column of each value (nonzeros,)
    indptr: npt.NDArray[np.int64]  # where each row begins in ``data`` (n + 1,)
    width: int  # number of columns

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


Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]
Dense = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.int64]
Inputs = Dense | SparseRows
Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation, of each channel (of values / 255) or column."""
NO_TOKEN = -1
"""What stands in a row of tokens where the text has ended, or a mask says that there is none."""


@dataclass(frozen=True)
class Domain:
    """The samples of one domain, decoded, in memory or memory-mapped."""

    name: str  # name of the domain
    # uint8 images (n, channels, height, width), uint8 or float32 volumes (n, channels, depth, height, width), float32
    # features (n, d), int64 tokens (n, length) with `NO_TOKEN` where there is none, or `SparseRows`
    inputs: Inputs
    # int64 (n,), class numbers in the order of the data set's ``classes``; all 0 if there are masks. For regression
    # float32 (n,), in the label's own unit; for time to event float32 (n, 2): the time until the event or the end of
    # observation, and 1 where the event happened; for multi-label float32 (n, labels) of 0 and 1
    labels: Labels
    # int64 (n,) or None. Rows with the same number, in *any* domain, show the same base sample (Rotated MNIST). A split
    # must keep such rows on one side
    groups: npt.NDArray[np.int64] | None = None
    train_rows: Rows | None = None  # training rows of the data set's own split, if it has one
    test_rows: Rows | None = None  # test rows of that split
    # for segmentation, uint8 (n, structures, height, width), of volumes with a depth, of 0 and 1, one mask per entry of
    # ``classes``, which then names structures. Masks may overlap
    masks: npt.NDArray[np.uint8] | None = None
    # names of the samples in the order of the rows (n), such as patients' numbers, if the data have any. They are for
    # people who read predictions; no method sees them, and they need not differ
    ids: tuple[str, ...] | None = None
    # whether their owner fixed the test rows: they hold under every protocol, and no statistics of the data, such as an
    # encoding's, are made of them
    fixed_split: bool = False
    # whether some or all samples have no label, which is written as `UNKNOWN`. It is then no source
    unlabelled: bool = False
    only_source: bool = False  # whether it is a source alone, and no target
    # of its own training rows, where data are standardised per site (see `fedshift.data.site_scale`)
    scale: Scale | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def known(self) -> Rows:
        """The rows that have a label."""
        every = np.arange(len(self), dtype=np.int64)
        return every if self.labels.dtype.kind == "f" else every[self.labels != UNKNOWN]

    @property
    def described(self) -> Rows:
        """The rows that statistics of the data are made of: all, or the training rows of a fixed split."""
        if self.fixed_split and self.train_rows is not None:
            return self.train_rows
        return np.arange(len(self), dtype=np.int64)


def part_of(domain: Domain, rows: Rows, name: str) -> Domain:
    """A domain that holds some rows of another one, in the order of ``rows``."""
    inputs: Inputs
    if isinstance(domain.inputs, SparseRows):
        lengths = domain.inputs.indptr[rows + 1] - domain.inputs.indptr[rows]
        ends = np.cumsum(lengths)
        chosen = np.arange(int(lengths.sum())) + np.repeat(domain.inputs.indptr[rows] - (ends - lengths), lengths)
        indptr = np.concatenate(([0], ends)).astype(np.int64)
        inputs = SparseRows(domain.inputs.data[chosen], domain.inputs.indices[chosen], indptr, domain.inputs.width)
    else:
        inputs = domain.inputs[rows]
    return Domain(
        name,
        inputs,
        domain.labels[rows],
        groups=None if domain.groups is None else domain.groups[rows],
        train_rows=None if domain.train_rows is None else np.flatnonzero(np.isin(rows, domain.train_rows)),
        test_rows=None if domain.test_rows is None else np.flatnonzero(np.isin(rows, domain.test_rows)),
        masks=None if domain.masks is None else domain.masks[rows],
        ids=None if domain.ids is None else tuple(domain.ids[row] for row in rows),
        fixed_split=domain.fixed_split,
        unlabelled=domain.unlabelled,
        only_source=domain.only_source,
        scale=domain.scale,
    )


class Preprocessing(Sparing):
    """How stored inputs become what a network reads. Saved with a model, so that prediction does the same.

    Images: ``value / 255``, then ``(value - mean) / std`` per channel. Features: as stored, or ``(value - mean) / std``
    per column if mean and std are given. Tokens: as stored.
    """

    later: ClassVar[tuple[str, ...]] = ("window", "objective", "text", "patch", "standardise")

    kind: Literal["image", "features", "table", "tokens"]  # what the stored inputs are
    channels: int | None = None  # channels of images
    size: int | None = None  # height and width of square images
    mean: tuple[float, ...] | None = None  # per channel or column, of values in [0, 1] for images
    std: tuple[float, ...] | None = None  # per channel or column
    # shape of one stored sample, (channels, height, width) or (d,), which `check_dataset` sets
    shape: tuple[int, ...] | None = None
    table: dict[str, object] | None = None  # the encoding of a table (see `fedshift.data.tables`)
    # which frozen network made features from images, and how (see `fedshift.experiment.features`)
    backbone: dict[str, object] | None = None
    # what is learned, if labels are no classes (see `fedshift.data.tasks.objective`)
    objective: dict[str, object] | None = None
    # centre and width of the values of medical and other deep images that become black to white; None: as each file
    # says
    window: tuple[float, float] | None = None
    text: dict[str, object] | None = None  # how text becomes tokens (see `fedshift.data.text_columns`)
    # depth, height and width of the parts of volumes that a network reads: drawn at random to train, side by side to
    # predict; None: whole samples
    patch: tuple[int, int, int] | None = None
    # per_site: each site's inputs are in its own scale, which `at` gives mean and std
    standardise: Literal["per_site"] | None = None

    def at(self, scale: Scale) -> Preprocessing:
        """As it is at a site with this scale."""
        return self.model_copy(update={"mean": scale[0], "std": scale[1], "standardise": None})


@dataclass(frozen=True)
class Manifest:
    """What a data set is and where it comes from.

    ``sha256`` maps file names to checksums; user data have none. ``downloads`` maps public addresses to the files that
    are there, or in the archive there, by their paths below ``FEDSHIFT_DATA``.
    """

    title: str
    source: str
    licence: str
    how_to_get: str
    layout: str
    sha256: Mapping[str, str] = field(default_factory=dict)
    downloads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: str = ""


@dataclass(frozen=True)
class DataSet:
    """Domains that share classes and input shape. Built by `DataSource.build`, checked by `check_dataset`.

    ``classes`` names what a network has an output for: classes, structures, or for regression the one label.
    ``columns`` are those of tables before missing cells are filled. ``sides`` has the shorter sides, in pixels, of some
    image files of each site as they are stored.
    """

    name: str
    domains: Mapping[str, Domain]
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    manifest: Manifest
    warnings: tuple[str, ...] = ()
    columns: Counted = field(default_factory=dict)
    sides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """What the preprocessing says; else segmentation if the domains have masks, and classification if not."""
        if self.preprocessing.objective is not None:
            return cast(Task, self.preprocessing.objective["task"])
        return "classification" if next(iter(self.domains.values())).masks is None else "segmentation"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as the network sees it: (channels, height, width), (channels, depth, height, width) of a
        volume or of the parts of it that a network reads, (d,), or (length,) for tokens."""
        whole = tuple(next(iter(self.domains.values())).inputs.shape[1:])
        patch = self.preprocessing.patch
        return whole if patch is None else (whole[0], *patch)

    @property
    def unlabelled(self) -> tuple[str, ...]:
        """The domains of which some or all samples have no label."""
        return tuple(name for name, domain in self.domains.items() if domain.unlabelled)


class DataSource(Section):
    """Base of the builders: the fields of ``data:`` in an experiment file, and how the data are read.

    A subclass sets ``name`` (a `Literal` with a default), its own fields, ``manifest`` and ``build``.
    """

    name: str

    @classmethod
    def paths(cls) -> tuple[str, ...]:
        """The fields that hold paths. Relative ones start from the folder of the experiment file."""
        return tuple(name for name, field in cls.model_fields.items() if _holds_path(field.annotation))

    @classmethod
    def manifest(cls) -> Manifest:
        """What the data set is and where it comes from."""
        raise UserError(f"data set {cls.__name__} has no manifest")

    def build(self) -> DataSet:
        """Read the data. UserError if the data are missing or cannot be used."""
        raise UserError(f"data set {self.name} cannot be built")

    @property
    def shares(self) -> tuple[str, ...]:
        """Kinds of content that sites send before training to agree on an encoding. None by default."""
        return ()

    def gives(self) -> dict[str, Any] | None:
        """What one site sends so that all can agree on an encoding (see `fedshift.data.agreement`).

        Returns plain values (kind ``statistics``), or None if there is nothing to agree on.
        """
        return None

    def statistics(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> Any:
        """The `TableStatistics` of one site's table; None if it is no table. ``ranges`` as for `site_statistics`."""
        return None

    def encode(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        """The data in the agreed encoding.

        ``classes``: the federation's classes, in its order. UserError if the data do not fit.
        """
        data = self.build()
        if data.classes != classes:
            raise UserError(
                f"data set {self.name} has the classes {data.classes}, the federation {classes}: use the same ones"
            )
        return replace(data, preprocessing=preprocessing)

    def labelled_by(self) -> dict[str, Any] | None:
        """How a table says the class of a row, for predictions: the fields of a `Labelling`."""
        return None

    def table_shift(self, site: str | None = None, preprocessing: Preprocessing | None = None) -> Any:
        """How a site's table differs from those that an encoding was made of, as an `InputShift`; None: no table.

        ``site``: which; None: the only one. ``preprocessing``: the encoding; None: that of this source.
        """
        return None

    def without(self, unseen: str) -> DataSource:
        """This source, with a preprocessing that uses no statistics of ``unseen``. By default it uses none at all."""
        return self

    def without_labels(self, site: str) -> DataSource:
        """This source, with a preprocessing that uses nothing of the labels of ``site``. By default it uses none."""
        return self


def _holds_path(annotation: Any) -> bool:
    return annotation is Path or any(_holds_path(part) for part in get_args(annotation))
