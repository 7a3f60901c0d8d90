"""What left each site and what reached it, as rows of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedshift.evaluation.site_bytes import Direction, SiteBytes
from fedshift.report.advice.words import short_kind, size
from fedshift.report.averages import mean_by_kind
from fedshift.report.collect import natural
from fedshift.report.sections.blocks import Cells, Entry, Grid, grid
from fedshift.text import listed

POOL = "pool"
"""What the ledger calls the place where pooled methods have all samples."""
_WAYS: dict[Direction, str] = {"up": "sent", "down": "sent to it"}
_Both = dict[Direction, dict[str, float]]
"""Direction → kind → bytes of a run."""


def sites_sent(caption: str, first: str, groups: Mapping[str, Sequence[SiteBytes]], what: str = "") -> Grid | None:
    """A grid with a row for each site, or for those of equal numbers; None if nothing is known.

    Args:
        caption: its caption.
        first: heading of its first column.
        groups: the runs that are averaged, by the name of the row: a method, or a single run.
        what: the first sentence of the note below.
    """
    by_group = {name: list(_rows(found)) for name, found in groups.items()}
    every = [row for rows in by_group.values() for row in rows]
    columns = [
        (way, kind) for way in _WAYS for kind in sorted({kind for *_, both in every for kind in both[way]})
    ]  # the range over many sites has no sum over kinds
    several = any(runs > 1 for _, runs, _ in every)
    lines: list[Cells] = []
    for name, rows in by_group.items():
        alike: dict[tuple[float, ...], list[str]] = {}
        for site, runs, both in rows:
            alike.setdefault((runs, *(both[way].get(kind, 0.0) for way, kind in columns)), []).append(site)
        for (of, *sizes), sites in alike.items():
            counted = [Entry(f"{of:g}", value=of)] if several else []
            lines.append([name, listed(sites), *counted, *(Entry(size(value), value=value) for value in sizes)])
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


def _rows(found: Sequence[SiteBytes]) -> Iterator[tuple[str, int, _Both]]:
    """Site, number of runs that it took part in, and the means of its bytes over these."""
    for site in sorted({name for one in found for name in one.sites}, key=lambda name: (natural(name), name)):
        own = [one.sites[site] for one in found if site in one.sites]
        yield site, len(own), {way: mean_by_kind([both.get(way, {}) for both in own]) for way in _WAYS}
    many = [one for one in found if one.spread]
    if many:
        numbers = sorted({one.number for one in many})
        of = f"of {numbers[0]:,}" + (f" to {numbers[-1]:,}" if len(numbers) > 1 else "") + " sites"
        for rank in ("least", "median", "most"):
            yield f"{rank} {of}", len(many), {way: _ranked(many, way, rank) for way in _WAYS}


def _ranked(many: Sequence[SiteBytes], way: Direction, rank: str) -> dict[str, float]:
    spreads = [{kind: getattr(one, rank) for kind, one in run.spread[way].items()} for run in many]
    return mean_by_kind(spreads)
