"""Fifty malformed data and experiment files: one line each, exit code 2, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import experiment, features

GOOD = "who,age,sex,num\n1,40,f,0\n2,50,m,1\n3,,f,2\n4,70,m,0\n"
TABLE = {"name": "table", "positive": "num > 0", "numeric": ["age"], "categorical": ["sex"]}
REST = {key: value for key, value in experiment({}).items() if key != "data"}
LABELLED = {"positive": None, "label": "num"}


def table(**changes: Any) -> dict[str, Any]:
    """Fields of a table; None leaves one out."""
    fields = {**TABLE, "sites": {"a": "a.csv", "b": "b.csv"}, **changes}
    return {name: value for name, value in fields.items() if value is not None}


def one_file(**changes: Any) -> dict[str, Any]:
    return table(sites=None, **{"file": "b.csv", "site_column": "sex", "categorical": [], **changes})


def arrays(**b: Any) -> Callable[[Path], dict[str, Any]]:
    def made(folder: Path) -> dict[str, Any]:
        np.savez(folder / "a.npz", **features(1))
        np.savez(folder / "b.npz", **{**features(2), **b})
        return {"name": "arrays", "sites": {"a": "a.npz", "b": "b.npz"}}

    return made


def words(text: str) -> str:
    """An experiment file as text, with a valid table in it."""
    return text.replace("DATA", json.dumps(table()))


FILES: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("UTF-16", GOOD.encode("utf-16"), {}, "UTF-16"),
    ("a workbook", b"PK\x03\x04\xff\xfe\x00\x00", {}, "b.csv"),
    ("Latin letters", "who,age,sex,num\n1,40,é,0\n".encode("latin-1"), {}, "UTF-8"),
    ("nothing", "", {}, "empty"),
    ("names only", "who,age,sex,num\n", {}, "empty"),
    ("a short row", GOOD + "5,30\n", {}, "line 6"),
    ("a long row", GOOD + "5,30,f,1,1\n", {}, "line 6"),
    ("a name twice", GOOD.replace("who", "age"), {}, "'age'"),
    ("no such column", GOOD.replace("age", "years"), {}, "'age'"),
    ("no label column", GOOD.replace("num", "ill"), {}, "'num'"),
    ("no id column", GOOD, {"id": "patient"}, "'patient'"),
    ("a word for a number", GOOD.replace("40", "forty"), {}, "'forty'"),
    ("infinity", GOOD.replace("40", "inf"), {}, "line 2"),
    ("a decimal comma", GOOD.replace("40", '"40,5"'), {}, "data.decimal"),
    ("a missing label", GOOD.replace("f,2", "f,"), {}, "line 4"),
    ("a word for a label", GOOD.replace("f,2", "f,ill"), {}, "'ill'"),
    ("labels that differ", GOOD.replace("f,2", "f,3"), LABELLED, "differ"),
    ("a label without class", GOOD, {**LABELLED, "labels": {"0": "well", "1": "ill"}}, "data.labels"),
    ("yes without quotes", GOOD, {**LABELLED, "labels": {"0": True}}, "quotes"),
    ("a column without values", GOOD, {"missing_values": {"age": [40, 50, 70]}}, "no value"),
    ("no row left", "who,age,sex,num\n1,,f,0\n", {"impute": "drop"}, "no row"),
    ("no such category", GOOD, {"impute": {"sex": "x"}}, "'x'"),
    ("a fill that is no number", GOOD, {"impute": {"age": "old"}}, "impute"),
    ("a fill for another column", GOOD, {"impute": {"height": 1}}, "'height'"),
    ("a code for another column", GOOD, {"missing_values": {"height": 0}}, "'height'"),
    ("no condition", GOOD, {"positive": "num"}, "num > 0"),
    ("a condition on a word", GOOD, {"positive": "num > zero"}, "'zero'"),
    ("label and condition", GOOD, {"label": "num"}, "either label"),
    ("neither", GOOD, {"positive": None}, "either label"),
    ("columns for named files", GOOD, {"columns": ["a"]}, "header: none"),
    ("too few names", GOOD, {"header": "none", "columns": ["age", "sex", "num"]}, "data.columns has 3"),
    ("a header that is a number", GOOD, {"header": 1}, "data.header"),
    ("no file", GOOD, {"sites": {"a": "a.csv", "b": "c.csv"}}, "c.csv"),
    ("a folder", GOOD, {"sites": {"a": "a.csv", "b": "."}}, "folder"),
    ("two files for a site", GOOD, {"sites": {"a": "a.csv", "b": ["a.csv", "b.csv"]}}, "data.sites"),
    ("no site", GOOD, {"sites": {}}, "data.sites"),
    ("sites and file", GOOD, {"file": "b.csv"}, "either sites"),
    ("no such way to impute", GOOD, {"impute": "guess"}, "data.impute"),
    ("no such field", GOOD, {"numerics": ["age"]}, "'numeric'"),
    ("a column twice", GOOD, {"categorical": ["age"]}, "'age'"),
    ("not Parquet", GOOD, {"sites": {"a": "a.csv", "b": "b.parquet"}}, "b.parquet"),
]
SECTIONS: list[tuple[str, Any, str]] = [
    ("no column of sites", one_file(site_column=None), "site_column"),
    ("another column of sites", one_file(site_column="clinic"), "'clinic'"),
    ("the column of sites as a feature", one_file(categorical=["sex"]), "'sex' names the site"),
    ("a row without a site", one_file(site_column="age", numeric=["who"]), "line 4"),
    ("no name", {"sites": {"a": "a.csv"}}, "data.name"),
    ("a file that is not there", {"name": "mine.py:Sites"}, "mine.py"),
    ("NaN", arrays(x=np.full((30, 5), np.nan, dtype=np.float32)), "b.npz"),
    ("half classes", arrays(y=np.full(30, 0.5)), "whole numbers"),
    ("other columns", arrays(x=np.zeros((30, 4), dtype=np.float32)), "shape"),
    ("fewer labels", arrays(y=np.zeros(3, dtype=np.int64)), "30 samples"),
    ("a key twice", "data: DATA\nmodel: linear\nmethods: [fedavg]\nmodel: mlp\n", "line 4"),
    ("a key twice in a section", "data: DATA\nmodel: linear\nmethods: [fedavg]\ntraining:\n  lr: 1\n  lr: 2\n", "'lr'"),
    ("a tab", "data: DATA\nmodel: linear\nmethods:\n\t- fedavg\n", "line 4"),
]
assert len(FILES) + len(SECTIONS) >= 50


def refused(cli: Cli, folder: Path, file: Path) -> str:
    before = sorted(folder.iterdir())
    line = cli("run", file, "--runs", folder / "runs").error()
    assert sorted(folder.iterdir()) == before
    return line


@pytest.mark.parametrize(("name", "text", "changes", "word"), FILES, ids=[case[0] for case in FILES])
def test_a_malformed_table(
    cli: Cli, tmp_path: Path, name: str, text: str | bytes, changes: dict[str, Any], word: str
) -> None:
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps({**REST, "data": table(**changes)}))
    assert word in refused(cli, tmp_path, file)


@pytest.mark.parametrize(("name", "section", "word"), SECTIONS, ids=[case[0] for case in SECTIONS])
def test_another_malformed_file(cli: Cli, tmp_path: Path, name: str, section: Any, word: str) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text(GOOD)
    file = tmp_path / "e.yaml"
    if callable(section):
        section = section(tmp_path)
    file.write_text(words(section) if isinstance(section, str) else json.dumps({**REST, "data": section}))
    assert word in refused(cli, tmp_path, file)
