"""Tables as hospitals export them: letters, separators, numbers, Excel files, and sites that write them differently."""

from __future__ import annotations

import io
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedshift.data.builders.own_tables import Table
from fedshift.data.table_files import PLAIN, Columns, SiteFormat, TableFormat, number_of, read_table
from fedshift.data.tables import encode_rows, encoding_of, numbers, rows_of
from fedshift.errors import UserError
from tried import case, cases

openpyxl = pytest.importorskip("openpyxl")
pandas = pytest.importorskip("pandas")


def read(folder: Path, text: str | bytes, numeric: tuple[str, ...] = (), **form: Any) -> Columns:
    path = folder / "a.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(path, TableFormat(**form), numeric)


def cells(table: Columns) -> dict[str, list[str]]:
    return {name: list(column) for name, column in table.cells.items()}


WANTED = {"age": ["61.3", "54.6"], "sex": ["m", "f"]}


@pytest.mark.parametrize(
    ("text", "form"),
    [
        case("CSV separators", "Excel's sep=;", "sep=;\nage;sex\n61.3;m\n54.6;f\n", {}),
        case("CSV separators", 'Excel\'s "sep=|" in quotes, CRLF', '"sep=|"\r\nage|sex\r\n61.3|m\r\n54.6|f\r\n', {}),
        case(
            "CSV separators", "byte order mark before sep= with a tab", "\ufeffsep=\t\nage\tsex\n61.3\tm\n54.6\tf\n", {}
        ),
        case("CSV separators", "separator: |", "age|sex\n61.3|m\n54.6|f\n", {"separator": "|"}),
        case("CSV separators", "separator: tab", "age\tsex\n61.3\tm\n54.6\tf\n", {"separator": "tab"}),
        case("CSV separators", "separator: a blank", "age sex\n61.3 m\n54.6 f\n", {"separator": " "}),
        case(
            "CSV separators",
            "a separator that is set stands above a sep= line",
            "sep=,\nage;sex\n61.3;m\n54.6;f\n",
            {"separator": ";"},
        ),
        case("CSV numbers", "decimal commas", "age;sex\n61,3;m\n54,6;f\n", {"decimal": ","}),
        case("CSV letters", "UTF-16", "age;sex\n61.3;m\n54.6;f\n".encode("utf-16"), {"encoding": "utf-16"}),
    ],
)
def test_separators_and_letters(tmp_path: Path, text: str | bytes, form: dict[str, Any]) -> None:
    assert cells(read(tmp_path, text, ("age",), **form)) == WANTED


@pytest.mark.case("CSV separators", "commas inside a quoted name of a column, semicolons between cells")
@pytest.mark.case("CSV separators", "lines are counted with the sep= line")
@pytest.mark.case("CSV letters", "Windows' letters, cp1252")
@pytest.mark.case("CSV numbers", "names of patients and categories keep their points where numbers are grouped")
@pytest.mark.case("CSV letters", "Excel's #N/A is missing")
def test_cells_of_csv(tmp_path: Path) -> None:
    name = "age, years, at admission, rounded"
    assert cells(read(tmp_path, f'"{name}";bp\n61.3;128\n')) == {name: ["61.3"], "bp": ["128"]}
    # A second quote is a letter of the cell; a quote inside a cell without quotes is one, too.
    assert cells(read(tmp_path, '"a ""x, y, z""";b\n1;2\n')) == {'a "x, y, z"': ["1"], "b": ["2"]}
    assert list(read(tmp_path, '5" disc,b\n1,2\n').cells) == ['5" disc', "b"]
    # A name of two lines.
    assert list(read(tmp_path, '"age\n, years, , ,";b\n1;2\n').cells) == ["age\n, years, , ,", "b"]
    with pytest.raises(UserError, match=r"line 4: 1 cells, but the first line has 2 columns"):
        read(tmp_path, "sep=;\nage;sex\n1;m\n2\n")
    text = "age,ward\n61,Ärzte – Süd\n".encode("cp1252")
    assert cells(read(tmp_path, text, encoding="cp1252"))["ward"] == ["Ärzte – Süd"]
    with pytest.raises(UserError, match=r"UTF-8 \(line 2\): set the data\.encoding .* cp1252"):
        read(tmp_path, text)
    table = read(tmp_path, "x,code\n1,1.234\n", ("x",), thousands=" ", decimal=".")
    assert cells(table)["code"] == ["1.234"]
    table = read(tmp_path, 'x;code\n"1.000";1.234\n', ("x",), thousands=".", decimal=",")
    assert cells(table) == {"x": ["1000"], "code": ["1.234"]}
    assert np.isnan(numbers(read(tmp_path, "x,y\n#N/A,1\n"), "x")).all()
    assert TableFormat() == PLAIN


@pytest.mark.parametrize(
    "encoding",
    [
        case("CSV letters", "an encoding that expands bytes", "zlib"),
        case("CSV letters", "an encoding of text to text", "rot13"),
        case("CSV letters", "an encoding of Python's source", "unicode_escape"),
        case("CSV letters", "an unknown encoding", "latin-one"),
        case("CSV letters", "an encoding with a null byte", "a\0b"),
    ],
)
def test_what_is_no_encoding_of_files(encoding: str) -> None:
    with pytest.raises(ValidationError, match="there is no encoding"):
        TableFormat(encoding=encoding)


@pytest.mark.parametrize("separator", ["", ";;", "a", '"', "\n"])
@pytest.mark.case("CSV separators", "what cannot separate cells")
def test_what_cannot_separate(separator: str) -> None:
    with pytest.raises(ValidationError, match="cannot separate cells"):
        TableFormat(separator=separator)


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        case("CSV numbers", "1_0, which Python reads as 10", "1_0"),
        case("CSV numbers", "digits of other scripts", "１２"),
        case("CSV numbers", "Infinity", "Infinity"),
        case("CSV numbers", "an exponent too large", "1e999"),
        case("CSV numbers", "hexadecimal", "0x10"),
        case("CSV numbers", "a bound", "<18"),
    ],
)
def test_what_is_no_number(tmp_path: Path, cell: str) -> None:
    assert number_of(cell) is None
    with pytest.raises(UserError, match=r"line 3, column 'x': .* is not a number"):
        numbers(read(tmp_path, f"x,y\n1,a\n{cell},b\n"), "x")


@cases(
    "CSV numbers",
    "cell form value",
    {
        "2.330,0": ("2.330,0", {"decimal": ",", "thousands": "."}, 2330.0),
        "1.061 as a thousand": ("1.061", {"decimal": ",", "thousands": "."}, 1061.0),
        "1,061 as a thousand": ("1,061", {"thousands": ","}, 1061.0),
        "two groups and a sign": ("-1,234,567.5", {"thousands": ","}, -1234567.5),
        "a narrow blank between groups": ("1\u202f234,5", {"decimal": ",", "thousands": " "}, 1234.5),
        "Swiss thousands": ("1’234.5", {"thousands": "'"}, 1234.5),
        "a decimal comma beside thousands": ("2,5", {"decimal": ",", "thousands": "."}, 2.5),
        "three decimals after a comma": ("2,500", {"decimal": ",", "thousands": "."}, 2.5),
        "no group": ("999", {"thousands": ","}, 999.0),
    },
)
def test_numbers_in_groups(tmp_path: Path, cell: str, form: dict[str, Any], value: float) -> None:
    table = read(tmp_path, f'x;y\n"{cell}";a\n', ("x",), separator=";", **form)
    assert numbers(table, "x").tolist() == [value]


@pytest.mark.parametrize(
    ("cell", "form"),
    [
        case("CSV numbers", "1.5 where points group", "1.5", {"decimal": ",", "thousands": "."}),
        case("CSV numbers", "1,06 where commas group", "1,06", {"thousands": ","}),
        case("CSV numbers", "groups of two digits", "12,34,567", {"thousands": ","}),
        case("CSV numbers", "1.061 beside decimal commas is not divided by 1,000", "1.061", {"decimal": ","}),
    ],
)
def test_a_number_that_can_be_read_in_two_ways(tmp_path: Path, cell: str, form: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"line 3, column 'x'") as caught:
        read(tmp_path, f'x;y\n1;a\n"{cell}";b\n', ("x",), separator=";", **form)
    assert cell not in caught.value.public


@pytest.mark.parametrize(
    ("cell", "advice"),
    [
        case("CSV numbers", "advice on 1,061", "1,061", "data.thousands: ','"),
        case("CSV numbers", "advice on 2.330,0", "2.330,0", "data.thousands: '.' and data.decimal: ','"),
        case("CSV numbers", "advice on 1 061", "1 061", 'data.thousands: " "'),
        case("CSV numbers", "advice on 1'061", "1'061", 'data.thousands: "\'"'),
        case("CSV numbers", "advice on 61,3", "61,3", "data.decimal: ','"),
    ],
)
def test_advice_makes_no_thousandth(tmp_path: Path, cell: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        numbers(read(tmp_path, f'x;y\n"{cell}";a\n', separator=";"), "x")
    assert advice in str(caught.value)
    assert ("data.decimal" in str(caught.value)) == ("data.decimal" in advice)


# Excel ----------------------------------------------------------------------------------------------------------------


def book(path: Path, rows: list[list[Any]], title: str = "Sheet", more: tuple[str, ...] = ()) -> Path:
    made = openpyxl.Workbook()
    made.active.title = title
    for row in rows:
        made.active.append(row)
    for name in more:
        made.create_sheet(name)
    made.save(path)
    return path


ROWS: list[list[Any]] = [["age", "sex", "outcome"], [61.3, "m", 1], [None, "f", 0], ["NA", "f", 1]]


@pytest.mark.case("Excel files", "numbers, text and empty cells, as in the same CSV file")
@pytest.mark.case("Excel files", "several sheets, none named")
@pytest.mark.case("Excel files", "numbers are not read as grouped text: 1.061 stays below 2")
@pytest.mark.case("Excel files", "a formula whose value nobody computed is no missing cell")
@pytest.mark.case("Excel files", "a date in a column of numbers")
@pytest.mark.case("Excel files", "empty columns and rows around the table, and a column without a name")
def test_excel_files_and_their_sheets(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,sex,outcome\n61.3,m,1\n,f,0\nNA,f,1\n")
    path = book(tmp_path / "a.xlsx", ROWS)
    assert cells(read_table(path)) == cells(read_table(tmp_path / "a.csv"))
    assert read_table(path).locate(2) == f"{path}, row 4"
    pandas.read_csv(tmp_path / "a.csv", keep_default_na=False).to_excel(tmp_path / "b.xlsx", index=False)
    assert cells(read_table(tmp_path / "b.xlsx"))["sex"] == ["m", "f", "f"]
    path = book(tmp_path / "a.xlsx", ROWS, "Patients", ("Legend",))
    with pytest.raises(UserError, match=r"has 2 sheets \('Patients', 'Legend'\): name one of them") as caught:
        read_table(path)
    assert "Patients" not in caught.value.public
    assert len(read_table(path, TableFormat(sheet="Patients"))) == 3
    with pytest.raises(UserError, match="no sheet 'Patient'; did you mean 'Patients'"):
        read_table(path, TableFormat(sheet="Patient"))
    with pytest.raises(UserError, match="is empty"):
        read_table(path, TableFormat(sheet="Legend"))
    path = book(tmp_path / "a.xlsx", [["x"], [1.061], ["2.330,5"]])
    table = read_table(path, TableFormat(decimal=",", thousands="."), ("x",))
    assert numbers(table, "x").tolist() == [1.061, 2330.5]
    path = book(tmp_path / "a.xlsx", [["x", "y"], [1, "a"], ["=A2+1", "b"]])
    with pytest.raises(UserError, match=r"row 3, column 1: a formula without a stored value"):
        read_table(path)
    path = book(tmp_path / "a.xlsx", [["x"], [pandas.Timestamp("2024-01-02")]])
    with pytest.raises(UserError, match=r"row 2, column 'x'.*write dates as days"):
        numbers(read_table(path), "x")
    path = book(tmp_path / "a.xlsx", [[None] * 5, ["x", "y", None, ""], [1, 2, None, None], [None] * 3, [3, 4]])
    assert cells(read_table(path)) == {"x": ["1", "3"], "y": ["2", "4"]}
    with pytest.raises(UserError, match="column 2 has cells and no name"):
        read_table(book(tmp_path / "b.xlsx", [["x", None], [1, 2]]))


@pytest.mark.parametrize(
    "content",
    [
        case("Excel files", "an empty file", b""),
        case("Excel files", "a file that is cut off", b"PK\x03\x04 and no more"),
        case("Excel files", "the older format .xls", b"\xd0\xcf\x11\xe0" + bytes(600)),
        case("Excel files", "a CSV file called .xlsx", b"age,sex\n1,m\n"),
    ],
)
def test_what_is_no_excel_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.xlsx").write_bytes(content)
    with pytest.raises(UserError, match="is damaged or not an Excel file") as caught:
        read_table(tmp_path / "a.xlsx")
    assert "\n" not in str(caught.value)


def with_sheet(path: Path, xml: bytes) -> Path:
    """An Excel file with this XML as its only sheet."""
    whole = io.BytesIO()
    openpyxl.Workbook().save(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, xml if name == "xl/worksheets/sheet1.xml" else old.read(name))
    return path


SHEET = b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">%s<sheetData>%s</sheetData></worksheet>'


@pytest.mark.slow
@pytest.mark.case("Excel files", "17 billion cells declared, of which two are there")
@pytest.mark.case("Excel files", "entities that expand a billion times")
@pytest.mark.case("Excel files", "a zip bomb: 200 KB that expand to 200 MB")
def test_excel_files_that_declare_or_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b'<row r="1"><c r="A1" t="inlineStr"><is><t>x</t></is></c></row>'
    rows += b'<row r="900000"><c r="A900000"><v>7</v></c></row>'
    path = with_sheet(tmp_path / "a.xlsx", SHEET % (b'<dimension ref="A1:XFD1048576"/>', rows))
    began = time.process_time()
    assert cells(read_table(path)) == {"x": ["7"]}
    assert time.process_time() - began < 5
    entities = b"".join(b'<!ENTITY e%d "%s">' % (n, b"&e%d;" % (n - 1) * 10) for n in range(1, 10))
    xml = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY e0 "ha">' + entities + b"]>"
    text = b'<row r="1"><c r="A1" t="inlineStr"><is><t>&e9;</t></is></c></row>'
    with pytest.raises(UserError, match="is damaged or not an Excel file"):
        read_table(with_sheet(tmp_path / "a.xlsx", xml + SHEET % (b"", text)))
    monkeypatch.setenv("FEDSHIFT_LARGEST_DATA", "0.05")
    path = with_sheet(tmp_path / "a.xlsx", b" " * (200 << 20))
    assert path.stat().st_size < 1 << 20
    began = time.process_time()
    with pytest.raises(UserError, match=r"declares 200\.\d MiB of data"):
        read_table(path)
    assert time.process_time() - began < 2


@cases(
    "Excel files",
    "rows",
    {
        "a row beyond those of Excel": b'<row r="99999999999"><c r="A99999999999"><v>7</v></c></row>',
        "a column beyond those of Excel": b'<row r="2"><c r="ZZZZZZ2"><v>7</v></c></row>',
        "a text that is not there": b'<row r="2"><c r="A2" t="s"><v>999</v></c></row>',
        "XML that is cut off": b'<row r="2"><c r="A2"><v>7</v>',
    },
)
def test_a_sheet_that_is_made_up(tmp_path: Path, rows: bytes) -> None:
    path = with_sheet(tmp_path / "a.xlsx", SHEET % (b"", b'<row r="1"><c r="A1"><v>1</v></c></row>' + rows))
    began = time.process_time()
    with pytest.raises(UserError, match="is damaged or not an Excel file"):
        read_table(path)
    assert time.process_time() - began < 5


# Sites that write differently -----------------------------------------------------------------------------------------

NORTH = "age,chol,sex,outcome\n40,200,f,no\n50,220,m,yes\n60,0,f,yes\n70,240,m,no\n"
"""Cholesterol in mg/dl, where 0 means missing."""
SOUTH = "Alter;Chol;sex;Diagnose\n41,5;2,5;f;no\n51,5;9,99;m;yes\n61,5;5;f;yes\n"
"""In mmol/l, where 9.99 means missing; decimal commas, other names, Windows' letters."""


def two_sites(folder: Path, **options: Any) -> Table:
    (folder / "north.csv").write_text(NORTH)
    (folder / "south.csv").write_bytes(SOUTH.encode("cp1252"))
    south = {
        "decimal": ",",
        "encoding": "cp1252",
        "rename": {"Alter": "age", "Chol": "chol", "Diagnose": "outcome"},
        "units": {"chol": 40.0},
        "missing_values": {"chol": 9.99},
    }
    fields: dict[str, Any] = {
        "sites": {name: folder / f"{name}.csv" for name in ("north", "south")},
        "label": "outcome",
        "numeric": ["age", "chol"],
        "categorical": ["sex"],
        "missing_values": {"chol": 0},
        "per_site": {"south": south},
    }
    return Table.model_validate({**fields, **options})


COMMON = {
    "north": NORTH.replace(",0,", ",,"),
    "south": "age,chol,sex,outcome\n41.5,100.0,f,no\n51.5,,m,yes\n61.5,200.0,f,yes\n",
}


@pytest.mark.case("exports per site", "names, units, decimal commas, letters and codes for missing of one site")
@pytest.mark.case("exports per site", "data frames are read by the same options as files")
@pytest.mark.case("exports per site", "the same options in a SITE.yaml, where one site is alone")
def test_each_site_writes_in_its_own_way(tmp_path: Path) -> None:
    data = two_sites(tmp_path).build()
    for name, text in COMMON.items():
        (tmp_path / f"common-{name}.csv").write_text(text)
    plain = two_sites(
        tmp_path, sites={name: tmp_path / f"common-{name}.csv" for name in COMMON}, per_site={}, missing_values={}
    ).build()
    assert data.classes == plain.classes
    for name in COMMON:
        assert np.array_equal(data.domains[name].inputs, plain.domains[name].inputs)
        assert data.domains[name].labels.tolist() == plain.domains[name].labels.tolist()
    # The mean that is agreed on is of mg/dl: (200 + 220 + 240 + 100 + 200) / 5.
    assert encoding_of(data.preprocessing).numeric[1].mean == pytest.approx(192)
    table = two_sites(tmp_path)
    frames = {
        "north": pandas.read_csv(tmp_path / "north.csv"),
        "south": pandas.read_csv(tmp_path / "south.csv", sep=";", dtype=str, encoding="cp1252"),
    }
    from_frames = two_sites(tmp_path, sites=frames).build()
    files = table.build()
    for name in frames:
        assert np.array_equal(from_frames.domains[name].inputs, files.domains[name].inputs)
    whole = two_sites(tmp_path)
    alone = Table.model_validate(
        {
            **whole.per_site["south"].model_dump(exclude_unset=True),
            "sites": {"south": tmp_path / "south.csv"},
            "label": "outcome",
            "numeric": ["age", "chol"],
            "categorical": ["sex"],
        }
    )
    given = alone.gives()
    assert given["total"][1] == pytest.approx(300)
    assert given["count"] == [3, 2]
    agreed = two_sites(tmp_path, missing_values={}, per_site={"south": whole.per_site["south"]}).build()
    encoding = encoding_of(agreed.preprocessing).with_choices({}, {}, None, None).preprocessing()
    there = alone.encode(encoding.model_copy(update={"shape": agreed.preprocessing.shape}), agreed.classes)
    assert np.array_equal(there.domains["south"].inputs, agreed.domains["south"].inputs)


@pytest.mark.case("exports per site", "new rows written as one site writes them are predicted by the same options")
@pytest.mark.case("exports per site", "units of all training files are those of new files, too; a frame likewise")
@pytest.mark.case("exports per site", "new rows in the words of the training files")
def test_rows_to_predict_are_written_as_those_that_trained(tmp_path: Path) -> None:
    table = two_sites(tmp_path)
    data = table.build()
    encoding = encoding_of(data.preprocessing)
    own = SiteFormat.model_validate(table.per_site["south"].model_dump(exclude_unset=True))
    rows = rows_of(tmp_path / "south.csv", encoding, own)
    assert np.array_equal(encode_rows(data.preprocessing, rows)[1], data.domains["south"].inputs)
    # Without them the file lacks a column, and says which.
    with pytest.raises(UserError, match="no column 'age'"):
        encode_rows(data.preprocessing, tmp_path / "south.csv")
    # A frame with the same cells.
    frame = pandas.read_csv(tmp_path / "south.csv", sep=";", dtype=str)

    def from_frame(form: TableFormat) -> Columns:
        from fedshift.data.table_files import from_columns

        return from_columns("X", {name: frame[name].tolist() for name in frame}, form, ("age", "chol"))

    assert np.array_equal(
        encode_rows(data.preprocessing, rows_of(from_frame, encoding, own))[1], data.domains["south"].inputs
    )
    data = two_sites(tmp_path, per_site={}, sites={"north": tmp_path / "north.csv"}, units={"age": 12.0, "chol": 0.5},
                     missing_values={"chol": 240}).build()  # fmt: skip
    assert encoding_of(data.preprocessing).numeric[0].mean == 12 * 55
    assert np.array_equal(encode_rows(data.preprocessing, tmp_path / "north.csv")[1], data.domains["north"].inputs)
    # The code 240 is of the file's own unit: the last row has no cholesterol; 480 is a value like any other.
    assert data.domains["north"].inputs[3, 2] == 1
    (tmp_path / "new.csv").write_text("age,chol,sex\n40,480,f\n")
    assert encode_rows(data.preprocessing, tmp_path / "new.csv")[1][0, 2] == 0
    words: dict[str, Any] = {"spellings": {"sex": {"f": "woman", "m": "man"}}, "missing_words": ["none"]}
    data = two_sites(tmp_path, per_site={}, sites={"north": tmp_path / "north.csv"}, **words).build()
    (tmp_path / "new.csv").write_text("age,chol,sex\n40,200,f\n50,None,woman\n")
    (tmp_path / "same.csv").write_text("age,chol,sex\n40,200,woman\n50,,f\n")
    new, same = (encode_rows(data.preprocessing, tmp_path / f"{name}.csv")[1] for name in ("new", "same"))
    assert np.array_equal(new, same)


@pytest.mark.case("exports per site", "other words for categories, classes and missing cells, of one site")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_words_of_one_site_become_those_of_all(tmp_path: Path, suffix: str) -> None:
    other = SOUTH.replace("9,99", "UNKNOWN").replace(";f;", ";Frau;").replace(";m;", ";1;").replace(";yes", ";ja")
    (tmp_path / "words.csv").write_bytes(other.replace("61,5", "-").encode("cp1252"))
    (tmp_path / "again.csv").write_bytes(SOUTH.replace("61,5", "").encode("cp1252"))
    south = two_sites(tmp_path).per_site["south"].model_dump(exclude_unset=True)
    words = {"spellings": {"sex": {"Frau": "f", 1: "m"}, "outcome": {"ja": "yes"}}, "missing_words": ["unknown", "-"]}
    if suffix == "parquet":
        frame = pandas.read_csv(tmp_path / "words.csv", sep=";", encoding="cp1252", dtype=str)
        frame.to_parquet(tmp_path / "words.parquet")
    files = {"north": tmp_path / "north.csv", "south": tmp_path / f"words.{suffix}"}
    data = two_sites(tmp_path, sites=files, per_site={"south": {**south, **words}}).build()
    plain = two_sites(tmp_path, sites={**files, "south": tmp_path / "again.csv"}).build()
    assert data.classes == plain.classes
    for name, domain in data.domains.items():
        assert np.array_equal(domain.inputs, plain.domains[name].inputs)
        assert domain.labels.tolist() == plain.domains[name].labels.tolist()


@cases(
    "exports per site",
    "options message",
    {
        "a spelling of a number": ({"spellings": {"age": {"old": "90"}}}, "'age' is listed under numeric"),
        "a word that YAML reads as true": ({"spellings": {"sex": {True: "m"}}}, "in quotes"),
        "an unknown site": ({"per_site": {"suoth": {"decimal": ","}}}, "no site 'suoth'; did you mean 'south'"),
        "a unit of a class": ({"units": {"outcome": 2}}, "'outcome' is no column of numbers"),
        "a factor of 0": ({"units": {"chol": 0}}, "greater than 0"),
        "a factor that is no number": ({"units": {"chol": float("nan")}}, "finite"),
        "a code in a column of categories": (
            {"per_site": {"south": {"missing_values": {"sex": 1}}}},
            "'sex' is not listed under numeric",
        ),
        "points for decimals and thousands": ({"thousands": "."}, "both '.'"),
        "a site's decimal point where all group by points": (
            {"thousands": ".", "decimal": ",", "per_site": {"south": {"decimal": "."}}},
            "both '.'",
        ),
        "two columns with one new name": ({"rename": {"a": "age", "b": "age"}}, "two columns become 'age'"),
        "an option that is not of files": ({"per_site": {"south": {"label": "Diagnose"}}}, "per_site"),
    },
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        two_sites(tmp_path, **options)


@pytest.mark.case("exports per site", "a new name for a column that is not there, or that another one has")
@pytest.mark.case("exports per site", "one file of all sites: units and codes by site, nothing else")
def test_names_and_units_of_one_site_or_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"south\.csv: rename: there is no column 'Altr'; did you mean 'Alter'"):
        two_sites(tmp_path, per_site={"south": {"rename": {"Altr": "age"}}}).build()
    with pytest.raises(UserError, match=r"rename: two columns would be called 'sex'"):
        two_sites(tmp_path, per_site={"south": {"rename": {"Alter": "sex"}}}).build()
    # Names can be swapped, and a name for all sites is no fault at one that has the new name already.
    swapped = read(tmp_path, "a,b\n1,2\n").rename_columns({"a": "b", "b": "a"})
    assert cells(swapped) == {"b": ["1"], "a": ["2"]}
    assert cells(read(tmp_path, "a,b\n1,2\n").rename_columns({"A": "a"})) == {"a": ["1"], "b": ["2"]}
    (tmp_path / "all.csv").write_text("site,x,y\na,1,n\na,2,p\nb,1000,n\nb,-1,p\n")
    fields: dict[str, Any] = {"file": tmp_path / "all.csv", "site_column": "site", "label": "y", "numeric": ["x"]}
    own = {"b": {"units": {"x": 0.001}, "missing_values": {"x": -1}}}
    encoding = encoding_of(Table.model_validate({**fields, "per_site": own}).build().preprocessing)
    assert encoding.numeric[0].mean == pytest.approx(4 / 3)
    with pytest.raises(UserError, match="no site 'c'"):
        Table.model_validate({**fields, "per_site": {"c": {"units": {"x": 2}}}}).build()
    with pytest.raises(ValidationError, match="written in one way: set decimal for all"):
        Table.model_validate({**fields, "per_site": {"b": {"decimal": ","}}})


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.case("tables of many columns", "30,000 columns in one line")
def test_many_columns_take_seconds(tmp_path: Path) -> None:
    width = 30_000
    names = [f"gene{number}" for number in range(width)]
    for site in ("a", "b"):
        rows = "\n".join(",".join([*["1"] * width, label]) for label in ("x", "y"))
        (tmp_path / f"{site}.csv").write_text(",".join([*names, "label"]) + "\n" + rows + "\n")
    began = time.process_time()
    table = Table.model_validate(
        {"sites": {site: tmp_path / f"{site}.csv" for site in ("a", "b")}, "label": "label", "numeric": names}
    )
    assert table.build().input_shape == (width,)
    assert time.process_time() - began < 10  # 2 s of a core; looking up each name in a list took 25 s


@pytest.mark.case("tables of many columns", "a repeated name among 60,000")
@pytest.mark.case("tables of many columns", "a CSV file with more cells than fit")
def test_names_and_cells_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.process_time()
    with pytest.raises(UserError, match="'gene7' appears more than once"):
        read(tmp_path, ",".join([*(f"gene{number}" for number in range(60_000)), "gene7"]) + "\n1\n")
    assert time.process_time() - began < 5
    monkeypatch.setenv("FEDSHIFT_LARGEST_DATA", "0.001")
    with pytest.raises(UserError, match="declares"):
        read(tmp_path, "a" + "," * 100_000 + "\n")
