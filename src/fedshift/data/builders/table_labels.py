"""The labels of a table's rows: classes from a column, a map or a condition on a column; or quantities."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import field_validator

from fedshift.data.table_files import Columns, advice_on, canonical, is_missing, number_of
from fedshift.errors import UserError, nearest
from fedshift.section import Section

CLASSES = NEGATIVE, POSITIVE = ("negative", "positive")
"""The classes that a condition makes."""
_CONDITION = re.compile(r"\s*(.+?)\s*(>=|<=|==|!=|=|>|<)\s*(.+?)\s*")
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Condition:
    """A condition on a column: rows that meet it are positive."""

    column: str  # the column
    sign: str  # one of >, >=, <, <=, =, == and !=
    value: str  # what its cells are compared with

    @classmethod
    def parse(cls, text: str) -> Condition:
        """The condition of a text such as ``num > 0``. ValueError if it is none."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(f"positive: '{text}' is no condition; write a column, a sign and a value: num > 0")
        column, sign, value = match.groups()
        if sign in _COMPARED and number_of(value) is None:
            raise ValueError(f"positive: '{value}' is not a number, which {sign} needs")
        return cls(column, sign, canonical(value))

    def holds(self, table: Columns, row: int) -> bool:
        """Whether a row is positive. UserError if its cell is not a number, and the sign needs one."""
        cell = canonical(table.cells[self.column][row])
        if self.sign not in _COMPARED:
            return (cell == self.value) == (self.sign != "!=")
        number, limit = number_of(cell), number_of(self.value)
        if number is None or limit is None:
            where = f"{table.locate(row)}, column '{self.column}'"
            raise UserError(
                f"{where}: '{cell}' is not a number, and data.positive compares it with {self.value}: mend the cell",
                public=f"{where}: the cell is not a number",
            )
        return _COMPARED[self.sign](number, limit)


def classes_of(
    table: Columns, column: str, condition: Condition | None, mapping: Mapping[str, str] | None
) -> list[str]:
    """The class of each row.

    Args:
        condition: makes the classes negative and positive; None: the labels are the classes.
        mapping: label → class; None: the labels are the classes.

    Raises:
        UserError: a label is missing, or has no class.
    """
    _check_any_label(table, column)
    return [_class_of(table, row, cell, column, condition, mapping) for row, cell in enumerate(table.cells[column])]


def _check_any_label(table: Columns, column: str) -> None:
    """Raise UserError where no row has a label: filling or dropping rows is no help there."""
    if len(table) and all(map(is_missing, table.cells[column])):
        what = "no row has a label: if this site has none, write data.site_labels: {SITE: none}, with the site's name"
        after = "or leave it out, and predict its rows with 'fedshift predict'"
        file = table.locate(0).partition(",")[0]
        raise UserError(f"{file}, column '{column}': {what}, {after}", public=f"{file}: {what}, {after}")


def _class_of(
    table: Columns, row: int, cell: str, column: str, condition: Condition | None, mapping: Mapping[str, str] | None
) -> str:
    where = f"{table.locate(row)}, column '{column}'"
    if is_missing(cell):
        raise UserError(
            f"{where}: the label is missing: fill or drop the row",
            public=f"{table.locate(row)}: the label is missing: fill or drop the row",
        )
    label = canonical(cell)
    if condition is not None:
        return POSITIVE if condition.holds(table, row) else NEGATIVE
    if mapping is None:
        return label
    if label not in mapping:
        raise UserError(
            f"{where}: data.labels has no class for '{label}'; {nearest(label, mapping)}",
            public=f"{table.locate(row)}: data.labels has no class for the label",
        )
    return mapping[label]


class Labelling(Section):
    """How the training tables said the class of a row. Saved with a model, so that predictions keep labels."""

    column: str  # the column that holds the label
    positive: str | None = None  # a condition that makes the classes negative and positive
    labels: dict[str, str] | None = None  # label → class

    @field_validator("positive")
    @classmethod
    def _is_condition(cls, positive: str | None) -> str | None:
        if positive is not None:
            Condition.parse(positive)
        return positive

    def row_classes(self, table: Columns) -> list[str | None] | None:
        """The class of each row, None for one without a label; None if the table has no such column."""
        if self.column not in table.cells:
            return None
        condition = None if self.positive is None else Condition.parse(self.positive)

        def class_of_row(row: int, cell: str) -> str | None:
            try:
                return _class_of(table, row, cell, self.column, condition, self.labels)
            except UserError:
                return None

        return [class_of_row(row, cell) for row, cell in enumerate(table.cells[self.column])]


def quantities_of(table: Columns, column: str) -> npt.NDArray[np.float32]:
    """The number in a column of each row, (n,). UserError if a label is missing, or is not a finite number."""
    _check_any_label(table, column)
    out = np.empty(len(table), dtype=np.float32)
    for row, cell in enumerate(table.cells[column]):
        where = f"{table.locate(row)}, column '{column}'"
        number = None if is_missing(cell) else number_of(cell)
        with np.errstate(over="ignore"):
            out[row] = np.nan if number is None else number
        if not np.isfinite(out[row]):
            what = "is missing" if is_missing(cell) else f"'{cell}' is not a finite number, which this task needs"
            advice = advice_on(cell, "fill or drop the row")
            raise UserError(
                f"{where}: the label {what}: {advice}",
                public=f"{table.locate(row)}: the label is missing or no number: fill or drop the row",
            )
    return out


def labels_of(table: Columns, task: str, columns: Sequence[str]) -> npt.NDArray[np.float32]:
    """The labels of each row for a task whose labels are no classes: (n,), or (n, columns) of several columns.

    UserError if a cell does not fit the task.
    """
    out = np.stack([quantities_of(table, column) for column in columns], axis=1)
    if task == "time_to_event":
        wrong = [
            (out[:, 0] < 0, "a time of 0 or more"),
            (~np.isin(out[:, 1], (0, 1)), "1 where the event happened, else 0"),
        ]
    elif task == "multi_label":
        wrong = [(~np.isin(column, (0, 1)), "0 or 1") for column in out.T]
    else:
        return out[:, 0]
    for column, (rows, wanted) in zip(columns, wrong, strict=True):
        if rows.any():
            where = table.locate(int(np.flatnonzero(rows)[0]))
            raise UserError(
                f"{where}, column '{column}': task {task} needs {wanted}: mend or drop the row",
                public=f"{where}: task {task} needs {wanted}",
            )
    return out
