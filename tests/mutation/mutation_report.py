"""The report of a mutation run, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mutations import Mutation

KILLED = ("killed", "timeout")
"""What counts as noticed. A test that never ends is noticed, too; the report counts it apart."""


def markdown(mutations: list[Mutation], results: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """Kill rate as a whole and by area, and every mutation that no test noticed."""
    lines = [
        "# Deliberate mistakes, and whether a test noticed",
        "",
        "Written by `make mutation` (`tests/mutation/run.py`); the mistakes are listed in `tests/mutation/lists/`.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        "| area | mutations | run | killed | by time-out | survived | other | kill rate | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    areas = sorted({mutation.area for mutation in mutations})
    for area in areas:
        lines.append(_row(area, [m for m in mutations if m.area == area], results))
    lines.append(_row("**all**", mutations, results))
    bad = [m for m in mutations if m.name in results and results[m.name]["status"] not in KILLED]
    lines += ["", "## Not noticed", ""]
    lines += [f"- `{m.name}` ({results[m.name]['status']}): `{_short(m.old)}` → `{_short(m.new)}`" for m in bad]
    if not bad:
        lines.append("None.")
    return "\n".join(lines) + "\n"


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
