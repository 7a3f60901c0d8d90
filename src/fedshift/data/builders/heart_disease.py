"""Heart disease at four hospitals, thirteen measurements (UCI).

Source: Detrano et al., American Journal of Cardiology 1989.

Numbers are standardised with the fixed constants below, which are close to the moments of the Cleveland patients. So
the scale is the same whichever hospital is unseen.

A missing number becomes 0 after standardising, and a 0/1 column says that it was missing; every number but age has one.
It does not become a statistic of its hospital: a patient's encoding must not depend on who else is in the file. A
missing category gives zeros in all columns of that category. A cholesterol or blood pressure of 0 counts as missing
(all Swiss rows and some of Long Beach have it).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from fedshift.data.checks import check_dataset
from fedshift.data.codings import count_columns
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest
from fedshift.data.locate import require
from fedshift.data.table_files import Columns, read_table, split_by_site
from fedshift.data.tables import CategoricalColumn, NumericColumn, TableEncoding, encode, numbers
from fedshift.errors import UserError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg",
    "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num",
)  # fmt: skip
ENCODING = TableEncoding(
    numeric=(
        NumericColumn(name="age", mean=54, std=9, can_be_missing=False),
        NumericColumn(name="trestbps", mean=132, std=18, can_be_missing=True, missing_values=(0.0,)),
        NumericColumn(name="chol", mean=247, std=52, can_be_missing=True, missing_values=(0.0,)),
        NumericColumn(name="thalach", mean=150, std=23, can_be_missing=True),
        NumericColumn(name="oldpeak", mean=1.0, std=1.2, can_be_missing=True),
        NumericColumn(name="ca", mean=0.7, std=0.9, can_be_missing=True),
    ),
    categorical=(
        CategoricalColumn(name="sex", categories=("0", "1")),
        CategoricalColumn(name="cp", categories=("1", "2", "3", "4")),
        CategoricalColumn(name="fbs", categories=("0", "1")),
        CategoricalColumn(name="restecg", categories=("0", "1", "2")),
        CategoricalColumn(name="exang", categories=("0", "1")),
        CategoricalColumn(name="slope", categories=("1", "2", "3")),
        CategoricalColumn(name="thal", categories=("3", "6", "7")),
    ),
)
_CANDIDATES = (
    "heart_disease_uci/heart_disease_uci.csv",
    "heart_disease_uci.csv",
    "heart_disease_uci/processed.cleveland.data",
    "heart_disease/processed.cleveland.data",
    "heart+disease/processed.cleveland.data",
    "processed.cleveland.data",
)
_SHA256 = {
    "heart_disease_uci.csv": "3d66ee2bfe5190f3df24afbc8d13936184eee133b3d23876c68aed7b89350043",
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_ADDRESS = "https://archive.ics.uci.edu/static/public/45/heart+disease.zip"
_HOW = (
    "Call fedshift datasets heart_disease --fetch, or get processed.cleveland.data, processed.hungarian.data, "
    "processed.switzerland.data and processed.va.data from the UCI Machine Learning Repository (Heart Disease) and put "
    "them into heart_disease_uci below FEDSHIFT_DATA"
)


class HeartDisease(DataSource):
    """Patients with and without a coronary artery narrowed by more than half, at four hospitals."""

    name: Literal["heart_disease"] = "heart_disease"

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="UCI Heart Disease, four hospitals",
            source="Detrano et al., Am. J. Cardiology 1989; Janosi, Steinbrunn, Pfisterer, Detrano, UCI 1988",
            licence="CC BY 4.0",
            how_to_get=_HOW,
            layout=", ".join(_CANDIDATES),
            sha256={f"heart_disease_uci/{name}": digest for name, digest in _SHA256.items()},
            downloads={_ADDRESS: tuple(f"heart_disease_uci/processed.{hospital}.data" for hospital in HOSPITALS)},
            counts={"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200},
            notes="Label: num > 0. Missing numbers: 0 after standardising, plus a 0/1 column that says so; missing "
            "categories: all zeros; chol = 0 and trestbps = 0 count as missing. Fixed scale constants.",
        )

    def build(self) -> DataSet:
        """Four domains of float features (n, 30); classes healthy and disease."""
        path = require("UCI Heart Disease", _CANDIDATES, _HOW)
        tables = (
            _from_csv(path) if path.suffix == ".csv" else {name: _from_data(path.parent, name) for name in HOSPITALS}
        )
        domains, columns = {}, {}
        numeric = [column.name for column in ENCODING.numeric]
        categorical = [column.name for column in ENCODING.categorical]
        codes = {column.name: column.missing_values for column in ENCODING.numeric}
        for name, table in tables.items():
            narrowing = numbers(table, "num")
            if np.isnan(narrowing).any():
                raise UserError(f"{table.path}: '{name}' has a row without num, the diagnosis: get the file again")
            domains[name] = Domain(name, encode(table, ENCODING), (narrowing > 0).astype(np.int64))
            columns[name] = count_columns(table.without_codes(codes), numeric, categorical)
        classes = ("healthy", "disease")
        return check_dataset(
            DataSet(self.name, domains, classes, ENCODING.preprocessing(), self.manifest(), columns=columns)
        )


def _from_csv(path: Path) -> Mapping[str, Columns]:
    result = dict(split_by_site(read_table(path), "hospital"))
    lacking = [name for name in HOSPITALS if name not in result]
    if lacking:
        raise UserError(f"data file {path} has no patient of '{lacking[0]}': get it again. {_HOW}")
    return {name: result[name] for name in HOSPITALS}


def _from_data(folder: Path, name: str) -> Columns:
    """Read a file as published by UCI: fourteen cells a line, no header, ``?`` for missing."""
    path = folder / f"processed.{name}.data"
    try:
        rows = [line.strip().split(",") for line in path.read_text(encoding="latin-1").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"data file {path} does not exist. {_HOW}") from error
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != len(COLUMNS)), None)
    if wrong is not None or not rows:
        raise UserError(f"data file {path}, line {wrong or 1}: expected {len(COLUMNS)} cells: get it again")
    cells = {column: [row[index] for row in rows] for index, column in enumerate(COLUMNS)}
    return Columns(str(path), cells, range(1, len(rows) + 1))
