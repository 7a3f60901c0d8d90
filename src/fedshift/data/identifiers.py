"""Which columns of text name rows rather than group them: numbers of patients, names, dates, free text.

The categories of a column leave their site and are written into every model file, so such a column is no category.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedshift.data.table_files import Columns, canonical, is_missing
from fedshift.errors import UserError

MOST_UNASKED = 10
"""A column with no more different values than this is a category, however few rows there are."""


def names_rows(rows: Mapping[str, int]) -> bool:
    """Whether values name rows: there are half as many as rows or more, or most of them are of one row only.

    Args:
        rows: value → how many rows have it, without missing ones.

    Example:
        >>> names_rows({f"patient {number}": 1 for number in range(40)}), names_rows({"f": 20, "m": 20})
        (True, False)
    """
    single = sum(count == 1 for count in rows.values())
    return len(rows) > MOST_UNASKED and (2 * len(rows) >= sum(rows.values()) or 2 * single > len(rows))


def check_categories(tables: Mapping[str, Columns], columns: Iterable[str], labels: Iterable[str]) -> None:
    """Raise UserError for a column of categories or of classes that names rows, at one site or over all of them.

    The message has the numbers of values and rows, and no value.

    Args:
        tables: the table of each site.
        columns: columns of categories.
        labels: columns of classes.
    """
    for column, advice in (
        *((name, "name it under id, drop it, list it under numeric if it counts something") for name in columns),
        *((name, "name the column of the classes, or write task: regression for a quantity") for name in labels),
    ):
        together: Counter[str] = Counter()
        for table in tables.values():
            rows = counted_cells(table.column(column))
            check_values(table.path, f"column '{column}'", rows, advice)
            together.update(rows)
        check_values("data: all sites together", f"column '{column}'", together, advice)


def check_values(
    where: str, what: str, rows: Mapping[str, int], advice: str, field: str = "data.many_categories"
) -> None:
    """Raise UserError if values name rows. The public text has no numbers.

    Args:
        where: the file or site.
        what: the column or array.
        rows: value → how many rows have it.
        advice: what to do.
        field: where values are listed that may be told.
    """
    if not names_rows(rows):
        return
    reason = "it names rows and does not group them, and its values would be written into the model file"
    deliberate = f"or, if no value is confidential, list it under {field}"
    raise UserError(
        f"{where}: {what} has {len(rows)} different values in {sum(rows.values())} rows: {reason}: {advice}, "
        f"{deliberate}",
        public=f"{where}: {what} has about as many values as rows: {reason}: {advice}",
    )


def counted_cells(cells: Sequence[str]) -> Counter[str]:
    """How many cells hold each value, in the form that sites compare; missing ones are not counted."""
    rows: Counter[str] = Counter()
    for cell, count in Counter(cells).items():
        if not is_missing(cell):
            rows[canonical(cell)] += count
    return rows
