"""Reads the tables of a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Tables(HTMLParser):
    """The tables of a page by caption: rows of (text, exact number or None). Also what a keyboard can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.rows: list[list[tuple[str, float | None]]] = []
        self.text: str | None = None
        self.exact: float | None = None
        self.regions = 0
        self.scopes: set[str | None] = set()
        self.attributes: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td", "caption"):
            self.text, self.exact = "", float(found["data-value"] or 0) if "data-value" in found else None
            if tag == "th":
                self.scopes.add(found.get("scope"))
        elif tag == "div" and found.get("role") == "region":
            assert found["tabindex"] == "0"
            assert found["aria-label"]
            self.regions += 1

    def handle_data(self, data: str) -> None:
        if self.text is not None:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            assert self.text
            assert self.text not in self.tables, "no two tables have the same title"
            self.tables[self.text] = self.rows
            self.text = None
        elif tag in ("th", "td"):
            self.rows[-1].append((self.text or "", self.exact))
            self.text = None


def read(text: str) -> Tables:
    found = Tables()
    found.feed(text)
    return found
