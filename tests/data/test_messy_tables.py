"""Four hospitals' exports as they come: each message says what to write next, until a verdict stands."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift.errors import UserError

PLACES = {"north": (180, 0, 0.02), "south": (140, 4, 0.05), "east": (90, -4, 0.1), "west": (60, 8, 0.2)}
"""Patients, how much older than at north, and the share of cells that are missing."""


def patients(site: str) -> list[tuple[list[float | None], bool, bool]]:
    """Age, pressure and cholesterol in mmol/l, whether a man, and whether dead."""
    draws = random.Random(site)
    number, older, missing = PLACES[site]
    rows = []
    for _ in range(number):
        values = [draws.gauss(60 + older, 12), draws.gauss(130 + 2 * older, 18), draws.gauss(5.2 + older / 10, 1.1)]
        man = draws.random() < 0.5
        risk = 0.05 * (values[0] - 62) + 0.03 * (values[1] - 135) + 0.5 * (values[2] - 5.3) + (0.5 if man else -0.5)
        shown = [value if draws.random() > missing else None for value in values]
        rows.append((shown, man, risk + draws.gauss(0, 0.8) > 0.3))
    return rows


def number(value: float | None, digits: int, empty: str = "") -> str:
    return empty if value is None else f"{value:.{digits}f}"


def write_exports(folder: Path) -> None:
    """A plain file; semicolons, decimal commas and Windows' letters; a byte-order mark, other names and mg/dl; tabs."""
    lines = {site: [""] for site in PLACES}
    for (age, pressure, chol), man, dead in patients("north"):
        sex, outcome = "m" if man else "f", int(dead)
        lines["north"].append(f"{number(age, 0)},{number(pressure, 0)},{number(chol, 2)},{sex},{outcome}")
    for (age, pressure, chol), man, dead in patients("south"):
        cells = [number(value, 2).replace(".", ",") for value in (age, pressure, chol)]
        lines["south"].append(";".join([*cells, "male" if man else "female", "dead" if dead else "alive", "Straße"]))
    for (age, pressure, chol), man, dead in patients("east"):
        milligrams = None if chol is None else chol * 38.67
        cells = [number(age, 0, "NA"), number(pressure, 0, "n/a"), number(milligrams, 0, "?")]
        lines["east"].append(",".join(["M" if man else "F", *cells, str(int(dead))]))
    for (age, pressure, chol), man, dead in patients("west"):
        cells = [number(age, 0, "-"), number(pressure, 0, "-"), number(chol, 2, "-")]
        lines["west"].append("\t".join([*cells, "m" if man else "f", str(int(dead)), ""]))
    names = {
        "north": "age,pressure,cholesterol,sex,outcome",
        "south": "age;pressure;cholesterol;sex;outcome;Straße",
        "east": "Sex,Age,Pressure,Cholesterol,Outcome",
        "west": "age\tpressure\tcholesterol\tsex\toutcome\tward",
    }
    encodings = {"south": "cp1252", "east": "utf-8-sig"}
    for site, rows in lines.items():
        text = "\n".join([names[site], *rows[1:10], "", *rows[10:]]) + "\n"
        (folder / f"{site}.csv").write_text(text, encoding=encodings.get(site, "utf-8"))


NAMES = ("sex", "age", "pressure", "cholesterol", "outcome")
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("data.encoding.*data.per_site", {"per_site": {"south": {"encoding": "cp1252"}}}),
    (
        "'east'.*no column 'outcome'; did you mean 'Outcome'",
        {
            "per_site": {
                "east": {
                    "rename": {name.title(): name for name in ("sex", "age", "pressure", "cholesterol", "outcome")}
                }
            }
        },
    ),
    ("data.labels", {"labels": {0: "alive", 1: "dead", "alive": "alive", "dead": "dead"}}),
    ("decimal commas, set data.decimal", {"per_site": {"south": {"decimal": ","}}}),
    (r"data.missing_words: \['-'\]", {"per_site": {"west": {"missing_words": ["-"]}}}),
    ("'cholesterol' is 1.* at east", {"per_site": {"east": {"units": {"cholesterol": 0.02586}}}}),
    (
        "'sex' spells.*'M' at 'east'.*data.spellings",
        {"per_site": {"east": {"spellings": {"sex": {"M": "m", "F": "f"}}}}},
    ),
    ("'sex'.*'south'", {"per_site": {"south": {"spellings": {"sex": {"male": "m", "female": "f"}}}}}),
]
"""What is said of the files, and what a person writes then."""


def with_change(fields: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Mappings with those of a change in them."""
    merged = {
        name: with_change(fields[name], value) if isinstance(value, dict) and name in fields else value
        for name, value in change.items()
    }
    return {**fields, **merged}


@pytest.mark.slow
@pytest.mark.case("exports per site", "four files that differ in eight ways: messages name the field that mends each")
def test_each_message_leads_to_the_next_until_a_verdict_stands(tmp_path: Path) -> None:
    write_exports(tmp_path)
    data: dict[str, Any] = {
        "name": "table",
        "sites": {site: str(tmp_path / f"{site}.csv") for site in PLACES},
        "label": "outcome",
        "numeric": ["age", "pressure", "cholesterol"],
        "categorical": ["sex"],
    }
    experiment: dict[str, Any] = {
        "protocol": {"targets": "all", "seeds": [0], "test_fraction": 0.3},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 3, "batch_size": 32, "lr": 0.05},
        "methods": ["alone", "fedavg"],
    }

    def told() -> str:
        try:
            return "\n".join(fedshift.check({**experiment, "data": data}).warnings)
        except UserError as error:
            return str(error)

    for message, change in STEPS:
        assert re.search(message, told()), (message, told())
        data = with_change(data, change)
    assert told() == ""
    results = fedshift.run({**experiment, "data": data}, tmp_path / "runs")
    assert str(results.verdict())
