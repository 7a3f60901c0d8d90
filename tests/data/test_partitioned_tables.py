"""Folders of partitioned Parquet, by pyarrow and by pandas: partitions are columns, and one may be the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

from fedshift.data.builders.own_tables import Table
from fedshift.data.table_files import read_table
from fedshift.errors import UserError

CELLS: dict[str, list[Any]] = {
    "hospital": ["north", "south", "north", "east", "south", "east"],
    "year": [2024, 2024, 2025, 2025, 2025, 2024],
    "age": [50, 61, None, 48, 70, 33],
    "sex": ["F", "M", "M", "F", None, "F"],
    "outcome": ["ill", "well", "well", "ill", "ill", "well"],
}


def written(folder: Path, by: list[str]) -> Path:
    known = pa.table(CELLS).schema
    parts = dataset.partitioning(pa.schema([(name, known.field(name).type) for name in by]), flavor="hive")
    dataset.write_dataset(pa.table(CELLS), folder, format="parquet", partitioning=parts)
    return folder


def rows(cells: dict[str, list[Any]]) -> list[tuple[str, ...]]:
    return sorted(tuple("" if cell is None else str(cell) for cell in row) for row in zip(*cells.values(), strict=True))


@pytest.mark.parametrize("by", [["hospital"], ["hospital", "year"], ["year", "hospital"]])
def test_partitions_are_columns(by: list[str], tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "exports", by))
    assert rows({name: list(table.column(name)) for name in CELLS}) == rows(CELLS)


def test_the_site_is_a_partition(tmp_path: Path) -> None:
    data = Table(
        file=written(tmp_path / "exports", ["hospital", "year"]),
        site_column="hospital",
        label="outcome",
        numeric=("age", "year"),
        categorical=("sex",),
    ).build()
    assert {site: len(domain) for site, domain in data.domains.items()} == {"north": 2, "south": 2, "east": 2}
    one = Table(
        sites={"a": tmp_path / "exports" / "hospital=north", "b": tmp_path / "exports" / "hospital=east"},
        label="outcome",
        numeric=("age", "year"),
    ).build()
    assert [len(domain) for domain in one.domains.values()] == [2, 2]


def test_folders_that_pandas_wrote(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(CELLS).to_parquet(tmp_path / "exports", partition_cols=["hospital"])
    (tmp_path / "exports" / "_SUCCESS").write_text("")
    table = read_table(tmp_path / "exports")
    assert sorted(table.column("hospital")) == sorted(CELLS["hospital"])


@pytest.mark.case("a table", "a folder of Parquet files of which one has another column")
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    whole = written(tmp_path / "exports", ["hospital"])
    more = pa.table({**CELLS, "more": [1] * 6}).drop_columns(["hospital"])
    parquet.write_table(more, whole / "hospital=north" / "b.parquet")
    with pytest.raises(UserError, match="have other columns"):
        read_table(whole)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no Parquet files"):
        read_table(tmp_path / "empty")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "north.csv").write_text("age\n1\n")
    with pytest.raises(UserError, match="cannot be read as partitioned Parquet") as error:
        read_table(tmp_path / "text")
    assert "\n" not in str(error.value)
    lost = written(tmp_path / "lost", ["hospital"])
    (lost / "hospital=east").rename(lost / "hospital=__HIVE_DEFAULT_PARTITION__")
    with pytest.raises(UserError, match="the name of the site is missing"):
        Table(file=lost, site_column="hospital", label="outcome", numeric=("age",)).build()
