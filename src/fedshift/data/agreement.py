"""One encoding for sites that never see each other's data, made from sums and sets that each site sends.

A simulation gives the same numbers: it also computes each site's part separately and adds them in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedshift.data.codings import category_warnings, fewer, in_quotes, sums_warnings
from fedshift.data.domain import Preprocessing
from fedshift.data.tables import CategoricalColumn, TableEncoding, TableStatistics, agreed_encoding, moments
from fedshift.data.tasks.task_fields import with_label_scale
from fedshift.errors import UserError

MOMENTS, TABLE = "moments", "table"
_MEASURED = 100
"""Most columns without names that can be measurements with units."""
_COMPARED = 10_000
"""Tables of more columns are not compared, which would take long."""


def table_given(statistics: TableStatistics, numeric: Sequence[str], categorical: Sequence[str]) -> dict[str, Any]:
    """A table's statistics as plain values, ready to be sent."""
    return {
        "kind": TABLE,
        "numeric": list(numeric),
        "categorical": list(categorical),
        "count": statistics.count.tolist(),
        "total": statistics.total.tolist(),
        "squares": statistics.squares.tolist(),
        "any_missing": statistics.any_missing.tolist(),
        "categories": [sorted(names) for names in statistics.categories],
    }


def differences(given: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Warnings about columns whose sums or categories differ between sites as codes, units and mistakes do.

    ``given``: site → what it sent. Sites that describe different columns are left to `common_encoding`.
    """
    if len(given) < 2:
        return
    first = next(iter(given.values()))
    if any(item.get("kind") != TABLE for item in given.values()):
        yield from _moments_differ(given)
        return
    if any(item[what] != first[what] for item in given.values() for what in ("numeric", "categorical")):
        return
    if len(first["numeric"]) + len(first["categorical"]) > _COMPARED:
        return
    numeric = {
        in_quotes(column): {
            site: (item["count"][index], item["total"][index], item["squares"][index]) for site, item in given.items()
        }
        for index, column in enumerate(first["numeric"])
    }
    yield from fewer(sums_warnings(numeric))
    categorical = (
        category_warnings(column, {site: dict.fromkeys(item["categories"][index]) for site, item in given.items()})
        for index, column in enumerate(first["categorical"])
    )
    yield from fewer(itertools.chain.from_iterable(categorical))


def _moments_differ(given: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The same of features without names, if they are few enough to be measurements; of images nothing."""
    widths = {len(item["total"]) for item in given.values()}
    if len(widths) == 1 and 1 <= (width := widths.pop()) <= _MEASURED:
        yield from fewer(
            sums_warnings(
                {
                    f"column {index}": {
                        site: (item["count"], item["total"][index], item["squares"][index])
                        for site, item in given.items()
                    }
                    for index in range(width)
                }
            )
        )


def common_encoding(
    given: Mapping[str, Mapping[str, Any]], preprocessing: Preprocessing, labelled: Collection[str] | None = None
) -> Preprocessing:
    """The encoding that all sites use.

    Args:
        given: site → what it sent (`DataSource.gives`).
        preprocessing: the preprocessing of any site; the agreed numbers are filled in.
        labelled: the sites whose labels scale a regression; None: all.

    Raises:
        UserError: sites describe different columns (the message names the site), or a column has no value anywhere.
    """
    first_name, first = next(iter(given.items()))
    for site, item in given.items():
        for what in ("kind", "numeric", "categorical"):
            if item.get(what) != first.get(what):
                raise UserError(
                    f"sites differ in {what} columns: '{first_name}' has {first.get(what)}, '{site}' {item.get(what)}; "
                    "list the same columns at every site"
                )
    objective = preprocessing.objective
    if objective is not None:
        sums = [item.get("label") for site, item in given.items() if labelled is None or site in labelled]
        if None in sums:
            raise UserError("a site gives no sums of its labels: all sites must name the same data.task")
        objective = with_label_scale(objective, [item for item in sums if item is not None])
    if first["kind"] == TABLE:
        statistics = [
            TableStatistics(
                count=np.array(item["count"], dtype=np.int64),
                total=np.array(item["total"], dtype=np.float64),
                squares=np.array(item["squares"], dtype=np.float64),
                any_missing=np.array(item["any_missing"], dtype=np.bool_),
                categories=tuple(frozenset(map(str, names)) for names in item["categories"]),
            )
            for item in given.values()
        ]
        encoding = agreed_encoding(statistics, first["numeric"], first["categorical"])
        shaped = {"shape": (encoding.width,), "objective": objective, "standardise": preprocessing.standardise}
        return encoding.preprocessing().model_copy(update=shaped)
    preprocessing = preprocessing.model_copy(update={"objective": objective})
    if not first["total"]:  # there are no inputs to standardise
        return preprocessing
    count = sum(int(item["count"]) for item in given.values())
    total, squares = (
        sum(np.array(item[what], dtype=np.float64) for item in given.values()) for what in ("total", "squares")
    )
    mean, std = moments(count, np.asarray(total), np.asarray(squares))
    return preprocessing.model_copy(update={"mean": tuple(mean.tolist()), "std": tuple(std.tolist())})


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
