"""Tables as text: CSV, Excel and Parquet files and data frames, all read into the same `Columns`."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, field_validator, model_validator

from fedshift.data import sizes
from fedshift.errors import UserError, nearest
from fedshift.extras import import_extra
from fedshift.section import Section

MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null"})
_WHOLE = re.compile(r"(-?\d+)\.0+")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}( .*)?")
_GROUPED_COMMA = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_GROUPED_POINT = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")
_GROUPED_SPACE = re.compile(r"[+-]?\d{1,3}([ '\u00a0\u202f\u2019]\d{3})+([.,]\d+)?")
_SIGNS = {" ": " \u00a0\u202f", "'": "'\u2019"}
"""The letters that a sign of thousands is written as, where there are several."""
_EXCEL_SEPARATOR = re.compile(r'[ \t]*"?sep=(.)"?[ \t]*(\r\n|\r|\n|$)', re.IGNORECASE)
"""A first line of Excel's that names the separator."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ABSENT = frozenset({"None", "<NA>", "NaT"})
"""How Python libraries write a cell without a value, beside those in `MISSING`."""
PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx", ".xlsm")


def as_numbers(mapping: object) -> object:
    """A mapping to lists of numbers, where a single number is a list of one."""
    if not isinstance(mapping, Mapping):
        return mapping
    return {key: (value,) if isinstance(value, int | float) else value for key, value in mapping.items()}


Codes = Annotated[dict[str, tuple[float, ...]], BeforeValidator(as_numbers)]
"""Column → numbers that mean missing."""


def as_written(mapping: object) -> object:
    """A mapping of labels with the keys and values that a text file would hold: the number 1.0 becomes "1".

    ValueError if YAML read a word such as yes as true.
    """
    if not isinstance(mapping, Mapping):
        return mapping
    if any(isinstance(part, bool) for pair in mapping.items() for part in pair):
        raise ValueError("YAML reads yes, no, on and off as true or false: write such words in quotes")
    return {canonical(str(key)): canonical(str(value)) for key, value in mapping.items()}


Spellings = Annotated[dict[str, str], BeforeValidator(as_written)]


class TableFormat(Section):
    """How files are written: what makes their cells those of the common table."""

    header: Literal["first_line", "none"] = Field(
        "first_line", description="whether the first line of CSV and Excel files has the names of columns"
    )
    columns: tuple[str, ...] = Field((), description="header none: the names of all columns in order; unset: 1, 2, …")
    decimal: Literal[".", ","] = Field(".", description="decimal sign of numbers that are text")
    thousands: Literal[".", ",", " ", "'"] | None = Field(
        None, description="the sign between groups of three digits in numbers that are text"
    )
    encoding: str | None = Field(None, description="of the letters of CSV files, such as cp1252; unset: UTF-8")
    separator: str | None = Field(
        None, description="between the cells of CSV files, one sign or tab; unset: comma, semicolon or tab, as found"
    )
    sheet: str | None = Field(None, description="the sheet of Excel files; unset: the only one")
    missing_words: tuple[str, ...] = Field(
        (), description="words that mean missing in any column, capitals or not, beside empty, ?, NA, N/A, NaN and null"
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="name of a column in the file: the name that this section uses for it"
    )
    spellings: dict[str, Spellings] = Field(
        default_factory=dict, description="column: a cell of the file: the category or class that this section reads"
    )
    units: dict[str, Annotated[FiniteFloat, Field(gt=0)]] = Field(
        default_factory=dict, description="column of numbers: the factor that brings it to the common unit"
    )

    @field_validator("encoding")
    @classmethod
    def _is_of_text(cls, encoding: str | None) -> str | None:
        """The encoding by its usual name; others than those of text, such as zip, would expand what a file holds."""
        if encoding is None:
            return None
        try:
            known = codecs.lookup(encoding)
        except (LookupError, ValueError):
            known = None
        if known is None or not known._is_text_encoding or known.name.replace("-", "_") in _NO_FILES:
            raise ValueError(f"there is no encoding '{encoding}'; usual ones are utf-8, cp1252, latin-1 and utf-16")
        return "utf-8-sig" if known.name == "utf-8" else known.name

    @field_validator("separator")
    @classmethod
    def _is_one_sign(cls, separator: str | None) -> str | None:
        text = "\t" if separator in ("tab", "\\t") else separator
        if text is not None and (len(text) != 1 or text.isalnum() or text in '"\r\n'):
            raise ValueError(f"'{separator}' cannot separate cells: write one sign such as ';', or tab")
        return text

    @model_validator(mode="after")
    def _signs_differ(self) -> Self:
        if self.thousands == self.decimal:
            raise ValueError(f"thousands and decimal are both '{self.decimal}': they cannot be the same sign")
        if self.columns and self.header != "none":
            raise ValueError("columns is for files without a line of names: set header: none, too")
        twice = [name for name, count in Counter(self.rename.values()).items() if count > 1]
        if twice:
            raise ValueError(f"rename: two columns become '{twice[0]}': give each its own name")
        return self


_NO_FILES = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined", "mbcs", "oem"})
"""Encodings of text that no file is written in."""


class SiteFormat(TableFormat):
    """How one file is written, where it differs from the others."""

    missing_values: Codes = Field(
        default_factory=dict, description="numeric column: numbers that mean missing, in the file's own unit"
    )


PLAIN = TableFormat()


def merge_formats(form: TableFormat, other: TableFormat) -> TableFormat:
    """A format with the fields that are set in another one; mappings add to those of the first.

    ValidationError if they do not go together.
    """
    fields = {name: getattr(form, name) for name in TableFormat.model_fields}
    chosen = {name: getattr(other, name) for name in other.model_fields_set if name in fields}
    for name in ("rename", "spellings", "units"):
        chosen[name] = {**fields[name], **getattr(other, name)}
    return TableFormat.model_validate({**fields, **chosen})


@dataclass(frozen=True)
class Columns:
    """A table as text."""

    path: str  # the file, for messages
    cells: Mapping[str, Sequence[str]]  # column name → its cells
    lines: Sequence[int]  # the number of each row in the file, for messages
    unit: Literal["line", "row"] = "line"  # what these numbers count

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str, *, shared: bool = False) -> Sequence[str]:
        """The cells of one column.

        ``shared``: whether it is an input, whose name all sites have; a label or an ID may be called otherwise here.
        UserError if there is no such column; names the nearest one, which is not public.
        """
        if name not in self.cells:
            which = f"the column '{name}'" if shared else "a column"
            raise UserError(
                f"{self.path} has no column '{name}'; {nearest(name, self.cells)}",
                public=f"{self.path} lacks {which} that it should have",
            )
        return self.cells[name]

    def locate(self, row: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path}, {self.unit} {self.lines[row]}"

    def rows(self, chosen: Sequence[int]) -> Columns:
        """The chosen rows."""
        cells = {name: [column[row] for row in chosen] for name, column in self.cells.items()}
        return Columns(self.path, cells, [self.lines[row] for row in chosen], self.unit)

    def rename_columns(self, names: Mapping[str, str]) -> Columns:
        """The table with other names of columns; a column that has its new name already is left as it is.

        ``names``: name in the file → new name. UserError if there is no such column, or another one has the new name.
        """
        if not names:
            return self
        for old, new in names.items():
            if old not in self.cells and new not in self.cells:
                raise UserError(
                    f"{self.path}: rename: there is no column '{old}'; {nearest(old, self.cells)}",
                    public=f"{self.path} lacks a column that data.rename names",
                )
        cells = {names.get(name, name): column for name, column in self.cells.items()}
        if len(cells) < len(self.cells):
            twice = next(new for old, new in names.items() if old in self.cells and new in self.cells)
            raise UserError(
                f"{self.path}: rename: two columns would be called '{twice}': rename or remove one of them",
                public=f"{self.path}: a column appears more than once among the names of columns",
            )
        return replace(self, cells=cells)

    def respell(self, spellings: Mapping[str, Mapping[str, str]]) -> Columns:
        """The table with other words in some columns.

        ``spellings``: column → a cell as `canonical` gives it: its new word. Cells that are not named stay. UserError
        if there is no such column.
        """
        if not spellings:
            return self
        cells = {
            name: [words.get(canonical(cell), cell) for cell in self.column(name)] for name, words in spellings.items()
        }
        return replace(self, cells={**self.cells, **cells})

    def in_units(self, factors: Mapping[str, float]) -> Columns:
        """The table with the numbers of some columns multiplied by a factor. Cells that are no number stay.

        ``factors``: column → factor. UserError if there is no such column.
        """
        if not factors:
            return self
        scaled = {
            name: [cell if (value := number_of(cell)) is None else repr(value * factor) for cell in self.column(name)]
            for name, factor in factors.items()
        }
        return replace(self, cells={**self.cells, **scaled})

    def without_codes(self, codes: Mapping[str, Sequence[float]]) -> Columns:
        """The table with the numbers that mean "missing" as empty cells.

        ``codes``: column → such numbers. UserError if there is no such column.
        """
        blank = {
            name: ["" if number_of(cell) in numbers else cell for cell in self.column(name)]
            for name, numbers in codes.items()
        }
        return replace(self, cells={**self.cells, **blank})

    def complete(self, names: Sequence[str]) -> Columns:
        """The rows that have a value in each of the named columns."""
        columns = [self.column(name) for name in names]
        return self.rows([row for row in range(len(self)) if not any(is_missing(column[row]) for column in columns)])


def read_table(path: Path, form: TableFormat = PLAIN, numeric: Collection[str] = ()) -> Columns:
    """Read a CSV, Excel or Parquet file, or a folder of partitioned Parquet.

    Names and units are left as they are: `Columns.rename_columns`, `Columns.in_units`.

    The separator of a CSV file is a comma, semicolon or tab, unless the format or a first line ``sep=`` names it: the
    most frequent one in the first line, outside of quotes.

    Args:
        numeric: the columns, by their new names, whose cells are numbers, in which thousands may be grouped.

    Raises:
        UserError: the file is missing, empty or unreadable, repeats a column, or has a row with another number of cells
            than there are columns.
    """
    suffix = path.suffix.lower()
    with sizes.reading(path):
        if path.is_dir():
            return _read_partitioned(path, form, numeric)
        if suffix in PARQUET:
            return _read_parquet(path, form, numeric)
        if suffix in EXCEL:
            return _read_excel(path, form, numeric)
        return _read_csv(path, form, numeric)


def _read_csv(path: Path, form: TableFormat, numeric: Collection[str]) -> Columns:
    text, separator, skipped = _find_separator(_text(path, form), form)
    sizes.check_table(path, 1, text.count(separator) + text.count("\n"))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=separator != " ")
    try:
        rows = [(reader.line_num + skipped, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num + skipped}: not a CSV file ({error})") from error
    names, counted = _names(path, rows, form)
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(f"{path}, line {line}: {len(row)} cells, but {counted}")
    cells = {name: [row[index].strip() for _, row in rows] for index, name in enumerate(names)}
    return _with_points(Columns(str(path), _without_words(cells, form), [line for line, _ in rows]), form, numeric)


def _without_words(cells: dict[str, list[str]], form: TableFormat) -> dict[str, list[str]]:
    """Cells, empty where a word means missing."""
    if not form.missing_words:
        return cells
    words = {word.strip().lower() for word in form.missing_words}
    return {name: ["" if cell.lower() in words else cell for cell in column] for name, column in cells.items()}


def _read_excel(path: Path, form: TableFormat, numeric: Collection[str]) -> Columns:
    """The rows of a sheet: the values that Excel stored; numbers stay numbers."""
    openpyxl = import_extra("openpyxl", extra="tables", what=f"the Excel file {path}")
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: correct the path")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes.check_size(path, sum(part.file_size for part in archive.infolist()))
            computes = any(map(partial(_has_formulas, archive), archive.namelist()))
        rows = _sheet_rows(path, form, openpyxl.load_workbook(path, read_only=True, data_only=True))
        if computes:
            _check_formulas(path, form, openpyxl.load_workbook(path, read_only=True), dict(rows))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever the library makes of a damaged archive or sheet
        raise UserError(f"data file {path} is damaged or not an Excel file (.xlsx): save it again") from error
    texts = [(line, [_cell(value) for value in row]) for line, row in rows]
    names, counted = _names(path, texts, form)
    kept = [row for _, row in rows[len(rows) - len(texts) :]]
    if "" in names:
        raise UserError(f"{path}: column {names.index('') + 1} has cells and no name: name it in the first row")
    if len(kept[0]) != len(names):
        raise UserError(f"{path}: {len(kept[0])} columns, but {counted}")
    table = from_columns(str(path), {name: [row[at] for row in kept] for at, name in enumerate(names)}, form, numeric)
    return replace(table, lines=[line for line, _ in texts])


_MOST_ROWS = 1 << 20
"""Rows of a sheet of Excel."""
_FORMULA = re.compile(rb"<(\w+:)?f[\s>/]")


def _has_formulas(archive: zipfile.ZipFile, part: str) -> bool:
    """Whether a part of an Excel file is a sheet with formulas."""
    if not part.startswith("xl/worksheets/"):
        return False
    with archive.open(part) as stream:
        before = b""
        while piece := stream.read(1 << 20):
            if _FORMULA.search(before + piece):
                return True
            before = piece[-64:]
    return False


def _sheet(path: Path, form: TableFormat, book: Any) -> Any:
    names = book.sheetnames
    if form.sheet is not None and form.sheet not in names:
        raise UserError(
            f"{path} has no sheet '{form.sheet}'; {nearest(form.sheet, names)}",
            public=f"{path} lacks the sheet that it should have",
        )
    if form.sheet is None and len(names) != 1:
        raise UserError(
            f"{path} has {len(names)} sheets ({', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''}): "
            "name one of them under data.sheet",
            public=f"{path} has {len(names)} sheets: name one of them under data.sheet",
        )
    sheet = book[form.sheet or names[0]]
    if not hasattr(sheet, "reset_dimensions"):
        raise UserError(f"{path}: the sheet is a chart and has no cells: name another one under data.sheet")
    sheet.reset_dimensions()  # a file may declare 17 billion empty cells
    return sheet


def _sheet_rows(path: Path, form: TableFormat, book: Any) -> list[tuple[int, list[Any]]]:
    """The rows of a sheet that are not empty, with their numbers, all as wide as the widest."""
    with contextlib.closing(book):
        rows, read = list[tuple[int, list[Any]]](), 0
        for line, row in enumerate(_sheet(path, form, book).iter_rows(values_only=True), 1):
            read += len(row)
            if line > _MOST_ROWS:
                raise ValueError("more rows than a sheet has")
            if any(value is not None and value != "" for value in row):
                sizes.check_table(path, 1, read)
                rows.append((line, list(row)))
    used = [max(at for at, value in enumerate(row, 1) if value is not None) for _, row in rows]
    width = max(used, default=0)
    sizes.check_table(path, len(rows), width)
    return [(line, [*row[:width], *[None] * (width - len(row))]) for line, row in rows]


def _check_formulas(path: Path, form: TableFormat, book: Any, rows: Mapping[int, Sequence[Any]]) -> None:
    """Raise UserError if a cell that is read as empty is a formula whose value nobody computed."""
    with contextlib.closing(book):
        for line, row in enumerate(_sheet(path, form, book).iter_rows(), 1):
            values = rows.get(line, ())
            for at, cell in enumerate(row):
                if cell.data_type == "f" and (at >= len(values) or values[at] is None):
                    raise UserError(
                        f"{path}, row {line}, column {at + 1}: a formula without a stored value: open the file in "
                        "Excel and save it, or paste values"
                    )


def _names(path: Path, rows: list[tuple[int, list[str]]], form: TableFormat) -> tuple[list[str], str]:
    """The names of the columns, and where they were counted; takes a line of names off ``rows``."""
    if form.header == "none":
        width = len(rows[0][1]) if rows else 0
        names = list(form.columns) or [str(number) for number in range(1, width + 1)]
        counted = f"data.columns has {len(names)} names" if form.columns else f"the first line has {width}"
    else:
        names = [name.strip() for name in rows.pop(0)[1]] if rows else []
        counted = f"the first line has {len(names)} columns"
    check_once(path, names)
    if not rows:
        wanted = "at least one row" if form.header == "none" else "a line of column names and at least one row"
        raise UserError(f"data file {path} is empty: it needs {wanted}")
    return names, counted


def check_once(where: object, names: Sequence[str]) -> None:
    """Raise UserError if two columns have one name."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"{where}: column '{twice}' appears more than once among the names of columns",
            public=f"{where}: a column appears more than once among the names of columns",
        )


def _find_separator(text: str, form: TableFormat) -> tuple[str, str, int]:
    """The text without a first line that names the separator, the separator, and how many lines were left out."""
    named = _EXCEL_SEPARATOR.match(text)
    if named is not None:
        return text[named.end() :], form.separator or named[1], 1
    if form.separator is not None:
        return text, form.separator, 0
    first = _outside_quotes(text)
    separators = ";\t" if form.decimal == "," and (";" in first or "\t" in first) else ",;\t"
    return text, max(separators, key=first.count), 0


def _outside_quotes(text: str) -> str:
    """The first line with cells that is not blank, without what is in quotes; quotes inside a cell are letters."""
    text = text.lstrip("\r\n")
    letters: list[str] = []
    quoted, begins = False, True
    for letter in text:
        if quoted:
            quoted = letter != '"'
            begins = not quoted  # a second quote is one letter of the cell, which goes on
        elif letter in "\r\n":
            return "".join(letters)
        elif letter == '"' and begins:
            quoted = True
        else:
            letters.append(letter)
            begins = letter in ",;\t" or (begins and letter == " ")
    return text.partition("\n")[0] if quoted else "".join(letters)


def _text(path: Path, form: TableFormat) -> str:
    try:
        sizes.check_size(path, path.stat().st_size)
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"data file {path} does not exist: correct the path") from error
    except IsADirectoryError as error:
        raise UserError(f"data file {path} is a folder: name the CSV file in it") from error
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if form.encoding is None and (data.startswith(_UTF_16) or b"\0" in data[:1000]):
        raise UserError(
            f"data file {path} looks like UTF-16 text, or no text at all: set data.encoding: utf-16, or save it as a "
            "CSV file in UTF-8"
        )
    try:
        return data.decode(form.encoding or "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        named = "UTF-8" if form.encoding is None else f"data.encoding: {form.encoding}"
        raise UserError(
            f"data file {path} cannot be read as text in {named} (line {line}): set the data.encoding that it was "
            "saved in, such as cp1252 (of one file: data.per_site), or save it as a CSV file in UTF-8"
        ) from error


def _with_points(table: Columns, form: TableFormat, numeric: Collection[str]) -> Columns:
    """A table of text whose numbers are written with a decimal point and without groups."""
    if form.decimal == "." and form.thousands is None:
        return table
    wanted = {old for old, new in form.rename.items() if new in numeric} | (set(numeric) - set(form.rename.values()))
    cells = dict[str, list[str]]()
    for name, column in table.cells.items():
        convert = _plain(form) if name in wanted else _decimal(form)
        result = [convert(cell) for cell in column]
        cells[name] = [cell for cell in result if cell is not None]
        if len(cells[name]) < len(result):
            wrong = result.index(None)
            where = f"{table.locate(wrong)}, column '{form.rename.get(name, name)}'"
            raise UserError(
                f"{where}: '{column[wrong]}' is not a number with data.decimal: '{form.decimal}' and data.thousands: "
                f"{form.thousands!r}; write a file's numbers in one way"
                + (", or set data.thousands: '.'" if form.thousands is None else ""),
                public=f"{where}: the cell is not a number",
            )
    return replace(table, cells=cells)


def _decimal(form: TableFormat) -> Callable[[str], str | None]:
    """Brings a cell that is a number with a decimal comma to one with a point."""
    if form.decimal == ".":
        return str
    return lambda cell: cell.replace(",", ".") if has_decimal_comma(cell) else cell


def _plain(form: TableFormat) -> Callable[[str], str | None]:
    """Brings a number to one with a decimal point and without groups; None for one that could be read in two ways.

    With a decimal comma, 1.234 is no number of one whole and three decimals.
    """
    decimal = _decimal(form)
    if form.thousands is None:
        return lambda cell: None if _GROUPED_POINT.fullmatch(cell) else decimal(cell)
    signs = _SIGNS.get(form.thousands, form.thousands)
    sign = f"[{re.escape(signs)}]"
    grouped = re.compile(rf"[+-]?\d{{1,3}}(?:{sign}\d{{3}})+(?:{re.escape(form.decimal)}\d+)?")
    numeric = re.compile(rf"[+-]?[\d.,{re.escape(signs)}]*\d[\d.,{re.escape(signs)}]*")
    remove = str.maketrans("", "", signs)

    def plain(cell: str) -> str | None:
        if not any(letter in signs for letter in cell):
            return decimal(cell)
        if grouped.fullmatch(cell):
            return cell.translate(remove).replace(",", ".")
        return None if numeric.fullmatch(cell) else cell

    return plain


def has_decimal_comma(cell: str) -> bool:
    """Whether a cell is a number with a decimal comma."""
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def advice_on(cell: str, otherwise: str) -> str:
    """What to do about a cell that is not a number, by how it is written; ``otherwise``: about any other cell.

    No advice makes a thousandth of a number: 1,061 can be a thousand and more.
    """
    if _DATE.fullmatch(cell):
        return "write dates as days since one date that all sites share, or drop the column"
    if _GROUPED_COMMA.fullmatch(cell):
        return "if commas group thousands, set data.thousands: ','"
    if _GROUPED_POINT.fullmatch(cell):
        return "if points group thousands, set data.thousands: '.' and data.decimal: ','"
    if _GROUPED_SPACE.fullmatch(cell):
        sign = "'" if any(letter in _SIGNS["'"] for letter in cell) else " "
        return f'if signs group thousands, set data.thousands: "{sign}"'
    if has_decimal_comma(cell):
        return "for decimal commas, set data.decimal: ','"
    return (
        otherwise if re.search(r"\d", cell) else f"if it means missing, set data.missing_words: ['{cell}']; {otherwise}"
    )


def _read_partitioned(path: Path, form: TableFormat, numeric: Collection[str]) -> Columns:
    """The Parquet files below a folder; folders called column=value are columns (Hive's form)."""
    arrow = import_extra("pyarrow", extra="tables", what=f"{path.name}, a folder of Parquet,")
    try:
        with sizes.reading(path):
            whole = _open_partitions(path, ())
            sizes.check_table(path, whole.count_rows(), len(whole.schema.names))
            texts = [field.name for field in whole.schema if str(field.type).endswith("string")]
            parts = {frozenset(part.physical_schema.names): part.path for part in whole.get_fragments()}
            if len(parts) > 1:  # Arrow would leave out columns, or read them as missing
                raise UserError(f"data folder {path}: {' and '.join(sorted(parts.values())[:2])} have other columns")
            # Each text once: files say how many rows they have, and not how long their texts are.
            table = _open_partitions(path, texts).to_table()
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"data folder {path} cannot be read as partitioned Parquet: give it Parquet files of the same columns only"
        ) from error
    with sizes.reading(path):
        check_once(path, table.column_names)
        return from_columns(str(path), {name: _values(table[name]) for name in table.column_names}, form, numeric)


def _open_partitions(path: Path, texts: Collection[str]) -> Any:
    """The Parquet files below a folder, not read yet."""
    dataset = import_extra("pyarrow.dataset", extra="tables", what=f"{path.name}, a folder of Parquet,")
    form = dataset.ParquetFileFormat(read_options=dataset.ParquetReadOptions(dictionary_columns=texts))
    partitions = dataset.dataset(str(path.resolve()), format=form, partitioning="hive")
    if not partitions.files:
        raise UserError(f"data folder {path} holds no Parquet files: name a CSV file in it, or a folder of Parquet")
    return partitions


def _read_parquet(path: Path, form: TableFormat, numeric: Collection[str]) -> Columns:
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: correct the path")
    arrow = import_extra("pyarrow", extra="tables", what=f"the Parquet file {path}")
    parquet = import_extra("pyarrow.parquet", extra="tables", what=f"the Parquet file {path}")
    try:
        with sizes.reading(path), parquet.ParquetFile(path) as file:
            sizes.check_table(path, file.metadata.num_rows, file.metadata.num_columns)
            texts = [field.name for field in file.schema_arrow if str(field.type).endswith("string")]
        # Each text once: a file says how many rows it has, and not how long their texts are.
        with sizes.reading(path), parquet.ParquetFile(path, read_dictionary=texts) as file:
            table = file.read()
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"data file {path} is damaged or not a Parquet file: copy or make it again") from error
    with sizes.reading(path):
        check_once(path, table.column_names)
        return from_columns(str(path), {name: _values(table[name]) for name in table.column_names}, form, numeric)


def _values(column: Any) -> list[Any]:
    """The values of a column of Arrow's; equal texts are one object."""
    if not hasattr(column.type, "index_type"):
        values: list[Any] = column.to_pylist()
        return values
    result: list[Any] = []
    for chunk in column.chunks:
        known = [*chunk.dictionary.to_pylist(), None]
        result += [known[-1 if index is None else index] for index in chunk.indices.to_pylist()]
    return result


def from_columns(
    where: str, columns: Mapping[Any, Sequence[Any]], form: TableFormat = PLAIN, numeric: Collection[str] = ()
) -> Columns:
    """A table of Python values, such as the columns of a data frame. Its columns keep their names.

    Args:
        columns: name → values.
        form: how numbers are written in values that are text.
        numeric: as for `read_table`.

    Raises:
        UserError: the table is empty, or columns differ in length.
    """
    names = [str(name).strip() for name in columns]
    check_once(where, names)
    cells = {name: [_cell(value) for value in values] for name, values in zip(names, columns.values(), strict=True)}
    lengths = {len(column) for column in cells.values()}
    if len(lengths) > 1:
        raise UserError(f"{where}: columns differ in length ({', '.join(map(str, sorted(lengths)))})")
    length = lengths.pop() if lengths else 0
    if length == 0:
        raise UserError(f"{where} is empty: it needs at least one row")
    cells = _without_words(cells, form)
    table = Columns(where, cells, range(1, length + 1), "row")
    if form.decimal == "." and form.thousands is None:
        return table
    # Values that are numbers already are left as they are: their text has a point.
    written = _with_points(
        replace(
            table,
            cells={
                name: [cell if isinstance(value, str) else "" for cell, value in zip(cells[name], values, strict=True)]
                for name, values in zip(names, columns.values(), strict=True)
            },
        ),
        form,
        numeric,
    )
    return replace(
        table,
        cells={
            name: [text or cell for text, cell in zip(written.cells[name], cells[name], strict=True)] for name in names
        },
    )


def _cell(value: Any) -> str:
    if isinstance(value, str):  # also the word None, as in a CSV file
        return value.strip()
    text = str(int(value) if isinstance(value, bool) else value).strip()
    return "" if text in _ABSENT else text


def split_by_site(table: Columns, name: str) -> Iterator[tuple[str, Columns]]:
    """The sites of one table, in the order of their first rows.

    ``name``: the column that holds the name of each row's site. UserError if there is no such column, or a cell of it
    is empty.
    """
    rows: dict[str, list[int]] = {}
    for row, cell in enumerate(table.column(name)):
        if is_missing(cell):
            raise UserError(f"{table.locate(row)}, column '{name}': the name of the site is missing")
        rows.setdefault(canonical(cell), []).append(row)
    for site, chosen in rows.items():
        yield site, table.rows(chosen)


def canonical(cell: str) -> str:
    """A category or label in the form that sites compare: '1.0' becomes '1'."""
    whole = _WHOLE.fullmatch(cell)
    return whole.group(1) if whole else cell


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value: empty, ?, NA, N/A, #N/A, NaN or null, in any case."""
    return cell.strip().lower() in MISSING


def is_number(cell: str) -> bool:
    """Whether a cell is a number."""
    return number_of(cell) is not None


def number_of(cell: str) -> float | None:
    """The number that a cell is, as people write numbers: ASCII digits, a sign, a point and an exponent.

    Python's own words for numbers, such as 1_0 and inf, are none.

    Example:
        >>> number_of("1.5e3"), number_of("1_0"), number_of("inf")
        (1500.0, None, None)
    """
    if "_" in cell or not cell.isascii():
        return None
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
