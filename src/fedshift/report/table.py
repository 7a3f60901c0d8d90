"""The table of an experiment: methods by targets, mean ± standard error over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from fedshift.errors import UserError
from fedshift.evaluation.cautions import (
    BASELINES,
    baselines,
    below_in_words,
    privacy_note,
    settings_note,
    unequal_work,
    warnings_of,
    work_note,
)
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.selection import RULES
from fedshift.evaluation.significance import share_sites
from fedshift.evaluation.summary import AVERAGE, Row, row_of, rows, with_samples
from fedshift.report import pairs
from fedshift.report.choice import Choice, choices_in_words
from fedshift.report.collect import Collected, at_common_tests, measures_each
from fedshift.report.conditions import Conditions, badges_of, scale_note, trained_note, used_notes
from fedshift.report.differences import LEVEL, Difference, differences
from fedshift.report.estimates import Estimates, sentences
from fedshift.report.like_for_like import NOTHING, Comparable, comparable, unlike_seeds
from fedshift.report.measures import ACCURACY, DISTANCES, MEASURES, METRICS, Measure, Note, measure_of
from fedshift.text import decimals, in_unit, join_names

WORST, GAP, SPREAD = "worst site", "gap between sites", "spread over sites"
_MOST_EXCEPTIONS = 6


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    row: Row  # the numbers
    best: bool  # whether its mean is the best of its column or not shown to be worse, while another one there is
    partial: bool  # whether it is an average over fewer targets than the table has
    unit: str = "%"  # as in `Measure`

    @property
    def mean(self) -> str:
        return self.format_number(self.row.mean) + ("*" if self.partial else "")

    @property
    def error(self) -> str | None:
        error = self.row.standard_error
        if error is None:
            return None
        return self.format_number(error) if self.unit else in_unit(error, like=self.row.mean)

    def format_number(self, number: float) -> str:
        """A number of this entry as it is printed."""
        return decimals(number, self.unit)


class IntervalCell(Cell):
    """An entry that shows the interval over samples."""

    @property
    def mean(self) -> str:
        low, high = self.row.interval or (0.0, 0.0)
        return f"{self.format_number(low)} to {self.format_number(high)}"

    @property
    def error(self) -> None:
        return None


@dataclass(frozen=True)
class Table:
    """Methods × targets."""

    select: Selection  # the selection rule whose round is shown
    measure: Measure  # what the numbers are
    methods: tuple[str, ...]  # the lines, in order
    columns: tuple[str, ...]  # the targets in order, then the average
    cells: dict[str, dict[str, Cell | None]]  # method → column → cell; None where nothing was measured
    rows: tuple[Row, ...]  # the numbers as a list
    notes: tuple[Note, ...]  # the sentences below the table
    more: tuple[Table, ...] = ()  # further tables that are shown below it, each with a title
    # method → what its row used that not all rows did, such as "pooled"
    badges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tests: tuple[Difference, ...] = ()  # every two methods compared, which decides what is marked as best
    ranked: Comparable = NOTHING  # the averages over the seeds that all methods have

    @property
    def sentences(self) -> tuple[str, ...]:
        """The notes in words."""
        return tuple(note.text for note in self.notes)

    def label(self, method: str) -> str:
        """The name of a line with its badges: "recipe (augmented)"."""
        badges = self.badges.get(method, ())
        return f"{method} ({', '.join(badges)})" if badges else method

    def plain_rows(self) -> list[dict[str, Any]]:
        """The rows for a file; ``used`` has a row's badges, where any row has one."""
        if not any(self.badges.values()):
            return [row.plain() for row in self.rows]
        return [{**row.plain(), "used": list(self.badges.get(row.method, ()))} for row in self.rows]


def table(
    results: Iterable[RunResult],
    select: Selection = "last",
    *,
    methods: Sequence[str] = (),
    targets: Sequence[str] = (),
    progress: str | None = None,
    measure: Measure | None = None,
) -> Table:
    """Arrange ``results`` as methods × targets, and mark in each column the best where others are shown to be worse.

    Args:
        select: the selection rule whose round is taken.
        methods: order of the methods. Methods that are not named follow in the order of first appearance.
        progress: how many runs are unfinished, for a note.
        measure: what the table reports. By default that of `headline`.

    Raises:
        UserError: the rule chose no round in any result.
    """
    results = list(results)
    measure = measure or headline(results)
    table_rows = rows(results, select, methods, targets, measure.value)
    if measure.metric:
        table_rows = with_samples(table_rows, results, measure.metric)
    if not table_rows and not (measure.metric and select == "last"):
        raise UserError(
            f"no result has a round selected by '{select}': the sources keep no held-out part; "
            "set protocol.test_fraction above 0, or use 'last'"
            if select == "source"
            else f"no result has a round selected by '{select}'"
        )
    names = tuple(dict.fromkeys([*methods, *(result.method for result in results)]))
    columns = (*dict.fromkeys([*targets, *(result.target for result in results)]), AVERAGE)
    by_place = {(row.method, row.target): row for row in table_rows}
    partial = {
        method for method in names if any((method, target) not in by_place for target in columns[:-1])
    }  # averages over different targets cannot be compared, so these are never the best
    every_two = [(first, second) for index, first in enumerate(names) for second in names[:index]]
    tests = tuple(differences(results, every_two, select, measure.value))
    best = _best(table_rows, partial, tests, measure.less_is_better)
    cells: dict[str, dict[str, Cell | None]] = {method: {} for method in names}
    for method in names:
        for column in columns:
            row = by_place.get((method, column))
            average_of_fewer = column == AVERAGE and method in partial
            cells[method][column] = Cell(row, (method, column) in best, average_of_fewer, measure.unit) if row else None
    ranked = comparable(results, columns[:-1], measure.value, select, names)
    notes = tuple(_notes(select, cells, columns, progress, measure) if measure.what else measure_notes(measure))
    if measure.what and ranked.unseen:
        text = f"{unlike_seeds(ranked, measure.repeat)}: their averages are not of the same runs."
        notes += (Note("seeds", text),)
    return Table(select, measure, names, columns, cells, tuple(table_rows), notes, tests=tests, ranked=ranked)


def measure_notes(measure: Measure) -> Iterator[Note]:
    """The notes that a measure has in place of the usual ones."""
    return (Note("measure", text) for text in measure.notes)


def headline(results: Sequence[RunResult]) -> Measure:
    """What methods are compared by in these results: accuracy, Dice coefficient, a harmonic mean of either, or RMSE.

    UserError if the runs are of several tasks.
    """
    if len({result.metric for result in results}) > 1:
        raise UserError(
            "these results are of several tasks, such as accuracies and Dice coefficients: keep their runs in separate "
            "folders"
        )
    if not results:
        return ACCURACY
    measures = pairs.HARMONIC_MEANS if all(result.labelled for result in results) else METRICS
    measure = measures[results[0].metric]
    return measure if measure.share_sites == (shared := share_sites(results)) else replace(measure, share_sites=shared)


def table_of(
    collected: Collected,
    used: Mapping[str, Conditions],
    estimates: Estimates,
    chosen: Sequence[Choice],
    select: Selection = "last",
    metric: str = "",
) -> Table:
    """The table of all collected runs, with further tables below it.

    Args:
        estimates: the accuracies to expect at targets without labels.
        chosen: whose model answers at targets without labels.
        select: the selection rule whose round is taken.
        metric: what the table reports, such as auroc; "": the experiment's headline.

    Raises:
        UserError: there is no such metric, or as in `table` and `headline`.
    """
    order, results = collected.order, collected.results
    arrange = partial(table, select=select, targets=order.targets)
    measure = _measure(collected, select, metric)
    whole = arrange(results, methods=order.methods, progress=collected.progress, measure=measure)
    both = measure in pairs.HARMONIC_MEANS.values()
    at_sites = select == "last" and any(result.sites for result in results)
    more = list(_other_measures(results, whole, both, arrange))
    if at_sites and not both:
        more += [*_intervals(whole), *_worst(whole, results)]
    more += _common_tests(collected, whole, arrange)
    notes = [*whole.notes, *_notes_on_rows(results, order.methods, used)]
    notes += [Note("estimate", text) for text in sentences(estimates)]
    notes += [Note("choice", text) for text in choices_in_words(chosen)]
    notes += _site_notes(results, measure) if at_sites else []
    rows = whole.rows
    if any(map(measures_each, results)):
        rows += tuple(row for below_it in more for row in below_it.rows if row.target not in whole.columns)
        notes.append(Note("average", "Average: the mean over the sites, each counts alike."))
    elif both:
        pair_rows = tuple(pairs.rows_of(results, rows, select))
        rows = pair_rows
        notes += pairs.notes(pair_rows, results[0].metric)
    badges = badges_of(used)
    below = tuple(replace(below_it, badges=badges) for below_it in more)
    return replace(whole, rows=rows, notes=tuple(notes), badges=badges, more=below)


def _notes_on_rows(
    results: Sequence[RunResult], methods: Sequence[str], used: Mapping[str, Conditions]
) -> Iterator[Note]:
    """What rows used and were trained with, so that readers see which are alike."""
    yield from used_notes(used, methods)
    yield from scale_note(results, methods)
    yield from trained_note(results, methods)
    yield from (Note("settings", text) for text in settings_note(results, methods))
    yield from (Note("privacy", text, (text.partition(": ")[2],)) for text in privacy_note(results, methods))
    alike = groupby(unequal_work(results, methods), key=lambda unequal: (unequal[0], unequal[2]))
    parts = [
        f"{method} {numbers}"
        if len(where := [target for _, target, _ in unequal]) > 1
        else f"{method} at {where[0]} {numbers}"
        for (method, numbers), unequal in alike
    ]
    yield from (Note("work", text, tuple(parts)) for text in work_note(results, methods))


def _other_measures(
    results: Sequence[RunResult], whole: Table, both: bool, arrange: Callable[..., Table]
) -> Iterator[Table]:
    """The tables of further measures: distances, and where both sides are measured those of either side."""
    for measure, chosen in pairs.beside(results) if both else [(measure, results) for measure in DISTANCES]:
        if measure is not whole.measure and any(measure.value(result, whole.select) is not None for result in chosen):
            methods = [name for name in whole.methods if any(result.method == name for result in chosen)]
            yield arrange(chosen, methods=methods, measure=measure)


def _common_tests(collected: Collected, whole: Table, arrange: Callable[..., Table]) -> Iterator[Table]:
    """The table of the test sets that no one trains on, where runs measure each site."""
    results = list(at_common_tests(run.result for run in collected.runs))
    if any(whole.measure.value(result, whole.select) is not None for result in results):
        measure = replace(whole.measure, title=f"{whole.measure.name} on common test sets")
        yield arrange(results, targets=(), methods=whole.methods, measure=measure)


def _measure(collected: Collected, select: Selection, metric: str) -> Measure:
    """The measure that was asked for, else the experiment's headline as far as it was measured in these rounds."""
    if metric:
        measure = measure_of(metric, collected.results)
        if select != "last" and measure.metric not in ("", collected.results[0].metric):
            raise UserError(f"--metric: {metric} is measured in the last round only: leave out --select")
        return measure
    named, usual = collected.order.headline, headline(collected.results)
    return MEASURES[named] if named != "accuracy" and select == "last" and usual is not METRICS["dice"] else usual


def _site_notes(results: Sequence[RunResult], measure: Measure) -> Iterator[Note]:
    """What a model without inputs would reach at every target, and warnings."""
    guesses = baselines(results)
    if guesses and measure.metric == results[0].metric:
        listing = join_names([f"{target} {decimals(number, measure.unit)}" for target, number in guesses.items()])
        yield Note("baseline", f"{BASELINES[results[0].metric]}: {listing}.")
    below = {text: (method, join_names(targets)) for method, targets, text in below_in_words(results)}
    for text in warnings_of(results):
        yield Note("below" if text in below else "warning", f"Warning: {text}.", below.get(text, ()))


def _intervals(whole: Table) -> Iterator[Table]:
    """The intervals over samples of the entries of ``whole``, for the methods that have some."""
    columns = whole.columns[:-1]
    cells: dict[str, dict[str, Cell | None]] = {
        method: {
            column: IntervalCell(cell.row, False, False, cell.unit)
            if (cell := line[column]) and cell.row.interval
            else None
            for column in columns
        }
        for method, line in whole.cells.items()
    }
    known = {method: line for method, line in cells.items() if any(line.values())}
    if known:
        note = (
            "Bootstrap over the target's samples (over groups where the data have them), bounds averaged over "
            f"{whole.measure.repeat}s: how far its few samples leave the number open."
        )
        title = f"{whole.measure.name}: 95 % intervals over samples"
        measure = replace(whole.measure, title=title, what="", notes=(note,))
        methods = tuple(method for method in whole.methods if method in known)
        yield Table(whole.select, measure, methods, columns, known, (), tuple(measure_notes(measure)))


def _worst(whole: Table, results: Sequence[RunResult]) -> Iterator[Table]:
    """The worst site of each method, and the gap between its best and its worst site."""
    measure, targets = whole.measure, whole.columns[:-1]
    if len(targets) < 2:
        return
    worst, best = (max, min) if measure.less_is_better else (min, max)
    table_rows, names = [], []
    for method in whole.methods:
        by_seed: dict[int, dict[str, float]] = {}
        for result in results:
            value = measure.value(result, whole.select) if result.method == method else None
            if value is not None:
                by_seed.setdefault(result.seed, {})[result.target] = value
        complete = [by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) == len(targets)]
        if complete:
            means = {target: fmean(by_target[target] for by_target in complete) for target in targets}
            names.append(f"{method} {worst(means, key=means.__getitem__)}")
            table_rows.append(
                row_of(method, WORST, whole.select, [worst(by_target.values()) for by_target in complete])
            )
            gaps = [abs(best(by_target.values()) - worst(by_target.values())) for by_target in complete]
            table_rows.append(row_of(method, GAP, whole.select, gaps))
            table_rows.append(
                row_of(method, SPREAD, whole.select, [stdev(by_target.values()) for by_target in complete])
            )
    columns = (WORST, GAP, SPREAD) if any(map(measures_each, results)) else (WORST, GAP)
    if table_rows:
        by_place = {(row.method, row.target): row for row in table_rows}
        cells: dict[str, dict[str, Cell | None]] = {
            method: {
                column: (Cell(row, False, False, measure.unit) if (row := by_place.get((method, column))) else None)
                for column in columns
            }
            for method in whole.methods
        }
        note = (
            f"Worst and gap of each {measure.repeat}, then their mean. The worst site on average: {', '.join(names)}."
        )
        note += " Spread: the standard deviation over the sites (n−1)." if SPREAD in columns else ""
        shown = replace(measure, title=f"{measure.name}: {', '.join(columns)}", what="", notes=(note,))
        rows_shown = tuple(table_rows) if SPREAD in columns else ()
        yield Table(whole.select, shown, whole.methods, columns, cells, rows_shown, tuple(measure_notes(shown)))


def _best(
    table_rows: Sequence[Row], partial: set[str], tested: Sequence[Difference], less_is_better: bool
) -> set[tuple[str, str]]:
    """(method, column) of what is best in each column, or not shown to be worse; none where no other is shown to be."""
    by_name = {test.name: test for test in tested}
    columns: dict[str, dict[str, float]] = {}
    for row in table_rows:
        if row.target != AVERAGE or row.method not in partial:
            columns.setdefault(row.target, {})[row.method] = -row.mean if less_is_better else row.mean
    best = set()
    for column, means in columns.items():
        top = max(means, key=means.__getitem__)
        worse = {name for name in means if means[name] < means[top] and _shown_to_differ(by_name, top, name, column)}
        best |= {(name, column) for name in means if worse and name not in worse}
    return best


def _shown_to_differ(tested: Mapping[str, Difference], first: str, second: str, column: str) -> bool:
    """Whether two rows differ by more than chance there: by either view on average, by that over seeds at a target."""
    difference = tested.get(f"{first} − {second}") or tested.get(f"{second} − {first}")
    if difference is None:
        return False
    return (
        column in difference.marked
        if column != AVERAGE
        else any(p is not None and p < LEVEL for p in (difference.corrected, difference.here))
    )


def _fewer(cells: dict[str, dict[str, Cell | None]], most: int) -> Iterator[str]:
    """What has fewer than ``most`` seeds: a method, if all its columns have equally few, else single columns."""
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
) -> Iterable[Note]:
    description = RULES[select].description
    yield Note(
        "selection", f"Selection: {description if measure.unit else description.replace('accuracy', measure.name)}."
    )
    present = [cell for line in cells.values() for cell in line.values() if cell is not None]
    if not present and cells:
        yield Note(
            "none",
            f"None of these runs has {measure.name}: they were made before it was measured, or cannot have it (one "
            "class at a target, no threshold). To have it, run the experiment again under another name.",
        )
    if not present:
        return
    most = max(cell.row.n for cell in present)
    if most == 1:
        text = f"{measure.what}, n = 1 {measure.repeat}, so there is no standard error."
        yield Note("repeats", text, (measure.what, f"1 {measure.repeat}", ""))
    else:
        fewer = list(_fewer(cells, most))
        more = f" and {len(fewer) - _MOST_EXCEPTIONS} more" if len(fewer) > _MOST_EXCEPTIONS else ""
        exceptions = f"{', '.join(fewer[:_MOST_EXCEPTIONS])}{more}"
        over = f"{measure.repeat}s"
        text = f"{measure.what}, mean ± standard error over {over} (n−1), n = {most} {over}"
        text += f", except {exceptions}." if fewer else "."
        yield Note("repeats", text, (measure.what, f"{most} {over}", exceptions))
    if any(cell.partial for cell in present):
        yield Note("partial", f"* average over fewer than the table's {len(columns) - 1} targets: not comparable.")
    if progress:
        yield Note("progress", f"{progress[0].upper()}{progress[1:]}.")


MOST_COLUMNS = 30
"""So many targets have a column each."""
_WORST = 5


def with_worst_columns(table: Table) -> Table:
    """The table and those below it, of more than `MOST_COLUMNS` targets with the columns of the worst few alone.

    The rows keep all targets, for files.
    """
    if len(_targets(table)) <= MOST_COLUMNS:
        return table
    return _with(table, _worst_targets(table), noted=True)


def _targets(table: Table) -> tuple[str, ...]:
    return tuple(column for column in table.columns if column != AVERAGE)


def _worst_targets(table: Table) -> frozenset[str]:
    """The targets with the worst means over the methods."""
    means = {}
    for column in _targets(table):
        cells = (line[column] for line in table.cells.values())
        if means_of_target := [cell.row.mean for cell in cells if cell is not None]:
            means[column] = fmean(means_of_target)
    return frozenset(sorted(means, key=means.__getitem__, reverse=table.measure.less_is_better)[:_WORST])


def _with(table: Table, named: frozenset[str], *, noted: bool = False) -> Table:
    """The table with these targets alone, and the average."""
    more = tuple(_with(below, named) if len(_targets(below)) > MOST_COLUMNS else below for below in table.more)
    columns = tuple(column for column in table.columns if column in named or column == AVERAGE)
    cells = {method: {column: line[column] for column in columns} for method, line in table.cells.items()}
    number = len(_targets(table))
    text = f"The {len(named)} worst of {number} targets have a column; files in CSV and JSON have all."
    notes = (Note("few", text), *table.notes) if noted else table.notes
    return replace(table, columns=columns, cells=cells, notes=notes, more=more)
