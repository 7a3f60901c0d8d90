"""What left each site and what reached it, as rows of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedshift.evaluation.site_bytes import Direction
from fedshift.report.advice.words import short_kind, size
from fedshift.report.run_means import SiteBytesRow
from fedshift.report.sections.blocks import Cells, Entry, Grid, grid
from fedshift.text import join_names

POOL = "pool"
"""What the ledger calls the place where pooled methods have all samples."""
_WAYS: dict[Direction, str] = {"up": "sent", "down": "sent to it"}


def sites_sent(caption: str, first: str, groups: Mapping[str, Sequence[SiteBytesRow]], what: str = "") -> Grid | None:
    """A grid with a row for each site, or for those of equal numbers; None if nothing is known.

    ``groups``: the sites, by the name of the row: a method, or a single run; ``what``: the first sentence of the note
    below.
    """
    every = [row for rows in groups.values() for row in rows]
    columns = [
        (way, kind) for way in _WAYS for kind in sorted({kind for *_, both in every for kind in both[way]})
    ]  # the range over many sites has no sum over kinds
    several = any(runs > 1 for _, runs, _ in every)
    lines: list[Cells] = []
    for name, rows in groups.items():
        alike: dict[tuple[float, ...], list[str]] = {}
        for site, runs, both in rows:
            alike.setdefault((runs, *(both[way].get(kind, 0.0) for way, kind in columns)), []).append(site)
        for (of, *sizes), sites in alike.items():
            counted = [Entry(f"{of:g}", value=of)] if several else []
            lines.append([name, join_names(sites), *counted, *(Entry(size(value), value=value) for value in sizes)])
    notes = [what] if what else []
    if any(site == POOL for site, *_ in every):
        notes.append(f"{POOL}: the place that has all samples.")
    head = [
        first,
        "site",
        *(["runs"] if several else []),
        *(f"{_WAYS[way]}: {short_kind(kind)}" for way, kind in columns),
    ]
    return grid(caption, head, lines, notes, "sent") if lines else None
