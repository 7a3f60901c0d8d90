"""An entry's panels as series of numbers, ours beside the published ones: for the drawing and for its CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.summary import AVERAGE, mean_and_standard_error
from fedshift.json_objects import read_object
from fedshift.report.collect import natural
from fedshift.report.run_means import mean_over_targets, weights_by_layer, weights_over_rounds
from fedshift.text import csv_text
from paper_tables import distances, placements
from paper_tables.catalogue import By, Catalogue, CellSource, Entry, Panel
from paper_tables.comparison import Compared, Number, Runs, compare_panel
from paper_tables.drawing import Series, SeriesPanel


def panels_of(catalogue: Catalogue, entry: Entry) -> list[SeriesPanel]:
    """The panels of an entry with what finished runs give.

    Raises:
        UserError: a file of results is damaged, or there is nothing to draw.
    """
    runs = Runs(catalogue, entry)
    drawn = [
        SeriesPanel(panel.title, *_axes(panel), list(_series(catalogue, panel, runs)), panel.kind == "features")
        for panel in entry.panels
    ]
    if not any(panel.series for panel in drawn):
        raise UserError(f"{entry.name}: no finished run to draw; add --run to run what is missing")
    return drawn


def csv_of(panels: Sequence[SeriesPanel]) -> str:
    """The numbers of a drawing, one line each.

    The error is a standard error over seeds, over rounds a standard deviation, or as the paper prints it.
    """
    lines = [["panel", "series", "from", "x", "value", "error"]]
    for panel in panels:
        for series in panel.series:
            origin = "published" if series.published else "ours"
            for x, mean, error in zip(series.x, series.mean, series.error, strict=True):
                shown = "" if error is None else f"{error:.4f}"
                lines.append([panel.title, series.name, origin, _plain(x), f"{mean:.4f}", shown])
    return csv_text(lines)


def _plain(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _axes(panel: Panel) -> tuple[str, str]:
    if panel.kind == "features":
        return "", ""
    return panel.axis or ("round" if panel.kind in ("rounds", "weights", "report") else ""), panel.measure


def _series(catalogue: Catalogue, panel: Panel, runs: Runs) -> Iterator[Series]:
    """What a panel shows, by its kind."""
    match panel.kind:
        case "cells":
            return _cells(compare_panel(catalogue, panel, runs))
        case "leakage":
            return _leakage(catalogue, runs.folder(CellSource()))
        case "distances":
            return _distances(catalogue.results / runs.folder(CellSource()))
        case "features":
            folders = [(catalogue.results / runs.folder(source), source.method) for source in panel.rows.values()]
            return chain.from_iterable(_placements(folder, method, panel.by) for folder, method in folders)
        case "weights" if not panel.site:
            return chain.from_iterable(_sites(panel, runs, source) for source in panel.rows.values())
        case _:
            return _curves(panel, runs)


def _distances(folder: Path) -> Iterator[Series]:
    for pairs, layers in distances.read(folder).items():
        numbers = [mean_and_standard_error(values) for values in layers.values()]
        yield Series(pairs, list(layers), [mean for mean, _ in numbers], [error for _, error in numbers])


def _curves(panel: Panel, runs: Runs) -> Iterator[Series]:
    for name, source in panel.rows.items():
        x, mean, error = _curve(panel, runs, source)
        if x:
            yield Series(name, x, mean, error)


def _cells(compared: Compared) -> Iterator[Series]:
    rows, columns = list(compared.panel.rows), list(compared.panel.columns)
    flipped = compared.panel.along == "rows"
    names, places = (columns, rows) if flipped else (rows, columns)
    numeric = all(map(_is_number, places))
    for name in names:
        for numbers, published in ((compared.ours, False), (compared.published, True)):
            cells = {
                name_of_cell: numbers.get((name_of_cell, name) if flipped else (name, name_of_cell))
                for name_of_cell in places
            }
            here: dict[str, Number] = {
                name_of_cell: number for name_of_cell, number in cells.items() if number is not None
            }
            if here:
                yield Series(
                    name,
                    [float(name_of_cell) for name_of_cell in here] if numeric else list(here),
                    [number.mean for number in here.values()],
                    [number.error for number in here.values()],
                    published,
                )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _curve(panel: Panel, runs: Runs, source: CellSource) -> tuple[list[float | str], list[float], list[float | None]]:
    """The rounds, the means over runs, and for accuracies the standard deviation over seeds."""
    runs_there = _at(runs, source)
    if panel.kind == "rounds":
        points = mean_over_targets(runs_there)
        return [point[0] for point in points], [point[2] for point in points], [point[3] for point in points]
    value = _weight(panel.site) if panel.kind == "weights" else _reported_value(panel.number)
    by_run = [
        {record.round: number for record in rounds if (number := value(record)) is not None} for _, rounds in runs_there
    ]
    common = sorted(set[int].intersection(*map(set[int], by_run))) if by_run else []
    return list(common), [fmean(values[number] for values in by_run) for number in common], [None] * len(common)


def _at(runs: Runs, source: CellSource) -> list[tuple[RunResult, list[RoundRecord]]]:
    """The runs of a place with their rounds: at its target, or at all."""
    return [run for run in runs.rounds(source) if source.target in (AVERAGE, run[0].target)]


def _sites(panel: Panel, runs: Runs, source: CellSource) -> Iterator[Series]:
    """Every site's weight over rounds, in one layer if the panel names one: mean and standard deviation over seeds."""
    rounds = [records for _, records in _at(runs, source)]
    curves = weights_by_layer(rounds).get(panel.layer, {}) if panel.layer else weights_over_rounds(rounds)
    for site, (x, mean, spread) in curves.items():
        yield Series(site, list(x), list(mean), list(spread) if spread is not None else [None] * len(x))


def _placements(folder: Path, method: str, by: By) -> Iterator[Series]:
    """Where a method's model places samples, by class or by site."""
    points = placements.read(folder).get(method, [])
    for name in sorted({point[by] for point in points}, key=natural):
        chosen = [point for point in points if point[by] == name]
        yield Series(name, [point["x"] for point in chosen], [point["y"] for point in chosen], [None] * len(chosen))


def _weight(site: str) -> Callable[[RoundRecord], float | None]:
    def value(record: RoundRecord) -> float | None:
        weight = record.aggregation_weights.get(site)
        return float(weight) if isinstance(weight, int | float) else None

    return value


def _reported_value(name: str) -> Callable[[RoundRecord], float | None]:
    def value(record: RoundRecord) -> float | None:
        number = record.extra.get(name)
        return float(number) if isinstance(number, int | float) else None

    return value


def _leakage(catalogue: Catalogue, experiment: str) -> Iterator[Series]:
    """The similarity of reconstructions to their originals, of the better attack, by what was sent and of how many."""
    file = catalogue.results / experiment / "leakage.json"
    if not file.exists():
        return
    try:
        cases = read_object(file, "restore it, or audit again")["cases"]
        best: dict[tuple[str, int], float] = {}
        for case in cases:
            key = case["exchange"], case["batch"]
            best[key] = max(best.get(key, -1.0), fmean(case["ssim"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is no record of fedshift audit leakage: remove it and audit again") from error
    for exchange, name in (("batch", "gradient of a mini-batch"), ("epoch", "model after an epoch")):
        sizes = sorted(size for kind, size in best if kind == exchange)
        if sizes:
            yield Series(name, sizes, [best[exchange, size] for size in sizes], [None] * len(sizes))
