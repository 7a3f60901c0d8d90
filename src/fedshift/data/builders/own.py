"""Data in Python: samples in memory, and a class in a user's own file that reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError

from fedshift.data.builders.arrays import Arrays
from fedshift.data.builders.in_memory import InMemory, as_list, samples_in
from fedshift.data.builders.own_tables import Table
from fedshift.data.builders.table_labels import Condition
from fedshift.data.domain import DataSet, DataSource, Manifest, Preprocessing
from fedshift.data.identifiers import MOST_UNASKED
from fedshift.data.table_files import from_columns, is_missing, is_number
from fedshift.errors import UserError, in_words, nearest


class OwnData(DataSource):
    """Samples that a class of your own reads. Derive from it, and return the samples of each site from `read`.

    A subclass may have fields, which the experiment file sets. Those of type ``Path`` start from its folder.
    """

    name: str
    statistics_from: tuple[str, ...] | None = Field(
        None, description="the sites whose statistics define the encoding; unset: all"
    )
    label_statistics_from: tuple[str, ...] | None = Field(
        None, description="task regression: the sites whose sums scale the label; unset: those of statistics_from"
    )
    options: ClassVar[Mapping[str, Any]] = {}
    """Further fields of data set ``arrays`` or ``table``, such as ``{"standardise": True}``."""
    _samples: Mapping[str, Any] | None = PrivateAttr(None)

    def read(self) -> Mapping[str, Any]:
        """Site → its samples: (inputs, labels), a data frame or a data set, or the path of a file."""
        raise UserError(f"data: {type(self).__name__} has no method read(), which returns the samples of each site")

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title=(cls.__doc__ or cls.__name__).partition("\n")[0],
            source="yours",
            licence="yours",
            how_to_get="your own code reads them",
            layout="your own",
        )

    @property
    def shares(self) -> tuple[str, ...]:
        return self._source().shares

    def labelled_by(self) -> dict[str, Any] | None:
        return self._source().labelled_by()

    def without(self, unseen: str) -> DataSource:
        return self._with(self._source().without(unseen))

    def without_labels(self, site: str) -> DataSource:
        return self._with(self._source().without_labels(site))

    def _with(self, fewer: DataSource) -> DataSource:
        if fewer == self._source():
            return self
        names = ("statistics_from", "label_statistics_from")
        return self.model_copy(update={name: getattr(fewer, name, None) for name in names})

    def build(self) -> DataSet:
        """The samples as the data set `arrays` or `table` has them.

        Raises:
            UserError: `read` fails, or what it returns cannot be used.
        """
        return self._with_name(self._source().build())

    def gives(self) -> dict[str, Any] | None:
        return self._source().gives()

    def statistics(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> Any:
        return self._source().statistics(ranges)

    def encode(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        return self._with_name(self._source().encode(preprocessing, classes))

    def _with_name(self, data: DataSet) -> DataSet:
        return replace(data, name=self.name, manifest=self.manifest())

    def _source(self) -> DataSource:
        if self._samples is None:
            try:
                self._samples = self.read()
            except UserError:
                raise
            except Exception as error:  # the user's own code
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise UserError(f"data: {type(self).__name__}.read() fails: {text}") from error
            if not isinstance(self._samples, Mapping) or not self._samples:
                raise UserError(f"data: {type(self).__name__}.read() must return a mapping {{site: samples}}")
        fields = data_section(self._samples, **self.options)
        for name in ("statistics_from", "label_statistics_from"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        kinds: dict[str, type[DataSource]] = {"arrays": Arrays, "table": Table}
        try:
            return kinds[fields["name"]].model_validate(fields)
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"]))
            raise UserError(f"data: {type(self).__name__}: {field}: {in_words(fault)}") from None


def data_section(sites: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The ``data:`` section for samples in memory: a table if all are data frames, else arrays.

    Args:
        sites: site → (inputs, labels), data frame or data set.
        options: further fields of the section.

    Returns:
        Its fields. The columns of a table are numeric or categorical by their types, unless ``options`` names them.

    Raises:
        UserError: a site's samples are not recognised, or are data frames without labels and without ``label``.
    """
    try:
        held = {str(site): samples_in(value) for site, value in sites.items()}
        condition = Condition.parse(options["positive"]) if isinstance(options.get("positive"), str) else None
    except ValueError as error:
        raise UserError(f"data: {error}") from None
    if len(held) < len(sites):
        raise UserError("data: two sites have the same name, such as 1 and '1': rename one")
    frames = [frame for frame in held.values() if isinstance(frame, InMemory) and frame.is_frame]
    if len(frames) < len(held) or not frames:
        return {"name": "arrays", "sites": held, **options}
    fields: dict[str, Any] = {"name": "table", "sites": held, **options}
    if condition is None and not fields.keys() & {"label", "time", "event"}:
        if any(frame.labels is None for frame in frames):
            raise UserError("data: data frames without labels need label, the name of their label column")
        fields["label"] = "label" if "label" not in frames[0].samples.columns else "label of the sample"
    if not fields.keys() & {"numeric", "categorical", "text"}:
        taken = {condition.column if condition is not None else fields.get("label"), fields.get("id")}
        taken |= {fields.get("time"), fields.get("event")}
        tables = {name: frame.samples for name, frame in held.items() if isinstance(frame, InMemory)}
        fields["numeric"], fields["categorical"] = _kinds_of_columns(tables, taken)
    return fields


def _kinds_of_columns(frames: Mapping[str, Any], taken: Collection[Any]) -> tuple[list[str], list[str]]:
    """The numeric and the categorical columns of data frames, by what all sites hold.

    Args:
        frames: site → its data frame.
        taken: columns that are no features.

    Raises:
        UserError: a site lacks a column that another one has.
    """
    names = list(dict.fromkeys(name for frame in frames.values() for name in frame.columns))
    numeric, categorical = list[str](), list[str]()
    for name in names:
        if str(name) in taken:
            continue
        has = [site for site, frame in frames.items() if name in frame.columns]
        lacking = next((site for site in frames if site not in has), None)
        if lacking is not None:
            raise UserError(
                f"data: the table of site '{lacking}' has no column '{name}', which '{has[0]}' has: add it, drop it "
                "at all sites, or list the columns to use under numeric and categorical; "
                f"{nearest(str(name), map(str, frames[lacking].columns))}"
            )
        columns = [frame[name] for frame in frames.values()]
        (numeric if _is_numeric(columns) else categorical).append(str(name))
    return numeric, categorical


def _is_numeric(columns: Sequence[Any]) -> bool:
    """Whether a column is read as numbers, so that a cell that is none is an error with its site and row.

    Numbers and dates at any site make it so, and text of which most is numbers, unless it has a few values only, as
    codes have. A column of pandas' type ``category`` is none.
    """
    kinds = {_kind(column) for column in columns}
    if "category" in kinds:
        return False
    if "number" in kinds:
        return True
    cells = [cell for column in columns for cell in from_columns("", {"": as_list(column)}).column("") if cell]
    read = [cell for cell in cells if not is_missing(cell)]
    return 2 * sum(map(is_number, read)) > len(read) and len(set(read)) > MOST_UNASKED


def _kind(column: Any) -> str:
    """Whether a column of one site holds numbers (or dates), text, or pandas' categories, by its type and cells."""
    if str(getattr(column, "dtype", "")).lower().startswith(("category", "categorical", "enum")):
        return "category"
    if np.asarray(column).dtype.kind in "biufmM":
        return "number"
    values = [value for value in as_list(column) if value is not None and value == value]
    real = sum(not isinstance(value, str) for value in values)
    return "number" if 2 * real > len(values) else "text"
