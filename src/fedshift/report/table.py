"""The table of an experiment: methods by targets, mean ± standard error over seeds; four ways to write it down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.selection import RULES
from fedshift.evaluation.summary import AVERAGE, Row, rows
from fedshift.report import pairs
from fedshift.report.collect import Collected
from fedshift.report.measures import ACCURACY, HAUSDORFF, METRICS, Measure

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table as Grid
    from rich.text import Text

MISSING = "–"
_MOST_EXCEPTIONS = 6


@dataclass(frozen=True)
class Cell:
    """One entry. ``best``: best of its column as printed. ``partial``: an average that lacks some of the targets."""

    row: Row
    best: bool
    partial: bool

    @property
    def mean(self) -> str:
        return f"{self.row.mean:.2f}" + ("*" if self.partial else "")

    @property
    def error(self) -> str | None:
        return None if self.row.standard_error is None else f"{self.row.standard_error:.2f}"


@dataclass(frozen=True)
class Table:
    """A matrix of cells: ``cells[method][column]``, None where nothing was measured; the last column is the average.

    measure: what the numbers are. more: tables that are shown beneath it, with titles of their own.
    """

    select: Selection
    measure: Measure
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[str, dict[str, Cell | None]]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    more: tuple[Table, ...] = ()


def table(
    results: Iterable[RunResult],
    select: Selection = "last",
    *,
    methods: Sequence[str] = (),
    targets: Sequence[str] = (),
    progress: str | None = None,
    measure: Measure | None = None,
) -> Table:
    """Arrange ``results`` as methods × targets and mark the best of each column.

    Args:
        results: finished runs.
        select: the selection rule whose round is taken.
        methods: order of the methods (else that of first appearance).
        targets: order of the targets, likewise.
        progress: what is unfinished; becomes a note.
        measure: what the table is about; else what the runs are compared by.

    Raises:
        UserError: the rule chose no round in any result.
    """
    results = list(results)
    measure = measure or headline(results)
    found = rows(results, select, methods, targets, measure.value)
    if not found:
        raise UserError(
            f"no result has a round selected by '{select}': the sources keep no held-out part; "
            "set protocol.test_fraction above 0, or use 'last'"
            if select == "source"
            else f"no result has a round selected by '{select}'"
        )
    names = tuple(dict.fromkeys([*methods, *(result.method for result in results)]))
    columns = (*dict.fromkeys([*targets, *(result.target for result in results)]), AVERAGE)
    by_place = {(row.method, row.target): row for row in found}
    partial = {
        method for method in names if any((method, target) not in by_place for target in columns[:-1])
    }  # averages over other targets cannot be compared, so they compete for nothing
    best = _best(found, partial, min if measure.less_is_better else max)
    cells: dict[str, dict[str, Cell | None]] = {method: {} for method in names}
    for method in names:
        for column in columns:
            row = by_place.get((method, column))
            average_of_fewer = column == AVERAGE and method in partial
            cells[method][column] = Cell(row, (method, column) in best, average_of_fewer) if row else None
    notes = tuple(_notes(select, cells, columns, progress, measure)) if measure.what else measure.notes
    return Table(select, measure, names, columns, cells, tuple(found), notes)


def headline(results: Sequence[RunResult]) -> Measure:
    """What runs are compared by. Raises UserError where some classify and some segment."""
    if len({result.metric for result in results}) > 1:
        raise UserError("some of these results are accuracies and some Dice coefficients: no table can hold both")
    if not results:
        return ACCURACY
    return (pairs.HARMONIC_MEANS if all(result.labelled for result in results) else METRICS)[results[0].metric]


def table_of(collected: Collected, select: Selection = "last") -> Table:
    """The table of everything that `collect` found. Raises as `table` does."""
    order, results = collected.order, collected.results
    whole = table(results, select, methods=order.methods, targets=order.targets, progress=collected.progress)
    whole = replace(whole, notes=(*whole.notes, *settings_note(results, order.methods)))
    both = whole.measure in pairs.HARMONIC_MEANS.values()
    more = []
    for measure, chosen in pairs.beside(results) if both else [(HAUSDORFF, results)]:
        if any(measure.value(result, select) is not None for result in chosen):
            methods = [name for name in order.methods if any(result.method == name for result in chosen)]
            more.append(table(chosen, select, methods=methods, targets=order.targets, measure=measure))
    whole = replace(whole, more=tuple(more))
    if not both:
        return whole
    found = tuple(pairs.rows_of(results, whole.rows, select))
    return replace(whole, rows=found, notes=(*whole.notes, *pairs.notes(found, results[0].metric)))


def settings_note(results: Iterable[RunResult], methods: Sequence[str]) -> Iterator[str]:
    """Which setting each method ran with, where records say so and it is not the paper's."""
    results, named = list(results), dict[str, dict[str, None]]()
    for result in results:
        if result.setting not in ("", "paper"):
            named.setdefault(result.method, {})[result.setting] = None
    if named:
        rows = (f"{method}: {' / '.join(named[method])}" for method in methods if method in named)
        rest = ", the paper's where nothing is said" if all(result.setting for result in results) else " on record"
        yield f"Settings{rest}: {'; '.join(rows)}."


def _best(found: Sequence[Row], partial: set[str], choose: Callable[[Iterable[float]], float]) -> set[tuple[str, str]]:
    """Where the best mean of each column stands, as printed: equal figures share it, a lone entry beats none."""
    columns: dict[str, list[Row]] = {}
    for row in found:
        if row.target != AVERAGE or row.method not in partial:
            columns.setdefault(row.target, []).append(row)
    best = set()
    for column, entries in columns.items():
        if len(entries) > 1:
            top = choose(round(row.mean, 2) for row in entries)
            best |= {(row.method, column) for row in entries if round(row.mean, 2) == top}
    return best


def _fewer(cells: dict[str, dict[str, Cell | None]], most: int) -> Iterator[str]:
    """Where there are fewer seeds than ``most``: a method, if it is so everywhere alike, else its columns."""
    for method, line in cells.items():
        numbers = {column: cell.row.n for column, cell in line.items() if cell is not None}
        if len(set(numbers.values())) == 1 and len(numbers) > 1:
            yield from [f"{method} ({number})" for number in set(numbers.values()) if number < most]
        else:
            yield from [f"{method} at {column} ({number})" for column, number in numbers.items() if number < most]


def _notes(
    select: Selection,
    cells: dict[str, dict[str, Cell | None]],
    columns: Sequence[str],
    progress: str | None,
    measure: Measure,
) -> Iterable[str]:
    yield f"Selection: {RULES[select].description}."
    present = [cell for line in cells.values() for cell in line.values() if cell is not None]
    most = max(cell.row.n for cell in present)
    if most == 1:
        yield f"{measure.what}, n = 1 {measure.repeat}, so there is no standard error."
    else:
        fewer = list(_fewer(cells, most))
        more = f" and {len(fewer) - _MOST_EXCEPTIONS} more" if len(fewer) > _MOST_EXCEPTIONS else ""
        exceptions = f", except {', '.join(fewer[:_MOST_EXCEPTIONS])}{more}" if fewer else ""
        over = f"{measure.repeat}s"
        yield f"{measure.what}, mean ± standard error over {over} (n−1), n = {most} {over}{exceptions}."
    if any(cell.partial for cell in present):
        yield f"* average over fewer than the table's {len(columns) - 1} targets: not comparable."
    if progress:
        yield f"{progress[0].upper()}{progress[1:]}."


def terminal(table: Table) -> RenderableType:
    """For people: print it with a `rich.console.Console`. Where the screen is too narrow, one line per entry."""
    from rich.console import Group

    return Group(*(part for one in (table, *table.more) for part in _titled(one)))


def _titled(table: Table) -> Iterable[RenderableType]:
    from rich.text import Text

    if table.measure.title:
        yield Text(table.measure.title, style="bold")
    yield _Fitting(table)
    yield from (Text(note, style="dim") for note in table.notes)


@dataclass(frozen=True)
class _Fitting:
    """The matrix if the screen can hold it without cutting a number, else its entries below each other."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        matrix = self._matrix()
        # A measurement never exceeds the width that it is given, so it is taken on an endless screen.
        needed = Measurement.get(console, options.update(max_width=100_000), matrix).minimum
        fits = needed <= options.max_width
        yield matrix if fits else self._list()

    def _matrix(self) -> Grid:
        grid = _grid()
        grid.add_column("method", min_width=max(map(len, ("method", *self.table.methods))))
        for column in self.table.columns:
            # Where the screen is narrow the standard error slips below its mean; the number itself is never cut.
            grid.add_column(_plain(column), justify="right", min_width=max(6, len(column)))
        for method in self.table.methods:
            grid.add_row(_plain(method), *map(_rich_entry, self.table.cells[method].values()))
        return grid

    def _list(self) -> Grid:
        grid = _grid("method", "target")
        grid.add_column(self.table.measure.name.lower(), justify="right", no_wrap=True)
        for method in self.table.methods:
            for column, cell in self.table.cells[method].items():
                grid.add_row(_plain(method), _plain(column), _rich_entry(cell))
        return grid


def _grid(*names: str) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        grid.add_column(name, overflow="fold")
    return grid


def _plain(text: str) -> Text:
    """Text in which brackets are brackets and not markup."""
    from rich.text import Text

    return Text(text)


def _rich_entry(cell: Cell | None) -> Text:
    from rich.text import Text

    if cell is None:
        return Text(MISSING, style="dim")
    return Text.assemble((cell.mean, "bold" if cell.best else ""), (f" ±{cell.error}" if cell.error else "", "dim"))


def markdown(table: Table) -> str:
    """A pipe table with its notes beneath; where there are more tables, each under its title."""
    return "\n".join(_pipes(one) for one in (table, *table.more))


def _pipes(table: Table) -> str:

    def entry(cell: Cell | None) -> str:
        if cell is None:
            return MISSING
        mean = cell.mean.replace("*", "\\*")
        return (f"**{mean}**" if cell.best else mean) + (f" ± {cell.error}" if cell.error else "")

    def escape(text: str) -> str:
        return "".join(f"\\{letter}" if letter in "\\|*_`<[" else letter for letter in text)

    lines = [
        ["method", *map(escape, table.columns)],
        ["---", *("---:" for _ in table.columns)],
        *([escape(method), *map(entry, table.cells[method].values())] for method in table.methods),
    ]
    grid = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    title = [f"**{escape(table.measure.title)}**"] if table.measure.title else []
    return "\n\n".join([*title, grid, *map(escape, table.notes)]) + "\n"


def latex(table: Table) -> str:
    """A `table` environment for each table; they need the package booktabs."""
    return "\n".join(_environment(one) for one in (table, *table.more))


def _environment(table: Table) -> str:

    def entry(cell: Cell | None) -> str:
        if cell is None:
            return "--"
        return (rf"\textbf{{{cell.mean}}}" if cell.best else cell.mean) + (
            rf" $\pm$ {cell.error}" if cell.error else ""
        )

    title = [f"{table.measure.title}."] if table.measure.title else []
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\caption{" + " ".join(map(escape_latex, [*title, *table.notes])) + "}",
        r"\begin{tabular}{l" + "r" * len(table.columns) + "}",
        r"\toprule",
        " & ".join(["method", *map(escape_latex, table.columns)]) + r" \\",
        r"\midrule",
        *(
            " & ".join([escape_latex(method), *map(entry, table.cells[method].values())]) + r" \\"
            for method in table.methods
        ),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    **{letter: "\\" + letter for letter in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """``text`` so that LaTeX prints it as it stands.

    >>> escape_latex("csac_v1 & 50%")
    'csac\\\\_v1 \\\\& 50\\\\%'
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def as_json(table: Table) -> str:
    """A list of rows `{method, target, select, n, mean, standard_error, seeds}`; see `Row`, and for pairs `PairRow`."""
    return json.dumps([row.model_dump() for row in table.rows], indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "latex": latex, "json": as_json}
"""The formats that are plain text; `terminal` gives what rich prints."""
