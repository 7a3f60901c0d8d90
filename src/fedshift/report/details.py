"""What the page has beside tables and verdict: means over runs, curves, what the sites have, costs, settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedshift.evaluation.cautions import baselines, cautions
from fedshift.evaluation.metric_entries import Metric
from fedshift.evaluation.records import RoundRecord, RunResult, SiteMetric
from fedshift.evaluation.stored import ROUNDS, read_rounds
from fedshift.experiment.protocols.index import protocol_of
from fedshift.report.collect import Collected, FinishedRun, natural, rounds_at
from fedshift.report.conditions import otherwise
from fedshift.report.measures import Measure
from fedshift.report.mistakes import Placed, Predictions, ShownSamples, placed_of, predictions_of
from fedshift.report.pairs import site_gains
from fedshift.report.run_means import (
    Curve,
    SiteBytesRow,
    curve_of,
    mean_by_kind,
    mean_per_class,
    mean_site_metrics,
    moving,
    pooled_reliability,
    rows_of_sites,
    weights_by_layer,
    weights_over_rounds,
)
from fedshift.report.table import MOST_COLUMNS, Table, headline
from fedshift.text import join_names

_OF_A_RUN = ("target", "seed", "method", "versions", "aggregation", "wire")
"""Settings that a run records and an experiment file does not have."""


def experiment_file(collected: Collected) -> dict[str, Any]:
    """The experiment as a file for `fedshift run`, with every default written out, as far as records have it.

    Each run records its own settings, where the budget of every site takes the place of `training.mini_batches`. If
    the mean over sites is the same in all runs of a method, it takes its place again; else the budgets follow from the
    rounds.
    """
    results, order = collected.results, collected.order
    whole = {name: value for name, value in results[0].options.items() if name not in _OF_A_RUN}
    for section_name, left_out in (("data", "fingerprint"), ("training", "mini_batches")):
        if isinstance(section := whole.get(section_name), Mapping):
            whole[section_name] = {name: value for name, value in section.items() if name != left_out}
    common = _common_budget(results, results[0].method)
    if common is not None and "steps" not in whole["training"]:
        whole["training"]["mini_batches"] = common
    if (protocol := protocol_of(whole.get("protocol"))) is not None:
        pairs = {result.target: (result.labelled, result.unlabelled) for result in results}
        whole["protocol"] = {**whole["protocol"], **protocol.extent_of(order.targets, order.seeds, pairs)}
    first = {method: next(run for run in results if run.method == method) for method in order.methods}
    methods = [
        # Packing does not keep the order of options.
        {"name": options.get("name"), **options, **_changes(results, method, common)}
        for method, result in first.items()
        if isinstance(options := result.options.get("method"), Mapping)
    ]
    return whole | ({"methods": methods} if methods else {})


def _changes(results: Sequence[RunResult], method: str, common: int | None) -> dict[str, Any]:
    """The ``training`` of a method that trained otherwise than the first run, whose runs have the budget ``common``."""
    result = next(run for run in results if run.method == method)
    changes, budget = otherwise(result, results[0]), _common_budget(results, method)
    if budget != common and "steps" not in result.options.get("training", {}):
        changes["mini_batches"] = budget
    return {"training": changes} if changes else {}


def _common_budget(results: Sequence[RunResult], method: str) -> int | None:
    """The budget that all runs of a method have; None if they have different ones, or do not say it."""
    budgets = {_budget(result) for result in results if result.method == method}
    return budgets.pop() if len(budgets) == 1 else None


def _budget(result: RunResult) -> int | None:
    """Mini-batches of a run, mean over the sites that train, rounded down since each site's are rounded up."""
    training, sites = result.options.get("training"), result.data.get("training_samples")
    budget = training.get("mini_batches") if isinstance(training, Mapping) else None
    if not isinstance(budget, Mapping) or not sites:
        return None
    return int(sum(budget.values()) // len(sites))


MOST_CLASSES = 20
"""Of more classes the hardest are shown."""
_MOST_NAMED = 20
"""Classes whose samples are counted in a note."""
MOST_TARGETS = 12
"""Targets with a panel of curves."""
_MOST_PANELS = 4
_MOST_LAYERS = 6
_FEWEST = 5
_PARTS = ("training", "held_out", "measured", "unlabelled")
_UNITS = {"dice": "structure", "label_accuracy": "label"}


@dataclass(frozen=True)
class SiteSamples:
    """What the sites have."""

    number: int  # of sites; of very many only those with the fewest samples are below
    ranges: Mapping[str, Mapping[str, tuple[int, int]]]  # site → part → the fewest and the most samples of a run
    # site → share of each class in percent, where records say it; empty for many classes
    shares: Mapping[str, Sequence[float]]
    classes: Sequence[str]  # their names


@dataclass(frozen=True)
class Metrics:
    """All metrics of the last round."""

    metric: Metric  # what the rounds are measured by
    means: Mapping[tuple[str, str], Mapping[SiteMetric, float]]  # (method, target) → metric → mean over seeds
    baselines: Mapping[str, float]  # target → what a model without inputs would reach
    counts: Mapping[str, tuple[tuple[str, int | None], ...]]  # target → its samples of each class in words
    rates: Mapping[str, tuple[tuple[str, float], ...]]  # target → the share of each label in words
    # method → mean score, share that came true and samples of each bin of scores
    reliability: Mapping[str, Sequence[tuple[float, float, int]]]


@dataclass(frozen=True)
class ByClass:
    """Accuracy by class at each method's worst target."""

    # method, its worst target, class number → mean accuracy; empty where runs have no common classes
    lines: tuple[tuple[str, str, Mapping[int, float]], ...]
    classes: Sequence[str]  # their names
    hardest: Sequence[int]  # the numbers of those that are shown


@dataclass(frozen=True)
class Cost:
    """Means over the runs of a method."""

    rounds: float  # of a run
    mini_batches: float  # likewise
    seconds: float  # likewise
    milliseconds: float  # of a mini-batch
    up: Mapping[str, float]  # kind of content → bytes, all sites together
    down: Mapping[str, float]  # likewise
    sites: Sequence[SiteBytesRow]  # what left each site


@dataclass(frozen=True)
class Weights:
    """The weights of the sites in the course of a method's training: panel → site → curve, and what the panels are."""

    method: str
    panels: Mapping[str, Mapping[str, Curve]]
    note: str


@dataclass(frozen=True)
class Settings:
    """How the runs were made: versions, the experiment as a file, its data, and the options of each method."""

    versions: Mapping[str, Sequence[str]]
    experiment: Mapping[str, Any]
    data: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Details:
    """What the page has beside tables and verdict."""

    facts: tuple[tuple[str, str], ...]  # what the experiment is of
    unit: str  # what the page calls a class: "class", for segmentation "structure", for several labels "label"
    kinds: Mapping[str, Sequence[str]]  # method → kinds of content that left the sites
    sites: SiteSamples | None  # what the sites have; None where records do not say
    # method → site → what it gains over training alone, where both sides are measured
    gains: Mapping[str, Mapping[str, float]]
    metrics: Metrics | None  # all metrics of the last round; None where there are none
    predictions: Predictions | None  # what stored predictions show; None for tasks that are no classification
    placed: Sequence[Placed]  # where models place samples
    samples_shown: bool  # whether samples themselves are shown
    over_rounds: Measure  # what is measured after each round
    # label of the axis → method → the main metric over rounds, mean over targets
    curves: Mapping[str, Mapping[str, Curve]]
    at_targets: Mapping[str, Mapping[str, Curve]]  # the first targets → method → the same there
    weights: tuple[Weights, ...]  # of methods that change them
    costs: Mapping[str, Cost]  # method → what a run of it costs
    classes: ByClass | None  # accuracy by class; None where there are no classes
    settings: Settings  # how the runs were made


def details_of(collected: Collected, table: Table, method: str | None, samples: ShownSamples | None) -> Details:
    """Compute what the page has beside tables and verdict.

    Args:
        collected: the runs, of which some are measured.
        table: of the last rounds, with all targets.
        samples: the samples, if the page shows them.

    Raises:
        UserError: a `rounds.jsonl` is corrupt, or predictions are damaged.
    """
    results, runs, methods = collected.results, collected.runs, table.methods
    records = {run.folder: read_rounds(run.folder / ROUNDS) for run in runs}
    by_method = {name: [run.result for run in runs if run.result.method == name] for name in methods}
    unit = _UNITS.get(results[0].metric, "class")
    over = _Curves(collected.seen, records)
    return Details(
        facts=tuple(_facts(collected, unit)),
        unit=unit,
        kinds=_kinds(results, collected.order.methods),
        sites=_sites(results),
        gains=site_gains(table.rows),
        metrics=_metrics(results, methods),
        predictions=predictions_of(runs, method, samples),
        placed=() if samples is None else placed_of(runs, methods, samples),
        samples_shown=samples is not None,
        over_rounds=headline(results),
        curves=over.on_average(methods),
        at_targets=over.at_targets(methods, table.columns[:-1]),
        weights=tuple(_weights(runs, records, methods)),
        costs={name: _cost(of_method) for name, of_method in by_method.items()},
        classes=_by_class(results, table),
        settings=_settings(collected),
    )


def _facts(collected: Collected, unit: str) -> Iterator[tuple[str, str]]:
    results, order = collected.results, collected.order
    classes = results[0].classes
    what = "predicted" if results[0].metric in ("rmse", "concordance") else f"{unit}{'es' if unit == 'class' else 's'}"
    missing = f", {collected.unfinished} unfinished" if collected.unfinished else ""
    facts = (
        ("data", ", ".join(sorted({str(result.data["name"]) for result in results if "name" in result.data}))),
        ("methods", join_names(order.methods, most=8)),
        ("targets", join_names(order.targets)),
        ("seeds", ", ".join(map(str, order.seeds))),
        (what, ", ".join(classes) if what == "predicted" else str(len(classes))),
        ("runs", f"{len(collected.runs)} finished{missing}"),
    )
    return ((name, text) for name, text in facts if text)


def _kinds(results: Sequence[RunResult], methods: Sequence[str]) -> dict[str, list[str]]:
    """Method → the kinds of content that left the sites."""
    by_method: dict[str, dict[str, None]] = {name: {} for name in methods}
    for result in results:
        by_method.setdefault(result.method, {}).update(
            dict.fromkeys(kind for kind, size in result.bytes_up.items() if size)
        )
    return {name: list(kinds) for name, kinds in by_method.items()}


def _sites(results: Sequence[RunResult]) -> SiteSamples | None:
    """How many samples each site has, and of which classes."""
    sizes: dict[str, dict[str, set[int]]] = {}
    for result in {id(result.data): result for result in results}.values():  # of a run that measures each site, one
        for part in _PARTS:
            counts = result.data.get(f"{part}_samples")
            for site, count in (counts if isinstance(counts, Mapping) else {}).items():
                sizes.setdefault(site, {}).setdefault(part, set()).add(int(count))
    if not sizes:
        return None
    classes = results[0].classes
    few = len(classes) <= MOST_CLASSES and all(result.classes == classes for result in results)
    parts = [part for part in _PARTS if any(part in by_part for by_part in sizes.values())]
    ranges = {site: {part: _range(sizes[site].get(part, set())) for part in parts} for site in _few_sites(sizes)}
    return SiteSamples(len(sizes), ranges, _shares(results) if few else {}, classes)


def _range(counts: set[int]) -> tuple[int, int]:
    counts = counts - {0} or {0}
    return min(counts), max(counts)


def _few_sites(sizes: Mapping[str, Mapping[str, set[int]]]) -> list[str]:
    """The sites in order; of very many the few with the fewest samples."""
    names = sorted(sizes, key=natural)
    if len(names) <= MOST_COLUMNS:
        return names
    return sorted(names, key=lambda site: sum(map(max, sizes[site].values())))[:_FEWEST]


def _shares(results: Sequence[RunResult]) -> dict[str, list[float]]:
    """Site → share of each class in percent, where the largest known part of the site says all of them."""
    best: dict[str, tuple[int, list[float]]] = {}
    for result in results:
        for site in result.sites:
            if site.support and None not in site.support and site.samples > best.get(site.site, (0, []))[0]:
                shares = [100 * (count or 0) / site.samples for count in site.support]
                best[site.site] = site.samples, shares
    return {site: shares for site, (_, shares) in best.items()}


def _metrics(results: Sequence[RunResult], methods: Sequence[str]) -> Metrics | None:
    if not any(result.targets for result in results):
        return None
    at: dict[tuple[str, str], list[RunResult]] = {}
    counts: dict[str, tuple[tuple[str, int | None], ...]] = {}
    rates: dict[str, tuple[tuple[str, float], ...]] = {}
    for result in results:
        at.setdefault((result.method, result.target), []).append(result)
        for site in result.targets:
            named = tuple(zip(result.classes[:_MOST_NAMED], site.support, strict=False))
            shares = tuple((name, 100 * count / site.samples) for name, count in named if count is not None)
            if named:
                counts.setdefault(site.site, named)
            if shares:
                rates.setdefault(site.site, shares)
    reliability = {name: pooled_reliability([run for run in results if run.method == name]) for name in methods}
    return Metrics(
        results[0].metric,
        {where: mean_site_metrics(those) for where, those in at.items()},
        baselines(results),
        counts,
        rates,
        {name: points for name, points in reliability.items() if points},
    )


class _Curves:
    """The main metric over rounds."""

    def __init__(self, runs: Sequence[FinishedRun], records: Mapping[Path, list[RoundRecord]]) -> None:
        self._runs = [(run.result, rounds_at(run.result, records[run.folder])) for run in runs]

    def _of(self, method: str, target: str | None = None) -> tuple[Curve, Curve] | None:
        """A method's curve over rounds and over mini-batches, at one target or on average; None if there is none."""
        return curve_of(
            [
                (result, rounds)
                for result, rounds in self._runs
                if rounds and result.method == method and target in (None, result.target)
            ]
        )

    def on_average(self, methods: Sequence[str]) -> dict[str, dict[str, Curve]]:
        """Label of the horizontal axis → method → curve."""
        of_methods = {method: curves for method in methods if (curves := self._of(method)) is not None}
        axes = ("round", "local mini-batches per site")
        return {axis: {method: curves[at] for method, curves in of_methods.items()} for at, axis in enumerate(axes)}

    def at_targets(self, methods: Sequence[str], targets: Sequence[str]) -> dict[str, dict[str, Curve]]:
        """Target → method → curve over rounds, at each of several targets."""
        if len(targets) < 2:
            return {}
        of_targets = {
            target: {method: curves[0] for method in methods if (curves := self._of(method, target)) is not None}
            for target in targets[:MOST_TARGETS]
        }
        return {target: lines for target, lines in of_targets.items() if lines}


def _weights(
    runs: Sequence[FinishedRun], records: Mapping[Path, list[RoundRecord]], methods: Sequence[str]
) -> Iterator[Weights]:
    """The weights of the sites, for methods that change them from round to round."""
    for method in methods:
        by_target: dict[str, list[list[RoundRecord]]] = defaultdict(list)
        for run in runs:
            if run.result.method == method:
                by_target[run.result.target].append(records[run.folder])
        curves = {target: weights_over_rounds(rounds) for target, rounds in by_target.items()}
        if any(moving(lines.values()) for lines in curves.values()):
            panels = dict(list(curves.items())[:_MOST_PANELS])
            yield Weights(
                method,
                panels,
                f"{len(panels)} of {len(curves)} targets." if len(panels) < len(curves) else "By target.",
            )
            continue
        first = next(iter(by_target), "")
        layers = weights_by_layer(by_target[first]) if first else {}
        if any(moving(lines.values()) for lines in layers.values()):
            panels = dict(list(layers.items())[:_MOST_LAYERS])
            yield Weights(method, panels, f"By layer, target {first}; {len(panels)} of {len(layers)} layers.")


def _cost(runs: Sequence[RunResult]) -> Cost:
    """What a run of a method costs."""
    batches = sum(run.mini_batches for run in runs)
    return Cost(
        rounds=fmean(run.rounds for run in runs),
        mini_batches=fmean(run.mini_batches for run in runs),
        seconds=fmean(run.seconds for run in runs),
        milliseconds=1e3 * sum(run.seconds for run in runs) / max(1, batches),
        up=mean_by_kind([run.bytes_up for run in runs]),
        down=mean_by_kind([run.bytes_down for run in runs]),
        sites=rows_of_sites([run.bytes_by_site for run in runs if run.bytes_by_site is not None]),
    )


def _by_class(results: Sequence[RunResult], table: Table) -> ByClass | None:
    """Accuracy by class at each method's worst target; None where there are no classes."""
    if results[0].metric in ("rmse", "concordance"):
        return None
    lines = []
    for method in table.methods:
        cells = [cell for cell in list(table.cells[method].values())[:-1] if cell is not None]
        if cells:
            worst = (max if table.measure.less_is_better else min)(cells, key=lambda cell: cell.row.mean).row.target
            here = [result for result in results if result.method == method and result.target == worst]
            lines.append((method, worst, mean_per_class(here)))
    classes = results[0].classes
    if any(result.classes != classes for result in results) or not any(accuracies for *_, accuracies in lines):
        return ByClass((), classes, ())
    every = range(len(classes))
    hardest = sorted(every, key=lambda at: min((a[at] for *_, a in lines if a.get(at) is not None), default=101))
    return ByClass(tuple(lines), classes, sorted(hardest[:MOST_CLASSES]))


def warnings_with_places(results: Sequence[RunResult], measured: Sequence[RunResult] = ()) -> tuple[str, ...]:
    """What follows from the results, or from ``measured``, and what the runs warned of."""
    where: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for warning in dict.fromkeys(result.warnings):
            where[warning].append(f"{result.method} / {result.target} / seed {result.seed}")
    texts = cautions(measured or results)
    for warning, places in where.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        texts.append(f"{warning} ({'; '.join(places[:3])}{more})")
    return tuple(texts)


def _settings(collected: Collected) -> Settings:
    """Versions, and every setting."""
    results = collected.results
    seen: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        for name, value in {**result.versions, "device": result.device, "threads": str(result.threads)}.items():
            seen[name].setdefault(value)
    first = {
        method: next(result for result in results if result.method == method) for method in collected.order.methods
    }
    return Settings(
        {name: list(values) for name, values in seen.items()},
        experiment_file(collected),
        results[0].data,
        {method: result.options for method, result in first.items()},
    )
