"""What a section of the page is made of. Templates turn it into HTML; everything here is plain text and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedshift.report import plots
from fedshift.report.measures import MISSING
from fedshift.report.run_means import Curve
from fedshift.text import csv_text


@dataclass(frozen=True)
class Entry:
    """A cell of a grid."""

    text: str  # what it shows
    error: str = ""  # what follows in small letters
    title: str = ""  # shown when a pointer rests on it
    best: bool = False  # whether it is bold
    value: float | None = None  # the exact number, by which its column is sorted
    mark: str = ""  # a badge behind the text
    miss: int | None = None  # 0 to 70: how strongly it is coloured as wrong
    picture: str = ""  # a PNG in base64, for which the title stands where it is not seen


@dataclass(frozen=True)
class Grid:
    """A table with a caption. The first column names its rows."""

    kind: ClassVar[str] = "grid"
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()
    css: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing, with the numbers behind it."""

    kind: ClassVar[str] = "figure"
    name: str  # name of the files for SVG and CSV, without an ending
    svg: str  # the drawing
    description: str  # the text for readers who do not see it
    caption: str  # what it shows
    csv: str  # its numbers
    title: str = ""  # a heading above it


@dataclass(frozen=True)
class Text:
    """A paragraph; with ``css`` note, in small letters."""

    kind: ClassVar[str] = "text"
    text: str
    css: str = ""


@dataclass(frozen=True)
class Listing:
    """A list, with or without a heading; ``folds``: the reader can close it."""

    kind: ClassVar[str] = "listing"
    items: tuple[str, ...]
    title: str = ""
    folds: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings as YAML, which the reader can unfold."""

    kind: ClassVar[str] = "settings"
    title: str
    yaml: str


Cells = list[str | Entry]
"""A row of a grid."""
Block = Grid | Figure | Text | Listing | Settings


@dataclass(frozen=True)
class Section:
    """A section of the page: its address, its heading, and what is in it; ``folds``: it opens on demand."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    folds: bool = True


def section(name: str, title: str, *blocks: Block | None, folds: bool = True) -> Section:
    """A section without the blocks that there are none of."""
    return Section(name, title, tuple(block for block in blocks if block is not None), folds)


def grid(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str | Entry]], notes: Sequence[str] = (), css: str = ""
) -> Grid:
    """A grid of entries and plain text."""
    lines = (tuple(cell if isinstance(cell, Entry) else Entry(cell) for cell in row) for row in rows)
    return Grid(caption, tuple(head), tuple(lines), tuple(notes), css)


def number(value: float | None, digits: int = 2, **more: Any) -> Entry:
    """A number as an entry; a dash if there is none."""
    return Entry(MISSING) if value is None else Entry(f"{value:,.{digits}f}", value=value, **more)


def settings(title: str, content: Mapping[str, Any]) -> Settings | None:
    """Settings as a block; None if there are none."""
    import yaml

    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=100)
    return Settings(title, text) if content else None


def figure(
    name: str, drawing: Any, description: str, caption: str, rows: Iterable[Sequence[object]], title: str = ""
) -> Figure:
    """A drawing as a block.

    ``description``: the text for readers who do not see it. No two figures of a page may share it; ``rows``: its
    numbers, first the names of the columns.
    """
    cells = (
        (f"{cell:.6g}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row)
        for row in rows
    )
    return Figure(name, plots.svg(drawing, description), description, caption, csv_text(cells), title)


def curve_rows(what: Sequence[str], panels: Mapping[str, Mapping[str, Curve]]) -> Iterable[Sequence[object]]:
    """The numbers of curves for a file: panel and name of each, then x, mean and standard deviation.

    ``what``: the names of the columns but for the last; ``panels``: panel → name → curve.
    """
    yield *what, "standard_deviation"
    for panel, curves in panels.items():
        for name, (x, mean, spread) in curves.items():
            for number, (at, value) in enumerate(zip(x, mean, strict=True)):
                yield panel, name, at, value, None if spread is None else spread[number]
