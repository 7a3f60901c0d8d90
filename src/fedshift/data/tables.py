"""Tables of numbers and categories: one encoding for all sites, rows as features.

Sites agree on the encoding without pooling rows. Each site sends a `TableStatistics`. For a numeric column this is the
count, sum and sum of squares of its values, and whether any value is missing. For a categorical column it is the set of
its values. Counts and sums are added; sets are united.

The encoded columns, in order:

* each numeric column as (value - mean) / std. A missing value is 0, unless the encoding says what it is read as;
* for each numeric column that can be missing, a 0/1 column that says so;
* for each categorical column, one 0/1 column per category. All are zero for an unknown value, and for a missing one
  unless the encoding says what it is read as.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, ValidationError

from fedshift.data.checks import natural_order
from fedshift.data.domain import Preprocessing
from fedshift.data.identifiers import counted_cells
from fedshift.data.table_files import (
    PARQUET,
    PLAIN,
    Columns,
    SiteFormat,
    TableFormat,
    advice_on,
    canonical,
    is_missing,
    merge_formats,
    number_of,
    read_table,
)
from fedshift.errors import UserError, in_words, nearest
from fedshift.functional.noisy_moments import Ranges, within
from fedshift.section import Section


class NumericColumn(Section):
    """A numeric column."""

    name: str  # its name in the files
    mean: FiniteFloat  # mean over the sites
    std: FiniteFloat = Field(gt=0)  # standard deviation over the sites
    can_be_missing: bool  # whether there is a 0/1 column for missing values
    missing_values: tuple[float, ...] = ()  # numbers that mean "missing"
    fill: FiniteFloat | None = None  # the number that a missing value is read as; None: the mean


class CategoricalColumn(Section):
    """A categorical column."""

    name: str  # its name in the files
    categories: tuple[str, ...]  # the known ones, in the order of the encoded columns
    fill: str | None = None  # the category that a missing value is read as; None: none of them


class TableEncoding(Section):
    """How rows become features. It is the same at every site."""

    numeric: tuple[NumericColumn, ...]  # the numeric columns
    categorical: tuple[CategoricalColumn, ...]  # the categorical columns
    # how the files are written that the model was trained on; None: with a header and decimal points
    form: TableFormat | None = None
    id: str | None = None  # the column that names each row; None: there is none

    @property
    def is_agreed(self) -> bool:
        """Whether it holds nothing but what follows from the statistics of sites."""
        chosen = [column.fill is not None or bool(column.missing_values) for column in self.numeric]
        chosen += [column.fill is not None for column in self.categorical]
        return not any(chosen) and self.form is None and self.id is None

    def with_choices(
        self,
        codes: Mapping[str, Sequence[float]],
        fills: Mapping[str, float | str],
        form: TableFormat | None,
        id: str | None,
    ) -> TableEncoding:
        """This encoding with what a user chose beside it.

        Args:
            codes: numeric column → numbers that mean "missing".
            fills: column → what a missing value is read as.

        Raises:
            UserError: a missing category is to be read as none of the categories.
        """
        for category in self.categorical:
            value = fills.get(category.name)
            if value is not None and value not in category.categories:
                raise UserError(
                    f"data.impute: '{value}' is no category of column '{category.name}'; "
                    f"{nearest(str(value), category.categories)}"
                )
        numeric = tuple(
            column.model_copy(
                update={"missing_values": tuple(codes.get(column.name, ())), "fill": fills.get(column.name)}
            )
            for column in self.numeric
        )
        categorical = tuple(column.model_copy(update={"fill": fills.get(column.name)}) for column in self.categorical)
        return TableEncoding(numeric=numeric, categorical=categorical, form=form, id=id)

    @property
    def width(self) -> int:
        """The number of encoded columns."""
        indicators = sum(column.can_be_missing for column in self.numeric)
        return len(self.numeric) + indicators + sum(len(column.categories) for column in self.categorical)

    def preprocessing(self) -> Preprocessing:
        """The encoding in the form that is saved with a model."""
        return Preprocessing(kind="table", table=self.model_dump(mode="json", exclude_none=True))


def numbers(table: Columns, name: str, missing_values: Sequence[float] = ()) -> npt.NDArray[np.float64]:
    """A numeric column.

    Returns its values (n,), NaN where missing. UserError if there is no such column, or a cell is not a finite number.
    """
    out = np.empty(len(table), dtype=np.float64)
    for row, cell in enumerate(table.column(name, shared=True)):
        if is_missing(cell):
            out[row] = math.nan
            continue
        number = number_of(cell)
        if number is None:
            where = f"{table.locate(row)}, column '{name}'"
            advice = advice_on(cell, "leave it empty if missing, or list the column under categorical")
            raise UserError(
                f"{where}: '{cell}' is not a number ({advice})", public=f"{where}: the cell is not a number"
            )
        out[row] = math.nan if number in missing_values else number
    return out


@dataclass(frozen=True)
class TableStatistics:
    """What one site sends about its table: sums and sets, no rows."""

    count: npt.NDArray[np.int64]  # number of values of each numeric column
    total: npt.NDArray[np.float64]  # their sum
    squares: npt.NDArray[np.float64]  # the sum of their squares
    any_missing: npt.NDArray[np.bool_]  # whether any value of the column is missing
    categories: tuple[frozenset[str], ...]  # the set of values of each categorical column
    rows: tuple[Mapping[str, int], ...] = ()  # how many rows have each of these values; it stays at the site


def site_statistics(
    table: Columns, numeric: Sequence[str], categorical: Sequence[str], ranges: Ranges | None = None
) -> TableStatistics:
    """The statistics of one site's table.

    ``ranges``: numeric column → least and largest value; sums are then of values within them, scaled to [-1, 1].
    UserError if a column is missing, or a numeric cell is not a number.
    """
    values = [within(numbers(table, name), None if ranges is None else ranges[name]) for name in numeric]
    there = [column[~np.isnan(column)] for column in values]
    rows = tuple(counted_cells(table.column(name)) for name in categorical)
    with np.errstate(over="ignore"):  # `agreed_encoding` reports the column
        total = np.array([column.sum() for column in there])
        squares = np.array([(column**2).sum() for column in there])
    return TableStatistics(
        count=np.array([len(column) for column in there], dtype=np.int64),
        total=total,
        squares=squares,
        any_missing=np.array([len(column) < len(table) for column in there], dtype=np.bool_),
        categories=tuple(map(frozenset, rows)),
        rows=rows,
    )


def agreed_encoding(
    statistics: Sequence[TableStatistics], numeric: Sequence[str], categorical: Sequence[str]
) -> TableEncoding:
    """The encoding that follows from the statistics of all sites.

    UserError if a column has no value anywhere, or its numbers are too large to be squared.
    """
    count = np.sum([site.count for site in statistics], axis=0)
    total = np.sum([site.total for site in statistics], axis=0)
    squares = np.sum([site.squares for site in statistics], axis=0)
    columns = []
    for index, name in enumerate(numeric):
        if count[index] == 0:
            raise UserError(f"column '{name}' has no value at any site: leave it out of data.numeric")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = moments(int(count[index]), total[index], squares[index])
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise UserError(f"column '{name}' has values that are too large to standardise: give it another unit")
        missing = any(bool(site.any_missing[index]) for site in statistics)
        columns.append(NumericColumn(name=name, mean=float(mean), std=float(std), can_be_missing=missing))
    kinds = []
    for index, name in enumerate(categorical):
        categories = natural_order(frozenset().union(*(site.categories[index] for site in statistics)))
        if not categories:
            raise UserError(f"column '{name}' has no value at any site: leave it out of data.categorical")
        kinds.append(CategoricalColumn(name=name, categories=categories))
    return TableEncoding(numeric=tuple(columns), categorical=tuple(kinds))


def moments(
    count: int, total: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and population standard deviation of columns.

    ``squares``: the sum of their squares, per column. Returns mean and deviation; the deviation of a constant column is
    set to 1.
    """
    mean = total / count
    variance = squares / count - mean**2
    # Rounding gives a constant column a variance of about 1e-16 of its square instead of 0.
    constant = variance <= 1e-12 * (1 + mean**2)
    return mean, np.where(constant, 1.0, np.sqrt(np.where(constant, 1.0, variance)))


def encode(table: Columns, encoding: TableEncoding) -> npt.NDArray[np.float32]:
    """The rows of a table as features.

    Returns float32 (n, encoding.width). UserError if the file lacks a column, or a numeric cell is not a number.
    """
    scaled, absent, flags = [], [], []
    for numeric in encoding.numeric:
        values = numbers(table, numeric.name, numeric.missing_values)
        gone = np.isnan(values)
        # Not the mean of this file: a patient's encoding must not depend on who else is in it.
        fill = numeric.mean if numeric.fill is None else numeric.fill
        scaled.append((np.where(gone, fill, values) - numeric.mean) / numeric.std)
        if numeric.can_be_missing:
            absent.append(gone.astype(np.float64))
    for categorical in encoding.categorical:
        named = table.column(categorical.name, shared=True)
        if categorical.fill is not None:
            named = [categorical.fill if is_missing(cell) else cell for cell in named]
        cells = np.array([canonical(cell) for cell in named], dtype=object)
        flags += [(cells == category).astype(np.float64) for category in categorical.categories]
    with np.errstate(over="ignore"):  # what is too large gets infinite: `check_scores` says so
        return np.stack([*scaled, *absent, *flags], axis=1).astype(np.float32)


def encode_rows(preprocessing: Preprocessing, rows: Path | Columns) -> tuple[list[str], npt.NDArray[np.float32]]:
    """Names and features of the rows of a table for prediction. The table needs no label column.

    Args:
        rows: a CSV file, or the table itself.

    Returns:
        The rows' names, from the column that names them if the file has it, and float32 (n, width).

    Raises:
        UserError: the model was not trained on tables, the file lacks a column, or a numeric cell is not a number.
    """
    if preprocessing.kind != "table" or preprocessing.table is None:
        raise UserError(f"{rows} is a table, but the model reads {preprocessing.kind} inputs: give these")
    encoding = encoding_of(preprocessing)
    table = rows if isinstance(rows, Columns) else rows_of(rows, encoding)
    names = [f"row {row}" for row in range(1, len(table) + 1)]
    if encoding.id is not None and encoding.id in table.cells:
        names = list(table.column(encoding.id))
    return names, encode(table, encoding)


def encoding_of(preprocessing: Preprocessing) -> TableEncoding:
    """The encoding in a model file. UserError if it is damaged."""
    try:
        return TableEncoding.model_validate(preprocessing.table)
    except ValidationError as error:
        raise UserError("the table encoding in the model file is damaged: use a run's model.safetensors") from error


def rows_of(
    source: Path | Callable[[TableFormat], Columns], encoding: TableEncoding, site_format: SiteFormat | None = None
) -> Columns:
    """The rows to predict, with the names and in the units that the model was trained on.

    Args:
        source: a file, or what reads the rows in a format.
        site_format: how the rows are written, where they differ from the training data; None: as these.

    Raises:
        UserError: the rows cannot be read.
    """
    form = form_of(source, encoding) if isinstance(source, Path) else encoding.form or PLAIN
    if site_format is not None:
        form = with_changes(form, site_format)
    numeric = frozenset(column.name for column in encoding.numeric)
    table = read_table(source, form, numeric) if isinstance(source, Path) else source(form)
    # New rows often lack columns that are no features, such as the label.
    table = table.rename_columns({old: new for old, new in form.rename.items() if old in table.cells})
    table = table.respell({name: words for name, words in form.spellings.items() if name in table.cells})
    table = table.in_units({name: factor for name, factor in form.units.items() if name in table.cells})
    if site_format is None:
        return table
    return table.without_codes(
        {
            name: [code * form.units.get(name, 1.0) for code in codes]
            for name, codes in site_format.missing_values.items()
        }
    )


def with_changes(form: TableFormat, changes: TableFormat) -> TableFormat:
    """A format with what a user says of new rows. UserError if the two do not go together."""
    try:
        return merge_formats(form, changes)
    except ValidationError as error:
        raise UserError(f"data: {in_words(error.errors()[0])}") from None


def form_of(path: Path, encoding: TableEncoding) -> TableFormat:
    """How a file to predict is written: as the training files were, or with a line of column names where they had none.

    New rows often lack the label, so the names of all columns in the training files may not fit them.
    """
    form = encoding.form or PLAIN
    if form.header == "first_line" or path.suffix.lower() in PARQUET:
        return form
    named = form.model_copy(update={"header": "first_line", "columns": ()})
    try:
        columns = read_table(path, named).cells
    except UserError:  # a repeated cell in a first line of values, for example
        return form
    wanted = {column.name for column in encoding.numeric} | {column.name for column in encoding.categorical}
    return named if wanted <= {form.rename.get(name, name) for name in columns} else form
