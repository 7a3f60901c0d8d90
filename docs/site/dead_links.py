"""Finds links within the built site that lead nowhere: ``python docs/site/dead_links.py FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links of a page, and the places in it that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def dead_links(site: Path) -> Iterator[str]:
    """One sentence for each link to a file of the site, or to a place in it, that is not there."""
    # In _static the theme has templates, whose links are not links yet.
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in files}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            place = unquote(parts.fragment)
            if not target.exists() or (target in pages and place not in pages[target].places):
                yield f"{path.relative_to(site.resolve())} links to {link}"


if __name__ == "__main__":
    found = list(dead_links(Path(sys.argv[1])))
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
