"""Tables of numbers and categories: reading CSV files, one encoding for all sites, rows as features.

Sites agree on the encoding without pooling rows. Each site sends a `TableStatistics`. For a numeric column this is the
count, sum and sum of squares of its values, and whether any value is missing. For a categorical column it is the set of
its values. Counts and sums are added; sets are united.

The encoded columns, in order:

* each numeric column as (value - mean) / std, and 0 for a missing value;
* for each numeric column that can be missing, a 0/1 column that says so;
* for each categorical column, one 0/1 column per category, all zero for a missing or unknown value.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from fedshift.data.checks import natural_order
from fedshift.data.domain import Preprocessing
from fedshift.errors import UserError, nearest

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
_WHOLE = re.compile(r"(-?\d+)\.0+")


@dataclass(frozen=True)
class Columns:
    """A CSV file as text.

    Attributes:
        path: the file, for messages.
        cells: column name → its cells.
        lines: line number of each row, for messages.
    """

    path: str
    cells: Mapping[str, Sequence[str]]
    lines: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> Sequence[str]:
        """The cells of one column.

        Raises:
            UserError: there is no such column; names the nearest one.
        """
        if name not in self.cells:
            raise UserError(
                f"{self.path} has no column '{name}'; {nearest(name, self.cells)}",
                public=f"{self.path} lacks a column that it should have",
            )
        return self.cells[name]


def read_csv(path: Path) -> Columns:
    """Read a CSV file with a header. The separator is a comma, semicolon or tab: the most frequent one in the header.

    Raises:
        UserError: the file is missing, empty or unreadable, repeats a column, or has a row with another number of cells
            than the header.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"data file {path} does not exist: correct the path") from error
    except IsADirectoryError as error:
        raise UserError(f"data file {path} is a folder: name the CSV file in it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {path} cannot be read as text (UTF-8): save it as a CSV file") from error
    first = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), skipinitialspace=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        twice = {name for name in header if header.count(name) > 1}
        if twice:
            raise UserError(
                f"{path}: column '{sorted(twice)[0]}' appears more than once in the first line",
                public=f"{path}: a column appears more than once in the first line",
            )
        rows: list[list[str]] = []
        lines: list[int] = []
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(row)} cells, but the first line has {len(header)} columns"
                )
            rows.append([cell.strip() for cell in row])
            lines.append(reader.line_num)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not a CSV file ({error})") from error
    if not rows:
        raise UserError(f"data file {path} is empty: it needs a line of column names and at least one row")
    return Columns(str(path), {name: [row[place] for row in rows] for place, name in enumerate(header)}, lines)


def canonical(cell: str) -> str:
    """A category or label in the form that sites compare: '1.0' becomes '1'."""
    whole = _WHOLE.fullmatch(cell)
    return whole.group(1) if whole else cell


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value: empty, ?, NA, N/A, NaN or null, in any case."""
    return cell.strip().lower() in MISSING


class NumericColumn(BaseModel):
    """A numeric column.

    Attributes:
        name: its name in the files.
        mean: mean over the sites.
        std: standard deviation over the sites.
        can_be_missing: whether there is a 0/1 column for missing values.
        missing_values: numbers that mean "missing".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    mean: FiniteFloat
    std: FiniteFloat = Field(gt=0)
    can_be_missing: bool
    missing_values: tuple[float, ...] = ()


class CategoricalColumn(BaseModel):
    """A categorical column, with its known categories in the order of the encoded columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    categories: tuple[str, ...]


class TableEncoding(BaseModel):
    """How rows become features. It is the same at every site."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    numeric: tuple[NumericColumn, ...]
    categorical: tuple[CategoricalColumn, ...]

    @property
    def width(self) -> int:
        """The number of encoded columns."""
        indicators = sum(column.can_be_missing for column in self.numeric)
        return len(self.numeric) + indicators + sum(len(column.categories) for column in self.categorical)

    def preprocessing(self) -> Preprocessing:
        """The encoding in the form that is saved with a model."""
        return Preprocessing(kind="table", table=self.model_dump(mode="json"))


def numbers(table: Columns, name: str, missing_values: Sequence[float] = ()) -> npt.NDArray[np.float64]:
    """A numeric column.

    Args:
        table: the file.
        name: the column.
        missing_values: numbers that mean "missing".

    Returns:
        Its values (n,), NaN where missing.

    Raises:
        UserError: there is no such column, or a cell is not a finite number.
    """
    out = np.empty(len(table), dtype=np.float64)
    for row, cell in enumerate(table.column(name)):
        if is_missing(cell):
            out[row] = math.nan
            continue
        try:
            out[row] = float(cell)
        except ValueError:
            out[row] = math.inf
        if not math.isfinite(out[row]):
            where = f"{table.path}, line {table.lines[row]}, column '{name}'"
            raise UserError(
                f"{where}: '{cell}' is not a number (leave it empty if missing, or list the column under categorical)",
                public=f"{where}: the cell is not a number",
            )
        if out[row] in missing_values:
            out[row] = math.nan
    return out


@dataclass(frozen=True)
class TableStatistics:
    """What one site sends about its table: sums and sets, no rows.

    Attributes:
        count: number of values of each numeric column.
        total: their sum.
        squares: the sum of their squares.
        any_missing: whether any value of the column is missing.
        categories: the set of values of each categorical column.
    """

    count: npt.NDArray[np.int64]
    total: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    any_missing: npt.NDArray[np.bool_]
    categories: tuple[frozenset[str], ...]


def site_statistics(table: Columns, numeric: Sequence[str], categorical: Sequence[str]) -> TableStatistics:
    """The statistics of one site's table.

    Args:
        table: the file.
        numeric: names of numeric columns.
        categorical: names of categorical columns.

    Raises:
        UserError: a column is missing, or a numeric cell is not a number.
    """
    values = [numbers(table, name) for name in numeric]
    there = [column[~np.isnan(column)] for column in values]
    with np.errstate(over="ignore"):  # `agreed_encoding` reports the column
        total = np.array([column.sum() for column in there])
        squares = np.array([(column**2).sum() for column in there])
    return TableStatistics(
        count=np.array([len(column) for column in there], dtype=np.int64),
        total=total,
        squares=squares,
        any_missing=np.array([len(column) < len(table) for column in there], dtype=np.bool_),
        categories=tuple(
            frozenset(canonical(cell) for cell in table.column(name) if not is_missing(cell)) for name in categorical
        ),
    )


def agreed_encoding(
    statistics: Sequence[TableStatistics], numeric: Sequence[str], categorical: Sequence[str]
) -> TableEncoding:
    """The encoding that follows from the statistics of all sites.

    Args:
        statistics: one entry per site.
        numeric: names of numeric columns.
        categorical: names of categorical columns.

    Raises:
        UserError: a column has no value anywhere, or its numbers are too large to be squared.
    """
    count = np.sum([site.count for site in statistics], axis=0)
    total = np.sum([site.total for site in statistics], axis=0)
    squares = np.sum([site.squares for site in statistics], axis=0)
    columns = []
    for place, name in enumerate(numeric):
        if count[place] == 0:
            raise UserError(f"column '{name}' has no value at any site: leave it out of data.numeric")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = moments(int(count[place]), total[place], squares[place])
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise UserError(f"column '{name}' has values that are too large to standardise: give it another unit")
        missing = any(bool(site.any_missing[place]) for site in statistics)
        columns.append(NumericColumn(name=name, mean=float(mean), std=float(std), can_be_missing=missing))
    kinds = []
    for place, name in enumerate(categorical):
        categories = natural_order(frozenset().union(*(site.categories[place] for site in statistics)))
        if not categories:
            raise UserError(f"column '{name}' has no value at any site: leave it out of data.categorical")
        kinds.append(CategoricalColumn(name=name, categories=categories))
    return TableEncoding(numeric=tuple(columns), categorical=tuple(kinds))


def moments(
    count: int, total: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and population standard deviation of columns.

    Args:
        count: number of values.
        total: their sum, per column.
        squares: the sum of their squares, per column.

    Returns:
        Mean and deviation; the deviation of a constant column is set to 1.
    """
    mean = total / count
    variance = squares / count - mean**2
    # Rounding gives a constant column a variance of about 1e-16 of its square instead of 0.
    constant = variance <= 1e-12 * (1 + mean**2)
    return mean, np.where(constant, 1.0, np.sqrt(np.where(constant, 1.0, variance)))


def encode(table: Columns, encoding: TableEncoding) -> npt.NDArray[np.float32]:
    """The rows of a table as features.

    Args:
        table: the file.
        encoding: the encoding.

    Returns:
        float32 (n, encoding.width).

    Raises:
        UserError: the file lacks a column, or a numeric cell is not a number.
    """
    scaled, absent, flags = [], [], []
    for numeric in encoding.numeric:
        values = numbers(table, numeric.name, numeric.missing_values)
        gone = np.isnan(values)
        # Not the mean of this file: a patient's encoding must not depend on who else is in it.
        scaled.append((np.where(gone, numeric.mean, values) - numeric.mean) / numeric.std)
        if numeric.can_be_missing:
            absent.append(gone.astype(np.float64))
    for categorical in encoding.categorical:
        cells = np.array([canonical(cell) for cell in table.column(categorical.name)], dtype=object)
        flags += [(cells == category).astype(np.float64) for category in categorical.categories]
    return np.stack([*scaled, *absent, *flags], axis=1).astype(np.float32)


def encode_rows(preprocessing: Preprocessing, rows: Path | Columns) -> npt.NDArray[np.float32]:
    """Features of a table for prediction. It needs no label column.

    Args:
        preprocessing: the preprocessing saved with the model.
        rows: a CSV file, or the table itself.

    Returns:
        float32 (n, width).

    Raises:
        UserError: the model was not trained on tables, the file lacks a column, or a numeric cell is not a number.
    """
    if preprocessing.kind != "table" or preprocessing.table is None:
        raise UserError(f"{rows} is a table, but the model reads {preprocessing.kind} inputs: give these")
    try:
        encoding = TableEncoding.model_validate(preprocessing.table)
    except ValidationError as error:
        raise UserError("the table encoding in the model file is damaged: use a run's model.safetensors") from error
    return encode(rows if isinstance(rows, Columns) else read_csv(rows), encoding)
