"""`fedshift check` of many sites: a few rows in place of hundreds, and every problem still has its name."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml
from calling import Cli

from fedshift.experiment.check import DomainCheck
from fedshift.report.check_words import FEW, domain_table, missing_cells_of, privacy_rows, unlike, without_labels
from fedshift.text import join_names

HOSPITALS = 60
SMALLEST, LACKING, CODED, EMPTY = 11, 7, 3, 9
"""Which hospital has fewest rows, no "yes", m and f for M and F, and 999 for missing."""


def hospitals(folder: Path) -> dict[str, str]:
    """Tables of so many hospitals, of which four are unlike the others."""
    draw, files = random.Random(0), {}
    for number in range(HOSPITALS):
        rows = 12 if number == SMALLEST else draw.randint(30, 60)
        lines = ["age,sex,lab,y"]
        for row in range(rows):
            sex = draw.choice("mf" if number == CODED else "MF")
            lab = "999" if number == EMPTY else "" if row == 0 else f"{draw.gauss(5, 1):.2f}"
            label = "no" if number == LACKING else ("no", "yes")[row % 2]
            lines.append(f"{draw.randint(20, 90)},{sex},{lab},{label}")
        files[f"h{number:02d}"] = str(folder / f"h{number:02d}.csv")
        Path(files[f"h{number:02d}"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


@pytest.mark.case("many sites", "check of 60 hospitals, of which four are unlike the others")
def test_check_of_many_sites_names_what_is_unlike(cli: Cli, tmp_path: Path) -> None:
    data = {"name": "table", "label": "y", "numeric": ["age", "lab"], "categorical": ["sex"]}
    experiment = {
        "name": "many",
        "data": {**data, "sites": hospitals(tmp_path)},
        "protocol": {"targets": ["h00"], "seeds": [0]},
        "model": {"name": "linear"},
        "training": {"rounds": 1},
        "methods": ["fedavg"],
        "device": "cpu",
    }
    file = tmp_path / "e.yaml"
    file.write_text(yaml.safe_dump(experiment), encoding="utf-8")
    result = cli("check", file, "--runs", tmp_path / "runs")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert len(lines) < FEW + 10
    assert max(map(len, lines)) < 700
    assert f"{HOSPITALS} domains" in result.out
    for what in (
        f"fewest samples, 12: h{SMALLEST:02d}",
        f"without samples of yes: h{LACKING:02d}",
        f"'m' at 'h{CODED:02d}'",
        f"999 in all of the rows of 'h{EMPTY:02d}'",
        f"{HOSPITALS - 1} of ",
    ):
        assert what in result.out, what


def domain(number: int, **changes: object) -> DomainCheck:
    given = {"samples": 30, "train": 20, "held_out": 10, "measured_as_target": 30, "missing": (), **changes}
    return DomainCheck(f"s{number}", **given)  # type: ignore[arg-type]


@pytest.mark.case("many sites", "a site that does not train, one that holds nothing out, classes that most lack")
def test_every_problem_has_a_name() -> None:
    domains = [domain(number, missing=("rare",) if number % 2 else ()) for number in range(100)]
    domains[4] = domain(4, train=0, held_out=0)
    domains[6] = domain(6, held_out=0)
    text = "\n".join(unlike(domains))
    assert "that do not train: s4" in text
    assert "that hold nothing out: s6" in text
    assert re.search(r"without samples of rare: s1, s3, .* and 30 more", text)
    assert [row[0] for row in domain_table(domains).rows] == ["fewest", "median", "most"]


def test_what_is_listed_of_few_and_many_sites() -> None:
    few = [domain(0, without_label=30), domain(1, without_label=4)]
    assert [line.partition(":")[0] for line in without_labels(few)] == ["s0", "s1"]
    first, second = without_labels([domain(number, without_label=30 if number % 2 else 4) for number in range(50)])
    assert first.startswith("850 samples without labels")
    assert second == "not measured, without any label: " + join_names([f"s{number}" for number in range(1, 50, 2)])
    assert [*without_labels([domain(number) for number in range(50)])] == []
    domains = [domain(number) for number in range(FEW)]
    assert len(domain_table(domains).rows) == FEW
    assert [*unlike(domains)] == []
    assert missing_cells_of("lab", {"a": (1, 5), "b": (0, 5)}) == "missing in column lab: a 1 of 5"
    assert privacy_rows({"a": (1.0, 2.0)}) == [["a", "1.00", "2.00"]]
    spent = {f"s{number}": (number / 100, number / 50) for number in range(100)}
    assert privacy_rows(spent) == [["100 sites, least (s0)", "0.00", "0.00"], ["most (s99)", "0.99", "1.98"]]
    cells = {f"s{number}": (number % 3, 10) for number in range(90)} | {"empty": (10, 10)}
    said = missing_cells_of("lab", cells)
    assert said.startswith("missing in column lab: 100 of 910 at 61 of 91 sites; most at empty 10 of 10, ")
    assert said.endswith("and 41 more")
