"""A table of very many targets as people read it: the average, and the few targets that are worst."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from fedshift.evaluation.summary import AVERAGE
from fedshift.report.note import Note
from fedshift.report.table import Table

FEW = 30
"""So many targets have a column each."""
_WORST = 5


def with_worst_columns(table: Table) -> Table:
    """The table and those below it, of more than `FEW` targets with the columns of the worst few alone.

    The rows keep all targets, for files.
    """
    if len(_targets(table)) <= FEW:
        return table
    return _with(table, _worst(table), noted=True)


def _targets(table: Table) -> tuple[str, ...]:
    return tuple(column for column in table.columns if column != AVERAGE)


def _worst(table: Table) -> frozenset[str]:
    """The targets with the worst means over the methods."""
    means = {}
    for column in _targets(table):
        cells = (line[column] for line in table.cells.values())
        if means_of_target := [cell.row.mean for cell in cells if cell is not None]:
            means[column] = fmean(means_of_target)
    return frozenset(sorted(means, key=means.__getitem__, reverse=table.measure.less_is_better)[:_WORST])


def _with(table: Table, named: frozenset[str], *, noted: bool = False) -> Table:
    """The table with these targets alone, and the average."""
    more = tuple(_with(below, named) if len(_targets(below)) > FEW else below for below in table.more)
    columns = tuple(column for column in table.columns if column in named or column == AVERAGE)
    cells = {method: {column: line[column] for column in columns} for method, line in table.cells.items()}
    number = len(_targets(table))
    text = f"The {len(named)} worst of {number} targets have a column; files in CSV and JSON have all."
    notes = (Note("few", text), *table.notes) if noted else table.notes
    return replace(table, columns=columns, cells=cells, notes=notes, more=more)
