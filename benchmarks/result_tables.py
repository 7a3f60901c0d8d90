"""The tables of a result page: few words, since README.md says once what all of them have in common.

A page has each method's average, the published one, what it adds to the baseline, and its worst site. A command prints
the rest: every site, intervals, settings, bytes, steps, accuracies by kind of site and all differences. Notes become
columns and rows where they are numbers. What is left of them is one line below the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from fedshift.evaluation.cautions import baselines, settings_of
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.summary import AVERAGE
from fedshift.report.collect import Collected
from fedshift.report.conditions import Conditions, common_badges
from fedshift.report.measures import ACCURACY, MISSING, Kind, Note
from fedshift.report.pairs import PairRow
from fedshift.report.report import report_of
from fedshift.report.table import WORST, IntervalCell, Table
from fedshift.report.table_formats import markdown_entry
from fedshift.text import escape_markdown, join_names, pipes

WITHOUT_INPUTS = {
    "accuracy": "the most frequent class",
    "rmse": "the mean of the sources",
    "concordance": "chance",
    "label_accuracy": "the more frequent answers",
}
"""What the last row of a table is, by metric."""
_VERSIONS = ("torch 2.15.0", "numpy 2.4.6")
"""Those that README.md gives for all tables, with one thread."""
_FEW = 3
"""Up to so many columns, a page shows each site."""
_USUAL = (ACCURACY.what, "Harmonic mean, per split")
_ELSEWHERE = frozenset[Kind](
    [
        "average",
        "baseline",
        "below",
        "explained",
        "gain",
        "harmonic",
        "measure",
        "partial",
        "progress",
        "sent",
        "settings",
        "steps",
    ]
)
"""Notes that are columns or rows here, or that README.md says once."""
_SHORTER: Mapping[Kind, str] = {
    "privacy": "Each run: {}",
    "repeats": "Fewer {}.",
    "scale": "Each site in its own scale.",
    "used": "{}",
    "work": "Not equal work, in mini-batches per source: {}.",
}
"""Notes in fewer words, with one of their parts, if they have any; none where that part is empty."""
_COLUMN = re.compile(r"^Warning: column (\d+) (is coded otherwise|never changes|has 0) (?:at some sites: |in ).*$")
"""A warning of a record."""
_CHECKS = {"is coded otherwise": "Coded otherwise", "never changes": "Constant", "has 0": "0 may mean missing"}
Column = tuple[str, Callable[[str], str]]
"""A head, and the entry of each method."""


def page_table(
    name: str,
    collected: Collected,
    select: Selection,
    warned: set[str],
    gains: Sequence[Column],
    *,
    sites: bool = False,
    only: Sequence[str] = (),
) -> str:
    """The table of an experiment, what each row adds, and one line of what only it has.

    Args:
        name: that of the results.
        collected: the runs.
        select: the selection rule whose round is shown.
        warned: the warnings that the page has so far, for it has each once; those of this table are added.
        gains: what each method adds to the baseline, and published averages.
        sites: every site has a column, however many there are.
        only: the rows that are shown; all by default.
    """
    report = report_of(collected, select)
    whole, used = report.table, report.used if select == "last" else {}
    worst = [column for column in _worst(whole) if column[0] == WORST]
    labelled: list[Column] = [
        (table.measure.title, partial(_of_cell, table, AVERAGE)) for table in whole.more if _on_page(table)
    ]
    more = [*gains, *labelled, *worst, *_number_columns(whole)]
    shown, last = whole, _last_row(whole, collected.results)
    if only:
        shown = replace(whole, methods=tuple(name for name in whole.methods if name in only))
    if not sites and len(whole.columns) > _FEW and AVERAGE in whole.columns:
        shown, last = replace(shown, columns=(AVERAGE,)), []
    grid = _grid(shown, ", ".join(_corner(whole, collected, costs=False)), more, last)
    notes = [note for note in _notes(whole, used, collected.results[0].metric) if note not in warned]
    warned.update(note for note in notes if note.startswith("Warning"))
    if left := len(whole.methods) - len(shown.methods):
        notes.append(f"{left} more row{'s' * (left > 1)} in `{name}`.")
    notes += (
        [f"**{collected.unfinished} of {collected.planned} runs are still to come.**"] if collected.unfinished else []
    )
    return "\n\n".join([grid, " ".join(notes)]).rstrip()


def details(collected: Collected, select: Selection) -> list[str]:
    """The tables of an experiment in full: every site, intervals, further accuracies, settings."""
    whole = report_of(collected, select).table
    further = [table for table in whole.more if WORST not in table.columns]
    grids = [_grid(whole, ", ".join(_corner(whole, collected)), [*_worst(whole)], _last_row(whole, collected.results))]
    grids += [_grid(table, escape_markdown(table.measure.title)) for table in further]
    settings = list(_settings(collected.results, whole.methods)) if select == "last" else []
    return [*grids, *([pipes(["method", "setting"], settings, "---")] if settings else [])]


def _on_page(table: Table) -> bool:
    return table.measure.title.startswith("Win-win gain")


def _corner(whole: Table, collected: Collected, *, costs: bool = True) -> Iterator[str]:
    """What the numbers are unless accuracies, repeats, runs, hours, and versions and threads that are unusual."""
    results = collected.results
    if whole.measure.title:
        yield escape_markdown(whole.measure.title)
    for note in whole.notes:
        if note.kind == "repeats":
            what, repeats, fewer = note.parts
            if not what.startswith(_USUAL):
                yield what
            yield f"up to {repeats}" if fewer else repeats
    if costs:
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
            *(markdown_entry(table.cells[name][column]) for column in table.columns),
            *(entry(name) for _, entry in more),
        ]
        for name in table.methods
    ]
    rest = [MISSING] * (len(head) + len(more) - len(last))
    return pipes([*head, *(name for name, _ in more)], [*lines, *([[*last, *rest]] if last else [])])


def _worst(whole: Table) -> Iterator[Column]:
    """Worst site, gap and spread, which have a table of their own elsewhere."""
    for table in whole.more:
        if WORST in table.columns:
            for column in table.columns:
                yield column, partial(_of_cell, table, column)


def _of_cell(table: Table, column: str, name: str) -> str:
    return markdown_entry(table.cells[name][column])


def _number_columns(whole: Table) -> Iterator[Column]:
    """Numbers of pairs of sites that notes have elsewhere."""
    averages = {row.method: row for row in whole.rows if isinstance(row, PairRow) and row.target == AVERAGE}
    kinds = {note.kind for note in whole.notes}
    if "harmonic" in kinds:
        yield "of the averages", lambda name: f"{averages[name].harmonic_mean_of_averages:.2f}"
    if "gain" in kinds:
        yield "gain of unlabelled", lambda name: f"{averages[name].gain['unlabelled']:+.2f}".replace("-", "−")


def _last_row(whole: Table, results: Sequence[RunResult]) -> list[str]:
    metric = results[0].metric
    if not any(note.kind == "baseline" for note in whole.notes):
        return []
    known = baselines(results)
    shown = next(cell for line in whole.cells.values() for cell in line.values() if cell).format_number
    entries = [shown(known[column]) if column in known else MISSING for column in whole.columns]
    return [f"*{WITHOUT_INPUTS[metric]}*", *entries]


def _settings(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[list[str]]:
    for pair in settings_of(results, methods).items():
        yield [*map(escape_markdown, pair)]


def _notes(whole: Table, used: Mapping[str, Conditions], metric: str) -> Iterator[str]:
    """What only this table has to say, in short sentences."""
    tables = [table for table in whole.more if table.columns and not _intervals(table) and WORST not in table.columns]
    notes = list(dict.fromkeys([*whole.notes, *chain.from_iterable(table.notes for table in tables)]))
    if common := common_badges(used):
        yield f"All rows: {', '.join(sorted(common))}."
    columns: dict[str, list[str]] = {}
    for note in sorted(notes, key=lambda note: note.kind != "used"):
        if match := _COLUMN.match(note.text):
            columns.setdefault(_CHECKS[match[2]], []).append(match[1])
        elif note.kind not in _ELSEWHERE and not (note.kind == "selection" and whole.select == "last"):
            yield from _shorter(note)
    if below := [note.parts for note in notes if note.kind == "below"]:
        yield f"**Below {WITHOUT_INPUTS[metric]}**: {escape_markdown(_places(below, whole))}."
    for what, numbers in columns.items():
        yield f"{what} at some sites: columns {join_names(numbers)}."


def _places(below: Sequence[tuple[str, ...]], whole: Table) -> str:
    """Where rows are below what a model without inputs would reach."""
    rows: dict[str, list[str]] = {}
    for name, where in below:
        rows.setdefault(where, []).append(name)
    every = len(whole.methods)
    parts = (f"{'every row' if len(names) == every else ', '.join(names)} at {where}" for where, names in rows.items())
    return "; ".join(parts)


def _intervals(table: Table) -> bool:
    return any(isinstance(cell, IntervalCell) for line in table.cells.values() for cell in line.values())


def _shorter(note: Note) -> Iterator[str]:
    """A note without what all tables share, which may be all of it."""
    parts = note.parts
    if note.kind == "repeats":
        parts = (f"{parts[1].split()[1]}: {parts[2]}",) if parts[2] else ()
    if note.kind in _SHORTER:
        text = _SHORTER[note.kind]
        yield from [escape_markdown(text.format("; ".join(parts)))] if parts or "{}" not in text else []
    else:
        yield escape_markdown(note.text)
