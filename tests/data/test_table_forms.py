"""Data set `table`: how files are written, what labels mean, what becomes of missing cells, and names of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from fedshift.data.builders.own_tables import Table
from fedshift.data.domain import DataSet
from fedshift.data.tables import encode_rows
from fedshift.errors import UserError

NORTH = "who,age,sex,num\np1,40,f,0\np2,50,m,2\np3,,f,1\n"
SOUTH = "who,age,sex,num\np4,60,,0\np5,0,m,4\n"


def table(folder: Path, north: str = NORTH, south: str = SOUTH, **options: Any) -> Table:
    (folder / "north.csv").write_text(north, encoding="utf-8")
    (folder / "south.csv").write_text(south, encoding="utf-8")
    fields = {"positive": "num > 0", "numeric": ["age"], "categorical": ["sex"], **options}
    return Table.model_validate({"sites": {name: folder / f"{name}.csv" for name in ("north", "south")}, **fields})


def same(one: DataSet, other: DataSet) -> bool:
    """Whether two data sets have the same classes, sites, inputs and labels."""
    return (
        one.classes == other.classes
        and list(one.domains) == list(other.domains)
        and all(
            np.array_equal(domain.inputs, other.domains[name].inputs)
            and np.array_equal(domain.labels, other.domains[name].labels)
            for name, domain in one.domains.items()
        )
    )


@pytest.mark.parametrize(
    ("options", "classes", "labels"),
    [
        ({}, ("negative", "positive"), [0, 1, 1]),
        ({"positive": "num >= 2"}, ("negative", "positive"), [0, 1, 0]),
        ({"positive": "num < 1"}, ("negative", "positive"), [1, 0, 0]),
        ({"positive": "num = 2.0"}, ("negative", "positive"), [0, 1, 0]),
        ({"positive": "num != 2"}, ("negative", "positive"), [1, 0, 1]),
        (
            {"positive": None, "label": "num", "labels": {0: "well", 1: "ill", "2": "ill", 4.0: "ill"}},
            ("ill", "well"),
            [1, 0, 0],
        ),
    ],
)
def test_labels_are_mapped(
    tmp_path: Path, options: dict[str, Any], classes: tuple[str, ...], labels: list[int]
) -> None:
    data = table(tmp_path, **options).build()
    assert data.classes == classes
    assert data.domains["north"].labels.tolist() == labels


def test_a_file_without_names_with_semicolons_and_decimal_commas_is_the_same_table(tmp_path: Path) -> None:
    plain = table(tmp_path, NORTH.replace("40", "40.5")).build()
    written = {name: (tmp_path / f"{name}.csv").read_text().partition("\n")[2] for name in ("north", "south")}
    other = {name: text.replace(",", ";").replace("40.5", "40,5") for name, text in written.items()}
    columns = ["who", "age", "sex", "num"]
    named = table(tmp_path, **other, header="none", columns=columns, decimal=",").build()
    numbered = {"positive": "4 > 0", "numeric": ["2"], "categorical": ["3"]}
    assert same(named, plain)
    assert same(table(tmp_path, **other, header="none", decimal=",", **numbered).build(), plain)
    # For prediction a file is written in the same way, or has a line of names and need not hold the label.
    _, features = encode_rows(named.preprocessing, tmp_path / "north.csv")
    assert np.array_equal(features, plain.domains["north"].inputs)
    (tmp_path / "new.csv").write_text("sex;age\nf;40,5\n")
    assert np.array_equal(encode_rows(named.preprocessing, tmp_path / "new.csv")[1], features[:1])


def one_file(north: str, south: str) -> str:
    """Both tables in one, with a column of the sites' names at its end."""
    lines = [f"{line},{name}" for name, text in (("north", north), ("south", south)) for line in text.split()[1:]]
    return "\n".join([f"{north.split()[0]},clinic", *lines]) + "\n"


def test_one_file_and_parquet_are_the_same_table(tmp_path: Path) -> None:
    plain = table(tmp_path).build()
    (tmp_path / "all.csv").write_text(one_file(NORTH, SOUTH))
    whole = table(tmp_path, sites=None, file=tmp_path / "all.csv", site_column="clinic")
    assert same(whole.build(), plain)
    # An unseen site gives nothing to the encoding, as with a file for each.
    assert same(whole.without("south").build(), table(tmp_path).without("south").build())
    assert not same(whole.without("south").build(), plain)
    plain = table(tmp_path).build()
    for name, columns in (
        ("north", {"age": [40.0, 50.0, None], "sex": ["f", "m", "f"], "num": [0, 2, 1]}),
        ("south", {"age": [60.0, 0.0], "sex": [None, "m"], "num": [0, 4]}),
    ):
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    sites = {name: tmp_path / f"{name}.parquet" for name in ("north", "south")}
    assert same(table(tmp_path, sites=sites).build(), plain)
    assert np.array_equal(
        encode_rows(plain.preprocessing, sites["south"])[1],
        plain.domains["south"].inputs,
    )
    (tmp_path / "north.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"north\.parquet is damaged"):
        table(tmp_path, sites=sites).build()


def test_missing_cells_and_names_of_rows(tmp_path: Path) -> None:
    # age, age is missing, sex f, m. With 0 as a code, the ages are 40, 50 and 60.
    std = float(np.std([40, 50, 60]))
    coded = table(tmp_path, missing_values={"age": 0}).build()
    assert np.allclose(coded.domains["south"].inputs, [[10 / std, 0, 0, 0], [0, 1, 0, 1]])
    chosen = table(tmp_path, missing_values={"age": 0}, impute={"age": 45, "sex": "f"}).build()
    expected = [[10 / std, 0, 1, 0], [-5 / std, 1, 0, 1]]
    assert np.allclose(chosen.domains["south"].inputs, expected)
    assert np.allclose(encode_rows(chosen.preprocessing, tmp_path / "south.csv")[1], expected)
    dropped = table(tmp_path, missing_values={"age": 0}, impute="drop", id="who")
    with pytest.raises(UserError, match="no row of site 'south'"):
        dropped.build()
    kept = table(tmp_path, impute="drop", id="who").build()
    assert kept.domains["north"].ids == ("p1", "p2")
    assert kept.domains["south"].labels.tolist() == [1]
    data = table(tmp_path, id="who").build()
    assert [domain.ids for domain in data.domains.values()] == [("p1", "p2", "p3"), ("p4", "p5")]
    assert encode_rows(data.preprocessing, tmp_path / "south.csv")[0] == ["p4", "p5"]
    (tmp_path / "nameless.csv").write_text("age,sex\n3,f\n")
    assert encode_rows(data.preprocessing, tmp_path / "nameless.csv")[0] == ["row 1"]
    assert table(tmp_path).build().domains["north"].ids is None


def test_what_sites_cannot_agree_on_is_refused_in_a_deployment(tmp_path: Path) -> None:
    one = table(tmp_path)
    alone = {"sites": {"north": tmp_path / "north.csv"}}
    with pytest.raises(UserError, match="cannot agree on"):
        one.model_copy(update={**alone, "impute": {"age": 1.0}}).gives()
    # Which numbers mean missing is each site's own affair: only sums of the others leave. NORTH has the ages 40, 50.
    given = one.model_copy(update={**alone, "missing_values": {"age": (40.0,)}}).gives()
    assert given["count"] == [1]
    assert given["total"] == [50.0]
    # Nor does an encoding from elsewhere choose what a missing cell is read as, or which column is shown.
    local = table(tmp_path, impute={"age": 45}, id="who").build()
    with pytest.raises(UserError, match="not one that sites can agree on"):
        one.encode(local.preprocessing, local.classes)
    agreed = one.build()
    assert same(one.encode(agreed.preprocessing, agreed.classes), agreed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": None}, "either sites"),
        ({"file": "all.csv"}, "either sites"),
        ({"sites": None, "file": "all.csv"}, "site_column go together"),
        ({"label": "num"}, "either label"),
        ({"positive": None}, "either label"),
        ({"positive": "num"}, "no condition"),
        ({"positive": "num > many"}, "'many' is not a number"),
        ({"labels": {"0": "well"}}, "labels needs label"),
        ({"positive": None, "label": "num", "labels": {True: "ill"}}, "in quotes"),
        ({"columns": ["a"]}, "set header: none"),
        ({"missing_values": {"sex": 0}}, "'sex' is not listed under numeric"),
        ({"impute": {"num": 0}}, "'num' is not listed"),
        ({"impute": {"age": "old"}}, "'old' is not a number"),
    ],
)
def test_a_section_that_contradicts_itself(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        table(tmp_path, **options)
