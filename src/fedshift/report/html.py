"""The HTML elements of a report. Titles and plain text are escaped here; cells and content must be HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedshift.text import printable


def escape(text: str) -> str:
    """Text as HTML that shows it as it stands, without control characters."""
    return html.escape(printable(text, keep="\n"))


def section(name: str, title: str, *content: str) -> str:
    """A section of the page with a heading. Empty content is left out."""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n' + "\n".join(filter(None, content)) + "\n</section>"


def paragraph(text: str, css: str = "") -> str:
    """Plain text as a paragraph."""
    return f"<p{f' class={css}' if css else ''}>{escape(text)}</p>"


def grid(head: Sequence[str], body: Iterable[Sequence[str]], css: str = "") -> str:
    """An HTML table. Its cells must be HTML; the first column holds the names of the rows."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "\n".join(
        "<tr>" + f'<th scope="row">{line[0]}</th>' + "".join(_cell(cell) for cell in line[1:]) + "</tr>"
        for line in body
    )
    return (
        f'<div class="scroll"><table class="{css}">\n<thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def _cell(cell: str) -> str:
    return cell if cell.startswith("<td") else f"<td>{cell}</td>"


def details(title: str, content: Mapping[str, Any]) -> str:
    """Settings as YAML in an element that the reader can unfold; "" if there are none."""
    if not content:
        return ""
    import yaml

    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=100)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
