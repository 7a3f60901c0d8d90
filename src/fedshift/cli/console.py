"""The console of every command. Text of strangers passes it without control sequences."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from fedshift.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_ITEM = re.compile(r" *(\d+\.|[*-]) +")
_WRITTEN = 120
"""Columns to which the code's prose is broken."""


def safe_console(*, stderr: bool = False) -> Console:
    """A console for standard output, or for standard error. Whatever is printed on it is made printable and not cut."""
    made = _Whole(stderr=stderr)
    made.push_render_hook(_MakePrintable())
    return made


def say(text: str, *, stderr: bool = False) -> None:
    """Print text as it stands: no markup, no colours, no line broken."""
    safe_console(stderr=stderr).print(text, highlight=False, markup=False, soft_wrap=True)


def escape(text: str) -> str:
    """``text`` as it stands, in a place where rich expects markup, such as the description of a progress bar."""
    return markup.escape(printable(text))


def reflow(prose: str, width: int) -> str:
    """A module's docstring, whose lines were broken at 120 columns, for a narrower terminal.

    A line is joined with the one before where only the 120 columns can have parted them. Equations and items of lists
    stay lines of their own; what does not fit continues below its first word.

    Example:
        >>> print(reflow(" 1. One item that goes on." + chr(10) + "    x = 1", 18))
         1. One item that
            goes on.
            x = 1
    """
    joined: list[str] = []
    before = 0
    for line in prose.splitlines():
        lead, first = len(line) - len(line.lstrip()), line.split(maxsplit=1)[:1]
        full = bool(first) and before + 1 + len(first[0]) > _WRITTEN
        if joined and full and not _ITEM.match(line) and lead == _continuation_indent(joined[-1]):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
        before = len(line)
    return "\n".join(wrapped for line in joined for wrapped in _wrap(line, width))


def _continuation_indent(line: str) -> int | None:
    """The indentation with which a line continues below: 0 in a paragraph; None for an equation, which does not."""
    item = _ITEM.match(line)
    if item is not None:
        return item.end()
    return None if line.startswith(" ") else 0


def _wrap(line: str, width: int) -> list[str]:
    under = _continuation_indent(line)
    under = len(line) - len(line.lstrip()) if under is None else under
    return textwrap.wrap(line, width, subsequent_indent=" " * min(under, width // 3), break_on_hyphens=False) or [""]


class _Whole(Console):
    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        super().print(*objects, crop=crop, **options)


class _MakePrintable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


class _Printable:
    """Something to print whose pieces of text are made printable; rich's own control codes are not text."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))
