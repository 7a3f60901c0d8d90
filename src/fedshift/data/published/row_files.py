"""The reader of a table of features and times to an event, with a second file that says domain and part of each row."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import numpy as np

from fedshift.data.published.samples import Location, Part, Samples
from fedshift.errors import UserError
from fedshift.section import Section


class Rows(Section):
    """FLamby's files of TCGA-BRCA."""

    kind: Literal["rows"]
    table: str  # the features, the event and the time of each row
    split: tuple[str, ...]  # key, part and domain of each row
    key: str  # the column of both that names a row
    side: str  # the column of the split such as ``train_0``: part and number of the domain
    time: str  # the column of times
    event: str  # the column of events

    def in_words(self) -> str:
        """How the folder looks."""
        return f"{self.table} and {self.split[0]}"

    def read(self, location: Location) -> dict[str, Samples]:
        """The rows by domain, in the order of the table. UserError if a file is missing or damaged."""
        listing = next((location.folder / name for name in self.split if (location.folder / name).exists()), None)
        if listing is None or not (location.folder / self.table).exists():
            raise location.missing(f"files {self.table} and {self.split[0]}")
        table = location.folder / self.table
        try:
            sides = {row[self.key]: row[self.side] for row in _rows(listing)}
            rows = [row for row in _rows(table) if row[self.key] in sides]
            features = [name for name in rows[0] if name not in (self.key, self.time, self.event)]
            inputs = np.array([[float(row[name]) for name in features] for row in rows], dtype=np.float32)
            labels = np.array([[float(row[self.time]), float(row[self.event])] for row in rows], dtype=np.float32)
            divided = [sides[row[self.key]].rpartition("_") for row in rows]
            numbers = np.array([int(number) for _, _, number in divided], dtype=np.int64)
        except (OSError, UnicodeDecodeError, KeyError, ValueError, TypeError, IndexError):
            raise UserError(f"{table} or {listing} is not as {self.in_words()} are: get them again") from None
        parts: list[Part] = ["train" if part == "train" else "test" for part, _, _ in divided]
        return {
            domain: Samples(inputs[here], labels[here], tuple(parts[row] for row in here))
            for number, domain in enumerate(location.domains)
            if domain in location.chosen and len(here := np.flatnonzero(numbers == number))
        }


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
