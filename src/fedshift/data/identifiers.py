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


FEW_ROWS = 5
"""A patient has fewer visits than this; among more than `MOST_UNASKED` categories some have more rows."""
MANY, EACH = 50, 10
"""Of more values than ``MANY``, each is of ``EACH`` rows on average, the default of policy.smallest_group, or more."""


def names_rows(rows: Mapping[str, int]) -> bool:
    """Whether values name rows, or the patients of a few rows each, rather than group them.

    There are more than `MOST_UNASKED` of them, and there are half as many as rows or more; or most are of one row only;
    or all are of fewer than `FEW_ROWS` rows; or there are more than `MANY`, of fewer than `EACH` rows on average.

    Args:
        rows: value → how many rows have it, without missing ones.

    Example:
        >>> names_rows({f"patient {number}": 1 for number in range(40)}), names_rows({"f": 20, "m": 20})
        (True, False)
    """
    if names_single_rows(rows):
        return True
    return len(rows) > MOST_UNASKED and (
        max(rows.values()) < FEW_ROWS or (len(rows) > MANY and sum(rows.values()) < EACH * len(rows))
    )


def names_single_rows(rows: Mapping[str, int]) -> bool:
    """As `names_rows`, by the first two signs only: of a class, which is public as a rule, few samples may be there."""
    single = sum(count == 1 for count in rows.values())
    return len(rows) > MOST_UNASKED and (2 * len(rows) >= sum(rows.values()) or 2 * single > len(rows))


def check_categories(tables: Mapping[str, Columns], columns: Iterable[str], labels: Iterable[str]) -> None:
    """Raise UserError for a column of categories or of classes that names rows, at one site or over all of them.

    The message has the numbers of values and rows, and no value.
    """
    for names, named, advice in (
        (columns, names_rows, "name it under id, drop it, list it under numeric if it counts something"),
        (labels, names_single_rows, "name the column of the classes, or write task: regression for a quantity"),
    ):
        for column in names:
            together: Counter[str] = Counter()
            for table in tables.values():
                rows = counted_cells(table.cells[column])
                if named(rows):
                    raise _refusal(table.path, f"column '{column}'", rows, advice, "data.many_categories")
                together.update(rows)
            if named(together):
                raise _refusal(
                    "data: all sites together", f"column '{column}'", together, advice, "data.many_categories"
                )


def check_classes(where: str, what: str, rows: Mapping[str, int], advice: str, field: str) -> None:
    """Raise UserError if names of classes name rows.

    ``rows``: value → how many rows have it; ``field``: where values are listed that may be told.
    """
    if names_single_rows(rows):
        raise _refusal(where, what, rows, advice, field)


def _refusal(where: str, what: str, rows: Mapping[str, int], advice: str, field: str) -> UserError:
    """What is said of values that name rows. The public text has no numbers."""
    reason = "it names rows and does not group them, and its values would be written into the model file"
    deliberate = f"or, if no value is confidential, list it under {field}"
    return UserError(
        f"{where}: {what} has {len(rows)} different values in {sum(rows.values())} rows: {reason}: {advice}, "
        f"{deliberate}",
        public=f"{where}: {what} has a value for every few rows: {reason}: {advice}",
    )


def counted_cells(cells: Sequence[str]) -> Counter[str]:
    """How many cells hold each value, in the form that sites compare; missing ones are not counted."""
    rows: Counter[str] = Counter()
    for cell, count in Counter(cells).items():
        if not is_missing(cell):
            rows[canonical(cell)] += count
    return rows
