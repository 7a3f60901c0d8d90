"""What of a table's statistics is made of few rows: categories, and the filled or the missing cells of a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedshift.data.tables import CategoricalColumn, TableEncoding, TableStatistics


@dataclass(frozen=True)
class Few:
    """A column of which a part is in few rows."""

    column: str  # its name
    part: Literal["categories", "missing cells", "values"]  # what of it
    rows: tuple[int, ...]  # how many rows each of these parts has: one number, or one for each category


def few_rows(statistics: TableStatistics, given: Mapping[str, Any], samples: int, least: int) -> tuple[Few, ...]:
    """The parts of columns that are in at least one row and in fewer than ``least``.

    Args:
        statistics: of one site's table, with the rows of each category.
        given: the statistics as they are sent (`fedshift.data.agreement.table_given`).
        least: the fewest rows that a part may have.
    """
    parts: list[tuple[str, Literal["categories", "missing cells", "values"], Sequence[int]]] = []
    for name, count in zip(given["numeric"], statistics.count.tolist(), strict=True):
        parts += [(name, "values", [count]), (name, "missing cells", [samples - count])]
    for name, rows in zip(given["categorical"], statistics.rows, strict=True):
        parts.append((name, "categories", sorted(rows.values())))
    few = (Few(name, part, tuple(n for n in rows if 0 < n < least)) for name, part, rows in parts)
    return tuple(item for item in few if item.rows)


def without_few(
    given: Mapping[str, Any], statistics: TableStatistics, few: Sequence[Few], least: int, samples: int
) -> dict[str, Any]:
    """Statistics that tell of no category and of no missing cell of few rows.

    Rows of such a category are read as those of an unknown one. A column with few missing cells is told as if they held
    its mean: mean and deviation stay, and neither the number of these cells nor that there are any is told.

    Args:
        statistics: the same, with the rows of each category.
        few: of `few_rows`.
        least: the fewest rows of what is told.
    """
    told = {**given, **{name: list(given[name]) for name in ("count", "total", "squares", "any_missing")}}
    missing = {item.column for item in few if item.part == "missing cells"}
    for index, name in enumerate(given["numeric"]):
        if name in missing and given["count"][index]:
            for sums in ("total", "squares"):
                told[sums][index] = given[sums][index] * (samples / given["count"][index])
            told["count"][index], told["any_missing"][index] = samples, False
    told["categories"] = [
        sorted(category for category, count in rows.items() if count >= least) for rows in statistics.rows
    ]
    return told


def encoding_without_few(encoding: TableEncoding, told: Mapping[str, Any]) -> TableEncoding:
    """One site's encoding, which is as wide as the table itself has categories, without what is not told."""
    numeric = tuple(
        column.model_copy(update={"can_be_missing": bool(missing)})
        for column, missing in zip(encoding.numeric, told["any_missing"], strict=True)
    )
    categorical = tuple(
        CategoricalColumn(
            name=column.name, categories=tuple(name for name in column.categories if name in set(categories))
        )
        for column, categories in zip(encoding.categorical, told["categories"], strict=True)
    )
    return encoding.model_copy(update={"numeric": numeric, "categorical": categorical})
