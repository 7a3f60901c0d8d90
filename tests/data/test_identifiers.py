"""No column that names rows becomes a category, and data frames are read by the rules of CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedshift.data.builders.own import data_section
from fedshift.data.builders.own_tables import Table
from fedshift.data.domain import DataSet
from fedshift.data.identifiers import names_rows, names_single_rows
from fedshift.data.registry import parse
from fedshift.data.site_differences import site_differences
from fedshift.errors import UserError
from tried import case, cases

pandas = pytest.importorskip("pandas")
ROWS = 40


def site(name: str, **columns: Any) -> Any:
    rng = np.random.default_rng(ord(name))
    x, z = rng.normal(size=(2, ROWS))
    return pandas.DataFrame({"x": x, "z": z, "g": rng.choice(["m", "f"], ROWS), **columns})


def built(frames: dict[str, Any], **options: Any) -> DataSet:
    labelled = {name: (frame, np.arange(len(frame)) % 2) for name, frame in frames.items()}
    return Table.model_validate(data_section(labelled, **options)).build()


def names_at(name: str) -> list[str]:
    return [f"Doe {name}{number}" for number in range(ROWS)]


COLUMNS = {
    "names": names_at,
    "two visits each": lambda name: [f"Doe {name}{row // 2}" for row in range(ROWS)],
    "dates as text": lambda name: [f"2024-01-{row % 28 + 1:02}T{row:02}:{name}" for row in range(ROWS)],
    "free text, often the same": lambda name: ["no findings"] * 25 + [f"sees {name}{row}" for row in range(15)],
    "some cells empty": lambda name: [*names_at(name)[:-10], *[""] * 10],
    "postcodes": lambda name: [f"{ord(name)}{row:03}-{row}" for row in range(ROWS)],
    "pandas categories": lambda name: pandas.Categorical(names_at(name)),
}


@pytest.mark.parametrize(
    "kind",
    [
        case("identifiers", "a data frame's column of 80 names", "names"),
        case("identifiers", "two rows of each patient", "two visits each"),
        case("identifiers", "dates and times as text", "dates as text"),
        case("identifiers", "findings, 25 of 40 equal", "free text, often the same"),
        case("identifiers", "names with a quarter missing", "some cells empty"),
        case("identifiers", "post codes with a number", "postcodes"),
        case("identifiers", "names as a pandas Categorical", "pandas categories"),
    ],
)
def test_a_column_that_names_rows_is_no_category_of_a_frame(kind: str) -> None:
    frames = {name: site(name, who=COLUMNS[kind](name)) for name in "ab"}
    with pytest.raises(UserError, match=r"site 'a'.*'who' has \d+ different values in \d+ rows.*id") as caught:
        built(frames)
    line = str(caught.value) + caught.value.public
    assert "\n" not in line
    assert not any(str(value) in line for value in set(COLUMNS[kind]("a")) - {""})
    without = [frames["a"].drop(columns="who").columns.tolist()]
    assert built(frames, id="who").input_shape == built({n: f[without[0]] for n, f in frames.items()}).input_shape


def csv_of(folder: Path, ending: str = "csv", **columns: Any) -> dict[str, Any]:
    files = {}
    for name in "ab":
        frame = site(name, **{key: make(name) for key, make in columns.items()}, ill=np.arange(ROWS) % 2)
        files[name] = folder / f"{name}.{ending}"
        (frame.to_csv if ending == "csv" else frame.to_parquet)(files[name], index=False)
    return {"sites": files, "label": "ill", "numeric": ["x"]}


@pytest.mark.threat("rare_categories")
@cases(
    "identifiers",
    "ending make",
    {
        "names listed as categorical, CSV": ("csv", names_at),
        "names as categorical, Parquet": ("parquet", names_at),
        "numbers of patients listed as categorical": (
            "csv",
            lambda name: [10_000 + ord(name) * 100 + row for row in range(ROWS)],
        ),
    },
)
def test_a_listed_identifier_is_refused_unless_it_is_listed_twice(tmp_path: Path, ending: str, make: Any) -> None:
    fields = csv_of(tmp_path, ending, who=make)
    with pytest.raises(UserError, match=r"'who' has 40 different values in 40 rows"):
        Table.model_validate({**fields, "categorical": ["g", "who"]}).build()
    deliberate = Table.model_validate({**fields, "categorical": ["g", "who"], "many_categories": ["who"]}).build()
    assert deliberate.input_shape == (1 + 2 + 80,)
    with pytest.raises(ValidationError, match="many_categories: 'whom'"):
        Table.model_validate({**fields, "categorical": ["g"], "many_categories": ["whom"]})


def visits_of(name: str, each: int, patients: int) -> list[str]:
    return [f"patient {name}-{row // each}" for row in range(each * patients)]


@pytest.mark.parametrize(
    ("each", "patients"),
    [
        case("identifiers", "patients with three visits each", 3, 14),
        case("identifiers", "patients with four visits each", 4, 12),
        case("identifiers", "sixty patients with eight visits each", 8, 60),
        case("identifiers", "thirty patients of nine visits each", 9, 30),
    ],
)
def test_patients_with_some_visits_are_no_categories(tmp_path: Path, each: int, patients: int) -> None:
    """In a file and a frame; the values are shown neither in the refusal nor, where they may be told, in a warning."""
    rows = each * patients
    frames, files = {}, {}
    for name in "ab":
        x = np.random.default_rng(ord(name)).normal(size=rows)
        frames[name] = pandas.DataFrame({"x": x, "who": visits_of(name, each, patients)})
        files[name] = tmp_path / f"{name}.csv"
        frames[name].assign(ill=np.arange(rows) % 2).to_csv(files[name], index=False)
    fields = {"sites": files, "label": "ill", "numeric": ["x"], "categorical": ["who"]}
    for build in (lambda: built(frames), lambda: Table.model_validate(fields).build()):
        with pytest.raises(
            UserError, match=rf"'who' has ({patients}|{2 * patients}) different values.*id.*drop"
        ) as caught:
            build()
        assert "patient " not in str(caught.value) + caught.value.public
    told = Table.model_validate({**fields, "many_categories": ["who"]}).build()
    assert "patient " not in " ".join((*told.warnings, *site_differences(told)))


@pytest.mark.case("identifiers", "eight rows at each of five sites, one name each")
@pytest.mark.case("identifiers", "labels of one value per row: column, array of words")
def test_rows_of_all_sites_and_labels_that_name_rows(tmp_path: Path) -> None:
    frames = {name: site(name, who=names_at(name)).head(8) for name in "abcde"}
    with pytest.raises(UserError, match="all sites together: column 'who' has 40 different values in 40 rows"):
        built(frames)
    fields = csv_of(tmp_path, who=names_at) | {"label": "who"}
    with pytest.raises(UserError, match=r"'who' has 40 different values in 40 rows.*task: regression"):
        Table.model_validate(fields).build()
    x = np.zeros((ROWS, 2), dtype=np.float32)
    words = {name: (x, np.array(names_at(name))) for name in "ab"}
    with pytest.raises(UserError, match=r"labels has 40 different values in 40 rows") as caught:
        parse(data_section(words)).build()
    assert "Doe" not in str(caught.value)


@pytest.mark.case("identifiers", "what stays a category: few rows, ten wards, repeated codes")
def test_categories_stay_categories() -> None:
    assert not names_rows({str(number): 1 for number in range(10)})
    assert names_single_rows({f"patient {number}": 2 for number in range(40)})
    assert not names_single_rows({f"patient {number}": 3 for number in range(40)})
    assert not names_rows({f"ward {number}": 3 + number % 4 for number in range(30)})
    assert not names_rows({f"code {number}": 20 for number in range(300)})
    assert names_rows({str(number): 1 for number in range(11)})
    assert not names_rows({})


@pytest.mark.case("data frames", "a Categorical whose unused levels are names of patients")
@pytest.mark.case("data frames", "the word None as a class and as a category; None itself is missing")
@pytest.mark.case("data frames", "nullable integers with a missing cell; codes as text; numbers as pandas categories")
def test_columns_of_frames_are_read_by_their_values() -> None:
    levels = ["low", "high", *names_at("a")]
    frames = {name: site(name, s=pandas.Categorical(["low", "high"] * 20, categories=levels)) for name in "ab"}
    table = built(frames).preprocessing.table
    assert [one["categories"] for one in table["categorical"]] == [["f", "m"], ["high", "low"]]
    assert "Doe" not in str(table)
    frames = {name: (site(name, w=["None", "some"] * 20), np.array(["None", "ill"] * 20)) for name in "ab"}
    data = Table.model_validate(data_section(frames)).build()
    assert data.classes == ("None", "ill")
    assert data.preprocessing.table["categorical"][1]["categories"] == ["None", "some"]
    absent = built({name: site(name, w=pandas.Series([None, "some"] * 20, dtype=object)) for name in "ab"})
    assert absent.preprocessing.table["categorical"][1]["categories"] == ["some"]
    whole = pandas.array([1, None, *range(ROWS - 2)], dtype="Int64")
    mixed = pandas.Series([None, 2, *range(ROWS - 2)], dtype=object)
    columns = {"n": whole, "o": mixed, "code": ["1", "2"] * 20, "stage": pandas.Categorical([1, 2] * 20)}
    fields = data_section({name: (site(name, **columns), [0, 1] * 20) for name in "ab"})
    assert fields["numeric"] == ["x", "z", "n", "o"]
    assert fields["categorical"] == ["g", "code", "stage"]
    frame = site("a", months=np.linspace(1, 9, ROWS), died=np.arange(ROWS) % 2)
    section = data_section({"a": frame}, time="months", event="died", task="time_to_event")
    assert set(section["numeric"]) | set(section["categorical"]) == {"x", "z", "g"}


@cases(
    "data frames",
    "change message",
    {
        "one cell <18 among numbers": (
            {"x": ["<18" if row == 3 else float(row) for row in range(ROWS)]},
            r"site 'a', row 4, column 'x': '<18' is not a number",
        ),
        "one cell <18, all read as text by pandas": (
            {"x": ["<18" if row == 3 else str(row) for row in range(ROWS)]},
            r"site 'a', row 4, column 'x': '<18' is not a number",
        ),
        "a column of dates": (
            {"when": pandas.date_range("2024-01-01", periods=ROWS)},
            r"site 'a', row 1, column 'when': '2024-01-01 00:00:00' is not a number \(write dates as days",
        ),
        "a column of time spans": (
            {"when": pandas.to_timedelta(np.arange(ROWS), "D")},
            r"site 'a', row 1, column 'when': '0 days 00:00:00' is not a number",
        ),
        "one decimal comma among numbers": (
            {"x": ["1,5"] + [float(row) for row in range(ROWS - 1)]},
            r"site 'a', row 1, column 'x': '1,5' is not a number",
        ),
        "one infinite number": (
            {"x": [np.inf] + [1.0] * (ROWS - 1)},
            r"site 'a', row 1, column 'x': 'inf' is not a number",
        ),
    },
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_bad_cell_of_a_frame_is_named(change: dict[str, Any], message: str, everywhere: bool) -> None:
    other = change if everywhere or "when" in change else {}
    with pytest.raises(UserError, match=message):
        built({"a": site("a", **change), "b": site("b", **other)})


@pytest.mark.case("data frames", "a column that the first or the last site lacks")
@pytest.mark.parametrize("lacking", ["a", "b"])
def test_a_column_that_a_site_lacks_is_named(lacking: str) -> None:
    frames = {name: site(name) for name in "ab"}
    frames[lacking] = frames[lacking].drop(columns="z")
    with pytest.raises(UserError, match=rf"site '{lacking}' has no column 'z'"):
        built(frames)
    assert built(frames, numeric=["x"], categorical=["g"]).input_shape == (3,)
