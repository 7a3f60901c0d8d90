"""The tables of a result page: few words, since README.md says once what all of them have in common.

A page has the numbers and what each adds to the baseline. Intervals, settings, accuracies by kind of site and every
difference stand in a file of their own. Notes become columns and rows where they are numbers. What is left of them is
one line below the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from fedshift.evaluation.cautions import BASELINES, baselines, settings_note
from fedshift.evaluation.records import RunResult, Selection
from fedshift.report.collect import Collected
from fedshift.report.conditions import Conditions, conditions
from fedshift.report.measures import ACCURACY, MISSING
from fedshift.report.table import WORST, Cell, IntervalCell, Table, table_of
from fedshift.report.table_formats import escape_markdown
from fedshift.text import listed

WITHOUT_INPUTS = {
    "accuracy": "the most frequent class",
    "rmse": "the mean of the sources",
    "concordance": "chance",
    "label_accuracy": "the more frequent answers",
}
"""What the last row of a table is, by metric."""
_VERSIONS = ("torch 2.15.0", "numpy 2.4.6")
"""Those that README.md gives for all tables, with one thread."""
_REPEATS = re.compile(r"^(.+?), (?:mean ± standard error over \w+ \(n−1\), )?n = (\d+ \w+)(.*)\.$")
_USUAL = (ACCURACY.what, "Harmonic mean, per split")
_IN_COLUMNS = ("Optimiser steps", "Exchanges, and MB", "Settings", "Used, beyond", *BASELINES.values())
_SAID_ONCE = ("Selection: last round.", "* average over fewer", "Average: the mean over", "Points over the model")
_ELSEWHERE = re.compile(r"^\d+ of \d+ runs unfinished\.$|^2\(1 − 2ε\)")
_NUMBERED = {
    "Harmonic mean of the average accuracies": "of the averages",
    "Win-win gain of the unlabelled sites": "gain of unlabelled",
}
"""Notes of pairs of sites with a number for each method, and the columns that they become."""
_BELOW = re.compile(r"^Warning: (\S+) (?:is less accurate than always saying .*?|orders worse than chance) at (.+)\.$")
_COLUMN = re.compile(r"^Warning: column (\d+) (is coded otherwise|never changes) at some sites: .*$")
Column = tuple[str, Callable[[str], str]]
"""A head, and the entry of each method."""
_CHECKS = {"is coded otherwise": "Coded otherwise", "never changes": "Constant"}


def page_table(found: Collected, select: Selection, warned: set[str], gains: Sequence[Column], link: str) -> str:
    """The table of an experiment, what each row adds, and one line of what only it has.

    Args:
        found: the runs.
        select: the selection rule whose round is shown.
        warned: the warnings that the page has so far, for it has each once; those of this table are added.
        gains: what each method adds to the baseline.
        link: to the file of what the page leaves out; "" for none.
    """
    whole = table_of(found, select)
    used = conditions(found.results) if select == "last" else {}
    more = [*gains, *_worst(whole), *_numbered(whole), *_costs(whole, used)]
    corner = ", ".join([*_corner(whole, found), *([link] if link else [])])
    grids = [_grid(whole, corner, more, _last_row(whole, found.results))]
    grids += [_grid(one, escape_markdown(one.measure.title)) for one in whole.more if _on_page(one)]
    notes = [note for note in _notes(whole, used, found.results[0].metric) if note not in warned]
    warned.update(note for note in notes if note.startswith("Warning"))
    notes += [f"**{found.unfinished} of {found.planned} runs are still to come.**"] if found.unfinished else []
    return "\n\n".join([*grids, " ".join(notes)]).rstrip()


def details(found: Collected, select: Selection) -> list[str]:
    """The tables of an experiment that its page leaves out: intervals, further accuracies, settings."""
    whole = table_of(found, select)
    further = [one for one in whole.more if WORST not in one.columns and not _on_page(one)]
    grids = [_grid(one, escape_markdown(one.measure.title)) for one in further]
    settings = list(_settings(found.results, whole.methods)) if select == "last" else []
    return [*grids, *([_pipes(["method", "setting"], settings, rule="---")] if settings else [])]


def _on_page(table: Table) -> bool:
    return table.measure.title.startswith("Win-win gain")


def _corner(whole: Table, found: Collected) -> Iterator[str]:
    """What the numbers are unless accuracies, repeats, runs, hours, and versions and threads that are unusual."""
    results = found.results
    if whole.measure.title:
        yield escape_markdown(whole.measure.title)
    for note in whole.notes:
        if match := _REPEATS.match(note):
            if not note.startswith(_USUAL):
                yield match[1]
            yield f"up to {match[2]}" if match[3].startswith(", except") else match[2]
    yield f"{len(results)} runs"
    yield f"{sum(result.seconds for result in results) / 3600:.1f} hours"
    versions = sorted({f"{name} {result.versions[name]}" for result in results for name in ("torch", "numpy")})
    yield from versions if set(versions) - set(_VERSIONS) else ()
    threads = {str(result.threads) for result in results}
    yield from [f"{'/'.join(sorted(threads))} threads"] if threads != {"1"} else ()


def _grid(table: Table, corner: str, more: Sequence[Column] = (), last: Sequence[str] = ()) -> str:
    head = [corner, *map(escape_markdown, table.columns)]
    lines = [
        [
            escape_markdown(table.label(name)),
            *map(_entry, table.cells[name].values()),
            *(entry(name) for _, entry in more),
        ]
        for name in table.methods
    ]
    rest = [MISSING] * (len(head) + len(more) - len(last))
    return _pipes([*head, *(name for name, _ in more)], [*lines, *([[*last, *rest]] if last else [])])


def _pipes(head: Sequence[str], lines: Sequence[Sequence[str]], rule: str = "---:") -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---", *(rule for _ in head[1:])], *lines])


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    mean = cell.mean.replace("*", "\\*")
    return (f"**{mean}**" if cell.best else mean) + (f" ± {cell.error}" if cell.error else "")


def _worst(whole: Table) -> Iterator[Column]:
    """Worst site, gap and spread, which have a table of their own elsewhere."""
    for table in whole.more:
        if WORST in table.columns:
            for column in table.columns:
                yield column, partial(_of_cell, table, column)


def _of_cell(table: Table, column: str, name: str) -> str:
    return _entry(table.cells[name][column])


def _numbered(whole: Table) -> Iterator[Column]:
    for note in whole.notes:
        for start, head in _NUMBERED.items():
            if note.startswith(start):
                numbers = re.findall(r" ([+−]?\d+\.\d+)(?=[,.])", note)
                by_name = dict(zip(whole.methods, numbers, strict=True))
                yield head, by_name.__getitem__


def _costs(whole: Table, used: dict[str, Conditions]) -> Iterator[Column]:
    """Exchanges and bytes, and steps where rows could differ in them."""
    if any(row.sent for row in used.values()):
        yield "exchanges", lambda name: f"{used[name].exchanges:,.0f}" if name in used else MISSING
        yield "MB", lambda name: f"{used[name].sent / 1e6:,.2f}" if name in used else MISSING
    if any(note.startswith("Optimiser steps") for note in whole.notes) and used:
        yield "steps", lambda name: f"{steps:,.0f}" if name in used and (steps := used[name].steps) else MISSING


def _last_row(whole: Table, results: Sequence[RunResult]) -> list[str]:
    metric = results[0].metric
    if metric not in BASELINES or not any(note.startswith(BASELINES[metric]) for note in whole.notes):
        return []
    known = baselines(results)
    shown = next(cell for line in whole.cells.values() for cell in line.values() if cell).shown
    entries = [shown(known[column]) if column in known else MISSING for column in whole.columns]
    return [f"*{WITHOUT_INPUTS[metric]}*", *entries]


def _settings(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[list[str]]:
    for method in methods:
        for note in settings_note([one for one in results if one.method == method], [method]):
            yield [escape_markdown(method), escape_markdown(note.split(": ", 2)[2].removesuffix("."))]


def _notes(whole: Table, used: dict[str, Conditions], metric: str) -> Iterator[str]:
    """What only this table has to say, in short sentences."""
    tables = [one for one in whole.more if one.columns and not _intervals(one) and WORST not in one.columns]
    notes = list(dict.fromkeys([*whole.notes, *chain.from_iterable(one.notes for one in tables)]))
    kept = [note for note in notes if not note.startswith((*_IN_COLUMNS, *_SAID_ONCE, *_NUMBERED))]
    kept = [note for note in kept if not _ELSEWHERE.match(note)]
    common = set.intersection(*(set(row.badges) for row in used.values())) if len(used) > 1 else set()
    if common:
        yield f"All rows: {', '.join(sorted(common))}."
    if any("not all of these images" in note for note in notes):
        yield "Not all images were augmented alike."
    below = [match.groups() for note in kept if (match := _BELOW.match(note))]
    columns: dict[str, list[str]] = {}
    for match in filter(None, map(_COLUMN.match, kept)):
        columns.setdefault(_CHECKS[match[2]], []).append(match[1])
    for note in kept:
        if not (_BELOW.match(note) or _COLUMN.match(note)):
            yield from map(escape_markdown, _shorter(note))
    if below:
        yield f"**Below {WITHOUT_INPUTS[metric]}**: {escape_markdown(_places(below, whole))}."
    for what, numbers in columns.items():
        yield f"{what} at some sites: columns {listed(numbers)}."


def _places(below: Sequence[tuple[str | Any, ...]], whole: Table) -> str:
    """Where rows are below what a model without inputs would reach."""
    rows: dict[str, list[str]] = {}
    for name, where in below:
        rows.setdefault(re.sub(r" [(][^)]*[)]", "", where), []).append(name)
    every = len(whole.methods)
    parts = (f"{'every row' if len(names) == every else ', '.join(names)} at {where}" for where, names in rows.items())
    return "; ".join(parts)


def _intervals(table: Table) -> bool:
    return any(isinstance(cell, IntervalCell) for line in table.cells.values() for cell in line.values())


def _shorter(note: str) -> Iterator[str]:
    """A note without what all tables share, which may be all of it."""
    if match := _REPEATS.match(note):
        if match[3].startswith(", except"):
            yield f"Fewer {match[2].split()[1]}: {match[3].removeprefix(', except ')}."
    elif note.startswith("Not equal work"):
        yield re.sub(r"(\S+) at \S+ (\d+ [(]most \d+[)])(?:; \1 at \S+ \2)+", r"\1 \2", note)
    elif note.startswith("Rows that explain"):
        head, parts = note.removesuffix(".").split(": ", 1)
        ran = [part for part in parts.split("; ") if not part.endswith("not run")]
        if ran:
            yield f"{head}: {'; '.join(ran)}; no others."
    else:
        yield note.replace("Differential privacy of each site's training samples, in each run: ", "Each run: ")
