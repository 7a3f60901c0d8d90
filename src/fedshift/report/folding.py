"""A grid for the terminal of which nothing is cut: if it is too wide, blocks of its columns stand below each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedshift.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as Grid
    from rich.text import Text

_ANY = 100_000
"""More columns than any grid needs: rich measures nothing that is wider than what it is given."""
_WORDS, _HEADING = 24, 20
"""Columns of words may fold to that width, longer words in a heading to the other one."""
_NAME = 12
"""A name folds to that width, if a column beside it fits in no other way."""


@dataclass(frozen=True)
class Folded:
    """Rows and columns. At a terminal they fold to its width; elsewhere each row is one line, however long.

    A number is never cut, and stands whole in one line. Blocks of columns repeat the names of the rows.

    Example:
        >>> from rich.console import Console
        >>> from io import StringIO
        >>> grid = Folded(["method", "east", "west"], [["fedavg", "70.00 ±1.00", "80.00 ±1.00"]])
        >>> console = Console(file=StringIO(), width=25, force_terminal=True, color_system=None)
        >>> console.print(grid)
        >>> [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
        [['method', 'east'], ['fedavg', '70.00', '±1.00'], ['method', 'west'], ['fedavg', '80.00', '±1.00']]
    """

    head: Sequence[str | Text]  # the columns' headings
    rows: Sequence[Sequence[str | Text]]  # the cells; rich reads no markup in plain strings
    names: int = 1  # how many columns at the left name the rows
    words: Collection[int] = ()  # further columns that hold words: they begin at the left and fold
    ruled: bool = False  # whether a line is below the headings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            # As wide as it is. What prints it must not crop, as `safe_console` does not.
            yield from console.render(self._grid(range(len(self.head))), options.update(max_width=_ANY))
            return
        for number, block in enumerate(self.blocks(console, options)):
            if number and not self.ruled:
                yield ""
            yield self._grid(block, options.max_width)

    def blocks(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns of each block, at a terminal."""
        names, others = list(range(self.names)), list(range(self.names, len(self.head)))
        blocks = self._fill_blocks(console, options, names, others, len(others))
        if len(blocks) > 1:  # blocks of about as many columns each
            even = self._fill_blocks(console, options, names, others, -(-len(others) // len(blocks)))
            blocks = even if len(even) == len(blocks) else blocks
        return [[*names, *block] for block in blocks]

    def _fill_blocks(
        self, console: Console, options: ConsoleOptions, names: list[int], others: list[int], most: int
    ) -> list[list[int]]:
        """Blocks of at most so many columns, as long as these fit beside the names."""
        from rich.measure import Measurement

        blocks: list[list[int]] = [[]]
        for column in others:
            tried = self._grid([*names, *blocks[-1], column], options.max_width)
            needed = Measurement.get(console, options.update(max_width=_ANY), tried).minimum
            if blocks[-1] and (needed > options.max_width or len(blocks[-1]) == most):
                blocks.append([])
            blocks[-1].append(column)
        return blocks

    def _grid(self, columns: Sequence[int], widest: int = _ANY) -> Grid:
        from rich import box
        from rich.table import Table as Grid

        grid = Grid(box=box.SIMPLE_HEAD if self.ruled else None, pad_edge=False)
        room = widest - (3 * self.names + 2 if self.ruled else 2 * self.names)
        named = sum(min(_NAME, self._least(column)) for column in columns[: self.names])
        least = {column: min(self._least(column), max(1, room - named)) for column in columns}
        left = room - max((least[column] for column in columns[self.names :]), default=0)
        for column in columns:
            names = column < self.names
            words = names or column in self.words
            grid.add_column(
                _plain(self.head[column]),
                justify="left" if words else "right",
                min_width=min(self._least(column), max(_NAME, left // self.names)) if names else least[column],
                overflow="fold",
            )
        for row in self.rows:
            grid.add_row(*(_plain(row[column]) for column in columns))
        return grid

    def _least(self, column: int) -> int:
        """The smallest width in which a column can be read."""
        heading = min(_HEADING, max(map(len, _plain(self.head[column]).plain.split()), default=0))
        cells = max((_plain(row[column]).cell_len for row in self.rows), default=0)
        return max(heading, min(cells, _WORDS) if column in self.words else cells)


def _plain(cell: str | Text) -> Text:
    """Text in which rich does not read brackets as markup."""
    from rich.text import Text

    return Text(printable(cell)) if isinstance(cell, str) else cell
