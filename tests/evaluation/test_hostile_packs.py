"""Packs of a stranger: names of runs that would leave the experiment's folder, and links that lead out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedshift.errors import UserError
from fedshift.evaluation import packing, packs
from fedshift.evaluation.stored import SUMS, pack_of
from fedshift.files import LONGEST_NAME, below, names_a_folder, write_bytes
from tried import case

HONEST = {"method": "fedavg", "target": "D0", "seed": 0}
HOSTILE = [
    case("names in packs", "two dots", ".."),
    case("names in packs", "two folders up", "../.."),
    case("names in packs", "an absolute path", "/tmp/fedshift-stranger"),
    case("names in packs", "up from within a name", "a/../../b"),
    case("names in packs", "backslashes", "a\\..\\b"),
    case("names in packs", "a single dot", "."),
    case("names in packs", "a hidden folder", ".git"),
    case("names in packs", "a NUL", "a\x00b"),
    case("names in packs", "a line break", "a\nb"),
    case("names in packs", "text turned from right to left", "\u202eexe"),
    case("names in packs", "a name of 256 bytes", "n" * (LONGEST_NAME + 1)),
]


def packed_experiment(folder: Path) -> Path:
    """An experiment with one packed run."""
    run = folder / "demo" / "fedavg" / "D0" / "seed-0"
    write_bytes(run / "result.json", json.dumps(HONEST).encode())
    write_bytes(run / "experiment.yaml", b"rounds: 1")
    packing.pack(folder / "demo")
    return folder / "demo"


def with_cell(experiment: Path, column: str, value: Any) -> None:
    """Put a value into the one row of runs.parquet, as who can write a digest as well."""
    (experiment / SUMS).unlink()
    table = pq.read_table(experiment / packs.RUNS)
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, pa.array([value])), experiment / packs.RUNS)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.threat("packed_results")
@pytest.mark.parametrize("column", ["method", "target"])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_written_for_a_run_that_would_leave_its_experiment(tmp_path: Path, name: str, column: str) -> None:
    experiment = packed_experiment(tmp_path / "deep" / "runs")
    with_cell(experiment, column, name)
    before = everything_in(tmp_path)
    with pytest.raises(UserError):
        packing.unpack(experiment)
    with pytest.raises(UserError, match="malformed"):  # nor is it read under that name
        pack_of(experiment)
    assert everything_in(tmp_path) == before, "and the pack is still there"
    assert not Path("/tmp/fedshift-stranger").exists()


@pytest.mark.parametrize("seed", ["-9223372036854775809", "1", [0], 0.5, True, None])
@pytest.mark.case("names in packs", "seeds that are no whole numbers of 64 bits")
def test_a_seed_is_a_whole_number(tmp_path: Path, seed: Any) -> None:
    experiment = packed_experiment(tmp_path)
    with_cell(experiment, "seed", seed)
    with pytest.raises(UserError, match="seed"):
        packing.unpack(experiment)


@pytest.mark.threat("packed_results")
@pytest.mark.parametrize("linked", ["fedavg", "fedavg/D0", "fedavg/D0/seed-0"])
@pytest.mark.case("names in packs", "a folder of the pack that is a link to another place")
def test_a_link_that_leads_out_of_the_experiment_is_not_followed(tmp_path: Path, linked: str) -> None:
    experiment, elsewhere = packed_experiment(tmp_path / "runs"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (experiment / linked).parent.mkdir(parents=True, exist_ok=True)
    (experiment / linked).symlink_to(elsewhere)
    with pytest.raises(UserError, match="link"):
        packing.unpack(experiment)
    assert list(elsewhere.iterdir()) == []
    assert (experiment / packs.RUNS).exists()


def test_an_honest_pack_with_names_from_anywhere_is_unpacked(tmp_path: Path) -> None:
    for name in ("St. Anna", "Köln+süd", "病院", "a..b", "x" * LONGEST_NAME):
        assert names_a_folder(name)
        assert below(tmp_path, name) == tmp_path / name
    assert packing.unpack(packed_experiment(tmp_path)).moved == 1
