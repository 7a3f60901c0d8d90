"""What the runs cost, what they warn of, and how they were made."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from fedshift.evaluation.site_bytes import Direction
from fedshift.report import plots
from fedshift.report.advice.words import short_kind, size
from fedshift.report.details import Cost, Settings
from fedshift.report.run_means import SiteBytesRow
from fedshift.report.sections.blocks import (
    Block,
    Cells,
    Entry,
    Grid,
    Listing,
    Section,
    Text,
    figure,
    grid,
    number,
    section,
    settings,
)
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


def cost_section(costs: Mapping[str, Cost]) -> Section:
    """Rounds, seconds and bytes."""
    lines: list[Cells] = [
        [
            method,
            f"{cost.rounds:g}",
            number(cost.mini_batches, 0),
            number(cost.seconds, 1),
            number(cost.milliseconds, 1),
            number(sum(cost.up.values()) / 1e6),
            number(sum(cost.down.values()) / 1e6),
        ]
        for method, cost in costs.items()
    ]
    head = ["method", "rounds", "mini-batches per site", "seconds", "ms per mini-batch", "MB up", "MB down"]
    note = "Means over the runs of a method. Up leaves the sites, down reaches them; all sites together; 1 MB = 10⁶ B."
    sent = sites_sent(
        "What left each site, in a run",
        "method",
        {method: cost.sites for method, cost in costs.items()},
        "Means over the runs in which the site took part; sites with equal numbers share a row.",
    )
    return section("cost", "Cost", grid("Cost of a run", head, lines, [note]), sent, *_bytes(costs))


def _bytes(costs: Mapping[str, Cost]) -> Iterator[Block]:
    ways = [(method, way, kinds) for method, cost in costs.items() for way, kinds in _both(cost).items()]
    if any(sum(kinds.values()) for *_, kinds in ways):
        drawn = {
            method: {
                way: {short_kind(kind): size for kind, size in kinds.items()} for way, kinds in _both(cost).items()
            }
            for method, cost in costs.items()
        }
        rows = [[method, way, kind, size] for method, way, kinds in ways for kind, size in sorted(kinds.items())]
        yield figure(
            "bytes-by-kind",
            plots.bytes_by_kind(drawn),
            "Megabytes per run by kind of content",
            "What crossed the sites' borders, by kind of content.",
            [["method", "direction", "kind", "bytes"], *rows],
        )


def _both(cost: Cost) -> dict[str, Mapping[str, float]]:
    return {"up": cost.up, "down": cost.down}


def warnings_section(warnings: Sequence[str]) -> Section:
    """What follows from the results, and what the runs warned of."""
    content = Listing(tuple(warnings)) if warnings else Text("None.")
    return section("warnings", "Warnings", content, folds=not warnings)


def settings_section(name: str, used: Settings) -> Section:
    """Versions, the command, and every setting of the experiment ``name``."""
    rows = [[what, ", ".join(values)] for what, values in used.versions.items()]
    mixed = [what for what, values in used.versions.items() if len(values) > 1]
    file = f"{name}.yaml"
    command = f"fedshift run {shlex.quote(file)}"
    return section(
        "settings",
        "Settings and versions",
        grid("Versions", ["what", "in these runs"], rows, css="facts"),
        Text(f"The runs were not run alike ({', '.join(mixed)}): compare with care.", "note") if mixed else None,
        Text(f"To run it again: {command}, with the file below. A file of your own is named there by its checksum."),
        settings(file, used.experiment),
        settings("Data", used.data),
        *(settings(f"Settings of {method}", options) for method, options in used.methods.items()),
    )
