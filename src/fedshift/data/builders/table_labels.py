"""The classes of a table's rows: a column's values, a map of them, or a condition on a column."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, field_validator

from fedshift.data.table_files import Columns, canonical, is_missing
from fedshift.errors import UserError, nearest

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
    """A condition on a column: rows that meet it are positive.

    Attributes:
        column: the column.
        sign: one of >, >=, <, <=, =, == and !=.
        value: what its cells are compared with.
    """

    column: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """The condition of a text such as ``num > 0``.

        Raises:
            ValueError: it is none.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"positive: '{text}' is no condition; write a column, a sign and a value: num > 0")
        column, sign, value = found.groups()
        if sign in _COMPARED and _number(value) is None:
            raise ValueError(f"positive: '{value}' is not a number, which {sign} needs")
        return cls(column, sign, canonical(value))

    def holds(self, table: Columns, row: int) -> bool:
        """Whether a row is positive.

        Raises:
            UserError: its cell is not a number, and the sign needs one.
        """
        cell = canonical(table.column(self.column)[row])
        if self.sign not in _COMPARED:
            return (cell == self.value) == (self.sign != "!=")
        number, limit = _number(cell), _number(self.value)
        if number is None or limit is None:
            where = f"{table.place(row)}, column '{self.column}'"
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
        table: the rows.
        column: the column that holds the label.
        condition: makes the classes negative and positive; None: the labels are the classes.
        mapping: label → class; None: the labels are the classes.

    Raises:
        UserError: a label is missing, or has no class.
    """
    return [_class_of(table, row, cell, column, condition, mapping) for row, cell in enumerate(table.column(column))]


def _class_of(
    table: Columns,
    row: int,
    cell: str,
    column: str,
    condition: Condition | None,
    mapping: Mapping[str, str] | None,
) -> str:
    where = f"{table.place(row)}, column '{column}'"
    if is_missing(cell):
        raise UserError(
            f"{where}: the label is missing: fill or drop the row",
            public=f"{table.place(row)}: the label is missing: fill or drop the row",
        )
    label = canonical(cell)
    if condition is not None:
        return POSITIVE if condition.holds(table, row) else NEGATIVE
    if mapping is None:
        return label
    if label not in mapping:
        raise UserError(
            f"{where}: data.labels has no class for '{label}'; {nearest(label, mapping)}",
            public=f"{table.place(row)}: data.labels has no class for the label",
        )
    return mapping[label]


class Labelling(BaseModel):
    """How the training tables said the class of a row. Saved with a model, so that predictions keep labels.

    Attributes:
        column: the column that holds the label.
        positive: a condition that makes the classes negative and positive.
        labels: label → class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    positive: str | None = None
    labels: dict[str, str] | None = None

    @field_validator("positive")
    @classmethod
    def _is_condition(cls, positive: str | None) -> str | None:
        if positive is not None:
            Condition.parse(positive)
        return positive

    def known(self, table: Columns) -> list[str | None] | None:
        """The class of each row, None for one without a label; None if the table has no such column."""
        if self.column not in table.cells:
            return None
        condition = None if self.positive is None else Condition.parse(self.positive)

        def known(row: int, cell: str) -> str | None:
            try:
                return _class_of(table, row, cell, self.column, condition, self.labels)
            except UserError:
                return None

        return [known(row, cell) for row, cell in enumerate(table.column(self.column))]


def as_written(mapping: object) -> object:
    """A mapping of labels with the keys and values that a text file would hold: the number 1.0 becomes "1".

    Raises:
        ValueError: YAML read a word such as yes as true.
    """
    if not isinstance(mapping, Mapping):
        return mapping
    if any(isinstance(part, bool) for pair in mapping.items() for part in pair):
        raise ValueError("YAML reads yes, no, on and off as true or false: write such words in quotes")
    return {canonical(str(key)): canonical(str(value)) for key, value in mapping.items()}


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number == number else None
