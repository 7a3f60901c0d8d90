"""More targets than a terminal has columns: the average and the worst few stay, files keep all."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from fedshift.report.collect import collect
from fedshift.report.page import write_page
from fedshift.report.report import report_of, whole_report
from fedshift.report.table import MOST_COLUMNS, with_worst_columns
from fedshift.report.table_formats import as_csv, markdown
from fedshift.text import join_names

TARGETS = 40
"""Accuracies 50, 51, … 89: their mean is 69.5."""


@pytest.fixture
def folder(write_part: Callable[..., Path], tmp_path: Path) -> Path:
    for number in range(TARGETS):
        write_part("fedavg", f"t{number:02}", 0, 50.0 + number)
        write_part("fedprox", f"t{number:02}", 0, 50.0 + number)
    return tmp_path / "runs" / "exp"


@pytest.mark.slow
def test_the_worst_few_have_a_column_and_files_keep_all(folder: Path) -> None:
    lines = markdown(report_of(collect(folder)).table).splitlines()
    assert lines[0] == "| method | t00 | t01 | t02 | t03 | t04 | average |"
    assert lines[2].split("|")[-2].strip().strip("*") == f"{fmean(range(50, 90)):.2f}"
    assert "The 5 worst of 40 targets have a column; files in CSV and JSON have all." in lines
    assert all(len(line) < 600 for line in lines)
    rows = list(csv.DictReader(io.StringIO(as_csv(report_of(collect(folder)).table))))
    assert len({row["target"] for row in rows}) == TARGETS + 1
    page = write_page(folder, whole_report(collect(folder))).read_text(encoding="utf-8")
    grids = re.findall(r"<thead>.*?</thead>", page, re.DOTALL)
    assert grids
    assert max(grid.count("<th") for grid in grids) < MOST_COLUMNS


def test_few_targets_are_as_they_were_and_long_lists_end(write_part: Callable[..., Path], tmp_path: Path) -> None:
    for number in range(MOST_COLUMNS):
        write_part("fedavg", f"t{number:02}", 0, 50.0 + number)
    table = report_of(collect(tmp_path / "runs" / "exp")).table
    assert with_worst_columns(table) is table
    assert join_names([]) == ""
    assert join_names(["a", "b", "c"], most=2) == "a, b and 1 more"
