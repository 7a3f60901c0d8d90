"""The ledger: which site sent or received what kind of content in each exchange, and how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedshift.federation.messages import pieces

Direction = Literal["up", "down"]
Totals = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Entry:
    """Content of one field and kind that left a site (``up``) or reached it (``down``)."""

    exchange: int
    call: str
    site: str
    direction: Direction
    field: str
    kind: str
    bytes: int


@dataclass
class Ledger:
    """Counts the content that leaves and reaches sites.

    ``entries`` are those since the last `settle`. ``total`` is the bytes of the whole run by direction and kind, and
    ``by_site`` the same of each site; None if a checkpoint of an older version, from which the run resumed, had none.
    """

    entries: list[Entry] = field(default_factory=list)
    total: Totals = field(default_factory=lambda: {"up": {}, "down": {}})
    by_site: dict[str, Totals] | None = field(default_factory=dict)

    def record(self, exchange: int, call: str, site: str, direction: Direction, content: Mapping[str, Any]) -> None:
        """Count ``content``. Pieces of the same field and kind become one entry."""
        sizes: dict[tuple[str, str], int] = defaultdict(int)
        for name, kind, size in pieces(content):
            sizes[name, kind] += size
        for (name, kind), size in sizes.items():
            self.entries.append(Entry(exchange, call, site, direction, name, kind, size))
            self.total[direction][kind] = self.total[direction].get(kind, 0) + size
            if self.by_site is not None:
                kinds = self.by_site.setdefault(site, {"up": {}, "down": {}})[direction]
                kinds[kind] = kinds.get(kind, 0) + size

    def to_checkpoint(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {"bytes": self.total, "bytes_by_site": self.by_site}

    def restore(self, total: Totals, by_site: dict[str, Totals] | None = None) -> None:
        """Go on from a checkpoint that holds what `to_checkpoint` returned."""
        self.total, self.by_site = total, by_site

    def settle(self) -> tuple[list[Entry], Totals]:
        """The entries since the last call, with their bytes by direction and kind; then start a new page."""
        page, self.entries = self.entries, []
        totals: Totals = {"up": {}, "down": {}}
        for entry in page:
            kinds = totals[entry.direction]
            kinds[entry.kind] = kinds.get(entry.kind, 0) + entry.bytes
        return page, totals
