"""Data set `table`: the agreed encoding against pooled arithmetic, and one line for every mistake."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedshift.data.builders.own_tables import Table
from fedshift.data.domain import DataSet, Preprocessing
from fedshift.data.tables import encode_rows, moments
from fedshift.errors import UserError

A = "age,stage,ill\n40,I,no\n50,II,yes\n60,I,yes\n"
B = "ill;stage;age\nyes;III;70\nno;?;NA\n"


def built(folder: Path, a: str = A, b: str = B, **options: object) -> DataSet:
    (folder / "a.csv").write_text(a, encoding="utf-8")
    (folder / "b.csv").write_text(b, encoding="utf-8")
    fields = {"label": "ill", "numeric": ["age"], "categorical": ["stage"], **options}
    return Table.model_validate({"sites": {"a": folder / "a.csv", "b": folder / "b.csv"}, **fields}).build()


def test_one_encoding_by_hand(tmp_path: Path) -> None:
    data = built(tmp_path)
    assert data.classes == ("no", "yes")
    mean, std = 55.0, float(np.std([40, 50, 60, 70]))
    a, b = data.domains["a"].inputs, data.domains["b"].inputs
    # age, age is missing, stage I, II, III
    assert np.allclose(
        a, [[(40 - mean) / std, 0, 1, 0, 0], [(50 - mean) / std, 0, 0, 1, 0], [(60 - mean) / std, 0, 1, 0, 0]]
    )
    assert np.allclose(b, [[(70 - mean) / std, 0, 0, 0, 1], [0, 1, 0, 0, 0]])
    assert data.domains["b"].labels.tolist() == [1, 0]
    assert data.preprocessing.kind == "table"
    data = built(tmp_path, statistics_from=["a"])
    b = data.domains["b"].inputs
    std = float(np.std([40, 50, 60]))
    assert np.allclose(b, [[20 / std, 0, 0], [0, 0, 0]])  # stage III was never seen at a


def test_prediction_encodes_the_same(tmp_path: Path) -> None:
    data = built(tmp_path)
    saved = Preprocessing.model_validate_json(data.preprocessing.model_dump_json())
    assert np.array_equal(encode_rows(saved, tmp_path / "b.csv")[1], data.domains["b"].inputs)
    (tmp_path / "new.csv").write_text("age,stage\n55,IX\n")
    assert encode_rows(saved, tmp_path / "new.csv")[1].tolist() == [[0, 0, 0, 0, 0]]
    with pytest.raises(UserError, match="the model reads image inputs"):
        encode_rows(Preprocessing(kind="image"), tmp_path / "new.csv")
    one_site(tmp_path)
    saved = asked(**age(missing_values=[40.0], can_be_missing=True))
    # age, age is missing, stage I, II, III
    assert encode_rows(saved, tmp_path / "a.csv")[1].tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 1, 0]]


def test_cells_are_read_as_they_are_meant(tmp_path: Path) -> None:
    a, b = "age,stage,ill\n1,1.0,0\n2,10,1\n", "age,stage,ill\n3,1,1.0\n4,2,0.0\n"
    data = built(tmp_path, a, b)
    assert data.classes == ("0", "1")
    assert data.preprocessing.table["categorical"] == [{"name": "stage", "categories": ["1", "2", "10"]}]
    mean, std = moments(3, np.array([0.3]), np.array([0.03]))
    assert mean[0] == pytest.approx(0.1)
    assert std[0] == 1
    a = '\ufeffage,stage,ill\r\n40,"I, early",no\r\n\r\n50,II,yes\r\n'
    data = built(tmp_path, a, a)
    assert len(data.domains["a"]) == 2
    assert data.preprocessing.table["categorical"][0]["categories"] == ["I, early", "II"]
    data = built(tmp_path, b="age,stage,ill\n1,I,no\n")
    assert any("site 'b' has no sample of class yes" in line for line in data.warnings)


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ("", r"b\.csv is empty"),
        ("age,stage,ill\n", r"b\.csv is empty"),
        ("agee,stage,ill\n1,I,no\n2,I,yes\n", r"b\.csv has no column 'age'; did you mean 'agee'"),
        ("age,stage\n1,I\n", r"b\.csv has no column 'ill'"),
        ("age,stage,ill\n1,I,no\nold,I,yes\n", r"b\.csv, line 3, column 'age': 'old' is not a number"),
        ("age,stage,ill\n1,I,no\ninf,I,yes\n", r"line 3, column 'age': 'inf' is not a number"),
        ("age,stage,ill\n1,I,no\n2,I,\n", r"line 3, column 'ill': the label is missing"),
        ("age,stage,ill\n1,I,\n2,I,\n", r"b\.csv, column 'ill': no row has a label.*fedshift predict"),
        ("age,stage,ill\n1,I,no\n2,I\n", r"line 3: 2 cells, but the first line has 3 columns"),
        ("age,age,ill\n1,I,no\n", r"column 'age' appears more than once"),
        ("age,stage,ill\n1,I,no\n2,I,ja\n", r"'a' has \[no, yes\]; 'b' has \[ja, no\]"),
    ],
)
def test_one_line_for_each_mistake(tmp_path: Path, b: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        built(tmp_path, b=b)
    assert "\n" not in str(caught.value)


def test_other_mistakes(tmp_path: Path) -> None:
    nothing = "age,stage,ill\nNA,I,no\n,II,yes\n"
    with pytest.raises(UserError, match="column 'age' has no value at any site"):
        built(tmp_path, nothing, nothing)
    with pytest.raises(UserError, match=r"nowhere\.csv does not exist"):
        Table(sites={"a": tmp_path / "nowhere.csv"}, label="y", numeric=("x",)).build()
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-16"):
        Table(sites={"a": tmp_path / "binary.csv"}, label="y", numeric=("x",)).build()
    with pytest.raises(ValidationError, match="listed more than once"):
        built(tmp_path, numeric=["age", "ill"])
    with pytest.raises(ValidationError, match="at least one column"):
        built(tmp_path, numeric=[], categorical=[])


# An encoding that came in a request -----------------------------------------------------------------------------------

SECRET = "patient,age,stage,note,ill\nJane Doe,40,I,hiv,no\nJohn Roe,60,II,none,yes\n"
ENCODING: dict[str, Any] = {
    "numeric": [{"name": "age", "mean": 50.0, "std": 10.0, "can_be_missing": False}],
    "categorical": [{"name": "stage", "categories": ["I", "II", "III"]}],
}


def one_site(folder: Path, text: str = SECRET, **options: Any) -> Table:
    (folder / "a.csv").write_text(text, encoding="utf-8")
    fields = {"label": "ill", "numeric": ["age"], "categorical": ["stage"], **options}
    return Table.model_validate({"sites": {"a": folder / "a.csv"}, **fields})


def asked(**changes: Any) -> Preprocessing:
    return Preprocessing(kind="table", table={**deepcopy(ENCODING), **changes})


def age(**changes: Any) -> dict[str, Any]:
    return {"numeric": [{**ENCODING["numeric"][0], **changes}]}


def test_encodings_that_came_in_a_request(tmp_path: Path) -> None:
    data = one_site(tmp_path).encode(asked(), ("no", "yes"))
    assert np.asarray(data.domains["a"].inputs).tolist() == [[-1, 1, 0, 0], [1, 0, 1, 0]]
    data = one_site(tmp_path).encode(asked(**age(std=1e-320, mean=40.0)), ("no", "yes"))
    features = np.asarray(data.domains["a"].inputs)
    assert np.isfinite(features).all()
    assert np.abs(features[:, 0]).max() == np.finfo(np.float32).max
    for preprocessing in (Preprocessing(kind="table"), Preprocessing(kind="features", table=ENCODING)):
        with pytest.raises(UserError, match="the encoding of the table"):
            one_site(tmp_path).encode(preprocessing, ("no", "yes"))
    with pytest.raises(UserError, match="column 'age' has values that are too large"):
        one_site(tmp_path, SECRET.replace(",40,", ",1e300,")).build()
    one_site(tmp_path)
    with pytest.raises(UserError, match="is damaged"):
        encode_rows(asked(**age(std=0.0)), tmp_path / "a.csv")


@pytest.mark.parametrize(
    "changes",
    [
        age(name="patient"),
        {"numeric": [*ENCODING["numeric"], {**ENCODING["numeric"][0], "name": "patient"}]},
        {"numeric": [*ENCODING["numeric"], {**ENCODING["numeric"][0], "name": "ag"}]},
        {"numeric": []},
        {"numeric": 2 * ENCODING["numeric"]},
        {"categorical": [{"name": "note", "categories": ["hiv"]}]},
        {"categorical": [*ENCODING["categorical"], {"name": "note", "categories": ["hiv"]}]},
        {"categorical": []},
        age(std=0.0),
        age(std=-1.0),
        age(std=float("nan")),
        age(std=float("inf")),
        age(mean=float("nan")),
        age(mean=float("-inf")),
        age(missing_values=[40.0], can_be_missing=True),
        {"numeric": None},
    ],
    ids=str,
)
def test_a_request_reads_only_the_columns_that_a_site_lists(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        one_site(tmp_path).encode(asked(**changes), ("no", "yes"))
    told = f"{caught.value} {caught.value.public}"
    assert "\n" not in told
    assert not [word for word in ("Jane", "patient", "note", "hiv", "row") if word in told]


@pytest.mark.parametrize(
    ("text", "full", "public"),
    [
        ("age,stage,ill\n1,I,no\nJane Doe,I,yes\n", "'Jane Doe' is not", "line 3, column 'age': the cell is not"),
        ("agee,stage,ill\n1,I,no\n2,I,yes\n", "did you mean 'agee'", "lacks the column 'age'"),
        ("age,patient,patient\n1,I,no\n", "column 'patient' appears", "a column appears more than once"),
        ("age,stage,ill\n1,I,no\n2,I,\n", "line 3, column 'ill': the label", "line 3: the label is missing"),
        ("age,stage,ill\n1,I,\n2,I,\n", "column 'ill': no row has a label", "csv: no row has a label"),
    ],
)  # fmt: skip
def test_the_owner_is_told_the_cell_and_others_are_not(text: str, full: str, public: str, tmp_path: Path) -> None:
    table = one_site(tmp_path, text)
    with pytest.raises(UserError, match=full) as here:
        table.build()
    assert public in here.value.public
    with pytest.raises(UserError) as there:
        table.encode(asked(), ("no", "yes"))
    assert str(there.value) == there.value.public == here.value.public
    assert not [word for word in ("Jane", "agee", "patient", "'ill'") if word in str(there.value)]


@pytest.mark.case("few rows", "a site's file lacks its label: the label's name there is not told")
def test_labels_that_lack_or_are_unknown_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column 'ill'") as here:
        one_site(tmp_path, "age,stage,sick\n1,I,no\n2,I,yes\n").build()
    assert "lacks a column" in here.value.public
    assert not [word for word in ("'ill'", "sick") if word in here.value.public]
    with pytest.raises(UserError, match="a label is none of the federation's classes") as caught:
        one_site(tmp_path, SECRET.replace(",yes", ",Jane Doe")).encode(asked(), ("no", "yes"))
    assert "Jane" not in str(caught.value)
