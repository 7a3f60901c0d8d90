"""The console of every command. Text of strangers passes it without control sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from fedshift.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def safe_console(*, stderr: bool = False) -> Console:
    """A console for standard output, or for standard error. Whatever is printed on it is made printable and not cut."""
    made = _Whole(stderr=stderr)
    made.push_render_hook(_MakePrintable())
    return made


def escape(text: str) -> str:
    """``text`` as it stands, in a place where rich expects markup, such as the description of a progress bar."""
    return markup.escape(printable(text))


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
