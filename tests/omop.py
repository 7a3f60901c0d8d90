"""Databases in the form of OMOP's common data model, with made-up persons."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

TABLES = """
CREATE TABLE person (person_id INTEGER PRIMARY KEY, year_of_birth INTEGER, gender_source_value VARCHAR(50));
CREATE TABLE measurement (measurement_id INTEGER PRIMARY KEY, person_id INTEGER, measurement_concept_id INTEGER,
                          value_as_number NUMERIC);
CREATE TABLE condition_occurrence (condition_occurrence_id INTEGER PRIMARY KEY, person_id INTEGER,
                                   condition_concept_id INTEGER);
"""
GLUCOSE, DIABETES = 3004501, 201826


def rows(seed: int, persons: int = 40) -> dict[str, list[tuple[object, ...]]]:
    """The rows of the three tables; every fifth person has no glucose value, others have two."""
    draws = np.random.default_rng(seed)
    held: dict[str, list[tuple[object, ...]]] = {"person": [], "measurement": [], "condition_occurrence": []}
    for number in range(persons):
        ill = number % 2 == 0
        held["person"].append((number, int(draws.integers(1940, 2000)), "MF"[int(draws.integers(2))]))
        for _ in range(0 if number % 5 == 4 else 2):
            value = round(float(draws.normal(9 if ill else 5, 1)), 1)
            held["measurement"].append((len(held["measurement"]), number, GLUCOSE, value))
        if ill:
            held["condition_occurrence"].append((number, number, DIABETES))
    return held


def sqlite_database(path: Path, seed: int = 0, persons: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    with connection:
        connection.executescript(TABLES)
        for table, content in rows(seed, persons).items():
            marks = ", ".join("?" for _ in content[0])
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", content)
    connection.close()
    return path
