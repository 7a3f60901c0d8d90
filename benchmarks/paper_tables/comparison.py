"""Numbers of finished runs beside the published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.evaluation.records import RoundRecord, RunResult, Selection
from fedshift.evaluation.significance import TTest, compare
from fedshift.evaluation.stored import ROUNDS, is_finished, read_rounds, run_folders
from fedshift.evaluation.summary import AVERAGE, Value, rows
from fedshift.report.collect import collect
from paper_tables.catalogue import Catalogue, CellSource, Entry, Panel, Quantity


def _megabytes(result: RunResult, _: Selection) -> float:
    return (sum(result.bytes_up.values()) + sum(result.bytes_down.values())) / 1e6


VALUES: dict[Quantity, Value] = {
    "score": RunResult.score,
    "labelled": RunResult.source_accuracy,
    "unlabelled": RunResult.accuracy,
    "megabytes": _megabytes,
    "seconds": lambda result, _: result.processor_seconds and result.processor_seconds / max(1, result.rounds),
    "memory": lambda result, _: result.memory and result.memory / 2**20,
}


@dataclass(frozen=True)
class Number:
    """A mean, its error as the source gives it (ours: the standard error), and for ours the number of seeds."""

    mean: float
    error: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Gain:
    """What a row adds to the baseline's, on average over targets: ours, tested, and as published.

    Attributes:
        row: the row.
        ours: with targets as clusters, or over seeds where there is one target, or pairs of sites.
        here: ours over seeds, at these targets only.
        published: None if it was not.
    """

    row: str
    ours: TTest | None
    here: TTest | None
    published: float | None


@dataclass(frozen=True)
class Compared:
    """A panel's numbers by (row, column): ours and the published ones.

    Attributes:
        panel: the panel.
        source: where the published numbers are printed; "" if there are none.
        ours: those that have finished runs. An average is there if the method has every target of its experiment.
        published: those of the panel's rows and columns.
        others: published rows of which the panel shows none.
        gains: what each row adds to the panel's baseline.
    """

    panel: Panel
    source: str
    ours: Mapping[tuple[str, str], Number]
    published: Mapping[tuple[str, str], Number]
    others: Sequence[str]
    gains: Sequence[Gain]


class Runs:
    """The finished runs of an entry's experiments. Each experiment is read once."""

    def __init__(self, catalogue: Catalogue, entry: Entry) -> None:
        self._results = catalogue.results
        self._names = [catalogue.experiment(source).name for source in entry.experiments]
        self._read: dict[str, dict[str, list[tuple[RunResult, str]]]] = {}

    def folder(self, source: CellSource) -> str:
        """The name of the experiment's folder."""
        return source.experiment or next(iter(self._names), "none")

    def of(self, source: CellSource) -> list[RunResult]:
        """The runs of the place's method, at all targets."""
        return [result for result, _ in self._of(source)]

    def rounds(self, source: CellSource) -> list[tuple[RunResult, list[RoundRecord]]]:
        """The same, each with its rounds."""
        return [(result, read_rounds(self._results / folder / ROUNDS)) for result, folder in self._of(source)]

    def targets(self, source: CellSource) -> set[str]:
        """The targets of all finished runs of the place's experiment."""
        return {result.target for runs_of_method in self._experiment(source).values() for result, _ in runs_of_method}

    def _of(self, source: CellSource) -> list[tuple[RunResult, str]]:
        return self._experiment(source).get(source.method, [])

    def _experiment(self, source: CellSource) -> dict[str, list[tuple[RunResult, str]]]:
        name = self.folder(source)
        if name not in self._read:
            folder, by_method = self._results / name, dict[str, list[tuple[RunResult, str]]]()
            runs = collect(folder).runs if any(map(is_finished, run_folders(folder))) else ()
            for run in runs:
                relative = run.folder.relative_to(self._results.resolve())
                by_method.setdefault(run.result.method, []).append((run.result, str(relative)))
            self._read[name] = by_method
        return self._read[name]


def compare_panel(catalogue: Catalogue, panel: Panel, runs: Runs) -> Compared:
    """The numbers of a panel of cells."""
    entry = catalogue.published.get(panel.published, {})
    printed = entry.get("rows", {})
    ours, published = {}, {}
    for row, source in panel.rows.items():
        for column, change in panel.columns.items():
            number = _ours(runs, source.at(change))
            if number is not None:
                ours[row, column] = number
            if column in printed.get(row, {}):
                published[row, column] = Number(*printed[row][column])
    others = [row for row in printed if row not in panel.rows]
    return Compared(panel, entry.get("source", ""), ours, published, others, _gains(panel, runs, published))


def _ours(runs: Runs, source: CellSource) -> Number | None:
    table_rows = rows(runs.of(source), value=VALUES[source.value])
    row = next((row for row in table_rows if row.target == source.target), None)
    if row is None or (
        source.target == AVERAGE
        and {row_of_target.target for row_of_target in table_rows} - {AVERAGE} < runs.targets(source)
    ):
        return None
    return Number(row.mean, row.standard_error, row.n)


def _gains(panel: Panel, runs: Runs, published: Mapping[tuple[str, str], Number]) -> list[Gain]:
    if not panel.baseline:
        return []
    base, gains = panel.rows[panel.baseline], []
    for row, source in panel.rows.items():
        both = [published.get((name, AVERAGE)) for name in (row, panel.baseline)]
        printed = both[0].mean - both[1].mean if both[0] and both[1] else None
        test = compare(runs.of(source), runs.of(base), value=VALUES[source.value])
        if row != panel.baseline and (test or printed is not None):
            gains.append(Gain(row, test.test if test else None, test.seeds if test else None, printed))
    return gains
