"""Tables as text: CSV and Parquet files and data frames, all read into the same `Columns`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fedshift.data import sizes
from fedshift.errors import UserError, nearest

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
_WHOLE = re.compile(r"(-?\d+)\.0+")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}( .*)?")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ABSENT = frozenset({"None", "<NA>", "NaT"})
"""How Python libraries write a cell without a value, beside those in `MISSING`."""
PARQUET = (".parquet", ".pq")


class TableFormat(BaseModel):
    """How CSV files are written.

    Attributes:
        header: whether the first line holds the names of the columns.
        columns: the names of the columns of files without such a line; empty: 1, 2, ….
        decimal: the decimal sign of numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    header: Literal["first_line", "none"] = "first_line"
    columns: tuple[str, ...] = ()
    decimal: Literal[".", ","] = "."


PLAIN = TableFormat()


@dataclass(frozen=True)
class Columns:
    """A table as text.

    Attributes:
        path: the file, for messages.
        cells: column name → its cells.
        lines: the number of each row in the file, for messages.
        unit: what these numbers count.
    """

    path: str
    cells: Mapping[str, Sequence[str]]
    lines: Sequence[int]
    unit: Literal["line", "row"] = "line"

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

    def place(self, row: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path}, {self.unit} {self.lines[row]}"

    def rows(self, chosen: Sequence[int]) -> Columns:
        """The chosen rows."""
        cells = {name: [column[row] for row in chosen] for name, column in self.cells.items()}
        return Columns(self.path, cells, [self.lines[row] for row in chosen], self.unit)

    def without_codes(self, codes: Mapping[str, Sequence[float]]) -> Columns:
        """The table with the numbers that mean "missing" as empty cells.

        Args:
            codes: column → such numbers.

        Raises:
            UserError: there is no such column.
        """
        blank = {
            name: ["" if _number(cell) in numbers else cell for cell in self.column(name)]
            for name, numbers in codes.items()
        }
        return Columns(self.path, {**self.cells, **blank}, self.lines, self.unit)

    def complete(self, names: Sequence[str]) -> Columns:
        """The rows that have a value in each of the named columns."""
        columns = [self.column(name) for name in names]
        return self.rows([row for row in range(len(self)) if not any(is_missing(column[row]) for column in columns)])


def read_table(path: Path, form: TableFormat = PLAIN) -> Columns:
    """Read a CSV or Parquet file.

    The separator of a CSV file is a comma, semicolon or tab: the most frequent one in the first line.

    Args:
        path: the file.
        form: how a CSV file is written.

    Raises:
        UserError: the file is missing, empty or unreadable, repeats a column, or has a row with another number of cells
            than there are columns.
    """
    return _read_parquet(path) if path.suffix.lower() in PARQUET else _read_csv(path, form)


def _read_csv(path: Path, form: TableFormat) -> Columns:
    text = _text(path)
    first = text.partition("\n")[0]
    separators = ";\t" if form.decimal == "," and (";" in first or "\t" in first) else ",;\t"
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(separators, key=first.count), skipinitialspace=True
    )
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not a CSV file ({error})") from error
    if form.header == "none":
        width = len(rows[0][1]) if rows else 0
        names = list(form.columns) or [str(number) for number in range(1, width + 1)]
        counted = f"data.columns has {len(names)} names" if form.columns else f"the first line has {width}"
    else:
        names = [name.strip() for name in rows.pop(0)[1]] if rows else []
        counted = f"the first line has {len(names)} columns"
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"{path}: column '{twice}' appears more than once among the names of columns",
            public=f"{path}: a column appears more than once among the names of columns",
        )
    if not rows:
        wanted = "at least one row" if form.header == "none" else "a line of column names and at least one row"
        raise UserError(f"data file {path} is empty: it needs {wanted}")
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(f"{path}, line {line}: {len(row)} cells, but {counted}")
    cells = {name: [row[place].strip() for _, row in rows] for place, name in enumerate(names)}
    if form.decimal == ",":
        cells = {name: [_with_point(cell) for cell in column] for name, column in cells.items()}
    return Columns(str(path), cells, [line for line, _ in rows])


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"data file {path} does not exist: correct the path") from error
    except IsADirectoryError as error:
        raise UserError(f"data file {path} is a folder: name the CSV file in it") from error
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if data.startswith(_UTF_16) or b"\0" in data[:1000]:
        raise UserError(f"data file {path} looks like UTF-16 text, or no text at all: save it as a CSV file in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data file {path} cannot be read as text (UTF-8): save it as a CSV file in UTF-8") from error


def _with_point(cell: str) -> str:
    return cell.replace(",", ".") if has_decimal_comma(cell) else cell


def has_decimal_comma(cell: str) -> bool:
    """Whether a cell is a number with a decimal comma."""
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def is_date(cell: str) -> bool:
    """Whether a cell is a date, as ISO 8601, days first or months first."""
    return _DATE.fullmatch(cell) is not None


def _read_parquet(path: Path) -> Columns:
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: correct the path")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with sizes.reading(path), ParquetFile(path) as file:
            sizes.check_table(path, file.metadata.num_rows, file.metadata.num_columns)
            texts = [field.name for field in file.schema_arrow if str(field.type).endswith("string")]
        # Each text once: a file says how many rows it has, and not how long their texts are.
        with sizes.reading(path), ParquetFile(path, read_dictionary=texts) as file:
            table = file.read()
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(f"data file {path} is damaged or not a Parquet file: copy or make it again") from error
    with sizes.reading(path):
        return from_columns(str(path), {name: _values(table[name]) for name in table.column_names})


def _values(column: Any) -> list[Any]:
    """The values of a column of Arrow's; equal texts are one object."""
    if not hasattr(column.type, "index_type"):
        values: list[Any] = column.to_pylist()
        return values
    found: list[Any] = []
    for chunk in column.chunks:
        known = [*chunk.dictionary.to_pylist(), None]
        found += [known[-1 if place is None else place] for place in chunk.indices.to_pylist()]
    return found


def from_columns(where: str, columns: Mapping[Any, Sequence[Any]]) -> Columns:
    """A table of Python values, such as the columns of a data frame.

    Args:
        where: where it comes from, for messages.
        columns: name → values.

    Raises:
        UserError: the table is empty, or columns differ in length.
    """
    cells = {str(name): [_cell(value) for value in values] for name, values in columns.items()}
    lengths = {len(column) for column in cells.values()}
    if len(lengths) > 1:
        raise UserError(f"{where}: columns differ in length ({', '.join(map(str, sorted(lengths)))})")
    length = lengths.pop() if lengths else 0
    if length == 0:
        raise UserError(f"{where} is empty: it needs at least one row")
    return Columns(where, cells, range(1, length + 1), "row")


def _cell(value: Any) -> str:
    if isinstance(value, str):  # also the word None, as in a CSV file
        return value.strip()
    text = str(int(value) if isinstance(value, bool) else value).strip()
    return "" if text in _ABSENT else text


def parted(table: Columns, name: str) -> Iterator[tuple[str, Columns]]:
    """The sites of one table, in the order of their first rows.

    Args:
        table: all sites.
        name: the column that holds the name of each row's site.

    Raises:
        UserError: there is no such column, or a cell of it is empty.
    """
    rows: dict[str, list[int]] = {}
    for row, cell in enumerate(table.column(name)):
        if is_missing(cell):
            raise UserError(f"{table.place(row)}, column '{name}': the name of the site is missing")
        rows.setdefault(canonical(cell), []).append(row)
    for site, chosen in rows.items():
        yield site, table.rows(chosen)


def canonical(cell: str) -> str:
    """A category or label in the form that sites compare: '1.0' becomes '1'."""
    whole = _WHOLE.fullmatch(cell)
    return whole.group(1) if whole else cell


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value: empty, ?, NA, N/A, NaN or null, in any case."""
    return cell.strip().lower() in MISSING


def is_number(cell: str) -> bool:
    """Whether a cell is a number."""
    return _number(cell) is not None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
