"""The report of a mutation run, as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mutations import Mutation

KILLED = ("killed", "timeout")
"""What counts as noticed. A test that never ends is noticed, too; the report counts it apart."""


def markdown(
    mutations: list[Mutation],
    results: Mapping[str, Mapping[str, Any]],
    current: Collection[str],
    versions: Mapping[str, str],
) -> str:
    """Kill rate as a whole, by room and by list, and what no test noticed.

    ``current`` are the names of those whose result is of the present text. Only these count.
    """
    tried = {name: results[name] for name in results if name in current}
    lines = [
        "# Deliberate mistakes, and whether a test noticed",
        "",
        "Written by `make mutation` (`tests/mutation/run.py`); the mistakes are listed in `tests/mutation/lists/`.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        f"{len(tried)} of {len(mutations)} results are of this commit's text: the function that has the mistake is as"
        " it was when the mistake was tried, and the test that noticed is there. Only these are counted; `report.json`"
        " has each of them.",
        "",
        "| room | mistakes | of this text | killed | by time-out | survived | other | kill rate | processor seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for room in sorted({_room(mutation) for mutation in mutations}):
        lines.append(_row(room, [m for m in mutations if _room(m) == room], tried))
    lines.append(_row("**all**", mutations, tried))
    lines += ["", "By list (`lists/`):", "", *lines[8:10]]
    for area in sorted({mutation.area for mutation in mutations}):
        lines.append(_row(area, [m for m in mutations if m.area == area], tried))
    bad = [m for m in mutations if m.name in tried and tried[m.name]["status"] not in KILLED]
    lines += ["", "## Not noticed", ""]
    lines += [f"- `{m.name}` ({tried[m.name]['status']}): `{_short(m.old)}` → `{_short(m.new)}`" for m in bad]
    if not bad:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def _room(mutation: Mutation) -> str:
    """The folder of the mistake: of methods one more level."""
    parts = mutation.module.split(".")[1:-1]
    return "/".join(parts[:2] if parts[:1] == ["methods"] else parts[:1]) or "fedshift"


def _row(name: str, mutations: list[Mutation], results: Mapping[str, Mapping[str, Any]]) -> str:
    found = [results[mutation.name] for mutation in mutations if mutation.name in results]
    count = {status: sum(r["status"] == status for r in found) for status in ("killed", "timeout", "survived")}
    killed = count["killed"] + count["timeout"]
    rate = f"{100 * killed / len(found):.1f} %" if found else "–"
    other = len(found) - killed - count["survived"]
    cells = (
        name, len(mutations), len(found), killed, count["timeout"], count["survived"], other, rate,
        round(sum(r["seconds"] for r in found)),
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _short(text: str) -> str:
    """One line of a piece of code."""
    line = " ".join(text.split()).replace("`", "'")
    return line if len(line) <= 90 else line[:89] + "…"
