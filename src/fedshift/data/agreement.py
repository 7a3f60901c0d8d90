"""One encoding for sites that never see each other's data, made from sums and sets that each site sends.

A simulation gives the same numbers: it also computes each site's part separately and adds them in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedshift.data.codings import category_warnings, fewer, in_quotes, sums_warnings
from fedshift.data.domain import Preprocessing
from fedshift.data.tables import TableStatistics, agreed_encoding, moments
from fedshift.data.tasks.fields import scaled
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

    Args:
        given: site → what it sent. Sites that describe different columns are left to `agreed`.
    """
    if len(given) < 2:
        return
    first = next(iter(given.values()))
    if any(one.get("kind") != TABLE for one in given.values()):
        yield from _moments_differ(given)
        return
    if any(one[what] != first[what] for one in given.values() for what in ("numeric", "categorical")):
        return
    if len(first["numeric"]) + len(first["categorical"]) > _COMPARED:
        return
    numeric = {
        in_quotes(column): {
            site: (one["count"][place], one["total"][place], one["squares"][place]) for site, one in given.items()
        }
        for place, column in enumerate(first["numeric"])
    }
    yield from fewer(sums_warnings(numeric))
    categorical = (
        category_warnings(column, {site: dict.fromkeys(one["categories"][place]) for site, one in given.items()})
        for place, column in enumerate(first["categorical"])
    )
    yield from fewer(itertools.chain.from_iterable(categorical))


def _moments_differ(given: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The same of features without names, if they are few enough to be measurements; of images nothing."""
    widths = {len(one["total"]) for one in given.values()}
    if len(widths) == 1 and 1 <= (width := widths.pop()) <= _MEASURED:
        yield from fewer(
            sums_warnings(
                {
                    f"column {place}": {
                        site: (one["count"], one["total"][place], one["squares"][place]) for site, one in given.items()
                    }
                    for place in range(width)
                }
            )
        )


def agreed(
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
    for site, one in given.items():
        for what in ("kind", "numeric", "categorical"):
            if one.get(what) != first.get(what):
                raise UserError(
                    f"sites differ in {what} columns: '{first_name}' has {first.get(what)}, '{site}' {one.get(what)}; "
                    "list the same columns at every site"
                )
    objective = preprocessing.objective
    if objective is not None:
        sums = [one.get("label") for site, one in given.items() if labelled is None or site in labelled]
        if None in sums:
            raise UserError("a site gives no sums of its labels: all sites must name the same data.task")
        objective = scaled(objective, [one for one in sums if one is not None])
    if first["kind"] == TABLE:
        statistics = [
            TableStatistics(
                count=np.array(one["count"], dtype=np.int64),
                total=np.array(one["total"], dtype=np.float64),
                squares=np.array(one["squares"], dtype=np.float64),
                any_missing=np.array(one["any_missing"], dtype=np.bool_),
                categories=tuple(frozenset(map(str, names)) for names in one["categories"]),
            )
            for one in given.values()
        ]
        encoding = agreed_encoding(statistics, first["numeric"], first["categorical"])
        shaped = {"shape": (encoding.width,), "objective": objective, "standardise": preprocessing.standardise}
        return encoding.preprocessing().model_copy(update=shaped)
    preprocessing = preprocessing.model_copy(update={"objective": objective})
    if not first["total"]:  # there are no inputs to standardise
        return preprocessing
    count = sum(int(one["count"]) for one in given.values())
    total, squares = (
        sum(np.array(one[what], dtype=np.float64) for one in given.values()) for what in ("total", "squares")
    )
    mean, std = moments(count, np.asarray(total), np.asarray(squares))
    return preprocessing.model_copy(update={"mean": tuple(mean.tolist()), "std": tuple(std.tolist())})
