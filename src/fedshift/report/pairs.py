"""Tables of runs that measure labelled and unlabelled sites: harmonic means, gains, distances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from pydantic import Field

from fedshift.evaluation.metric_entries import Metric
from fedshift.evaluation.metrics import harmonic_mean
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.summary import AVERAGE, Row, rows
from fedshift.report.measures import DISTANCES, METRICS, Measure, Note

ALONE = "alone"
"""Name of the method in which every labelled site trains alone."""
PAIR = "between the sites"


_PLURALS: dict[Metric, str] = {
    "accuracy": "accuracies",
    "dice": "Dice coefficients",
    "label_accuracy": "shares of labels that are right",
    "concordance": "concordances",
}
HARMONIC_MEANS = {
    metric: Measure(
        "Harmonic mean",
        RunResult.score,
        f"Harmonic mean, per split, of the {plural} at the labelled sites (part held out) and the unlabelled sites "
        "(all samples), in percent",
        f"Harmonic mean of both {plural}",
        repeat="split",
        share_sites=True,
        meaning="Each column is a pair, labelled sites before the dash, unlabelled ones after it. The first table's "
        f"number is the harmonic mean of the {plural} on both sides, so it is low when one side pays for the other. "
        "The average is the unweighted mean over pairs.",
    )
    for metric, plural in _PLURALS.items()
}
"""The metric that compares runs in which both sides are measured, for each metric of one side."""


class PairRow(Row):
    """A row of the table: one method at one pair of sites, or (target "average") the mean over the pairs."""

    labelled: str  # the labelled sites, joined by "+"
    unlabelled: str  # the unlabelled sites, joined by "+"
    accuracy_source: float  # mean accuracy at the labelled sites, in percent
    accuracy_target: float  # mean accuracy at the unlabelled sites, in percent
    # mean over splits of the harmonic means, then over pairs for the average. `mean`, `standard_error` and `seeds`
    # belong to it
    harmonic_mean: float
    harmonic_mean_of_averages: float  # harmonic mean of this row's accuracy_source and accuracy_target
    # percentage points over the best model that a site can train alone, by site; for the average, by "labelled" and
    # "unlabelled"
    gain: dict[str, float] = Field(default_factory=dict)
    proxy_a_distance: float | None = None  # mean over the labelled and unlabelled sites


def rows_of(results: Sequence[RunResult], table_rows: Iterable[Row], select: Selection) -> Iterable[PairRow]:
    """The rows ``table_rows`` of harmonic means, with the accuracies, gains and distances of the same runs."""
    at_source, at_target, distances, labelled_gain, unlabelled_gain = (
        {(row.method, row.target): row.mean for row in rows(results, select, value=value)}
        for value in (
            RunResult.source_accuracy,
            RunResult.accuracy,
            _distance,
            _Gain(results, "labelled"),
            _Gain(results, "unlabelled"),
        )
    )
    for row in table_rows:
        key = row.method, row.target
        here = [result for result in results if (result.method, result.target) == key]
        first = here[0] if here else None
        if first is None:
            gain = {"labelled": labelled_gain.get(key), "unlabelled": unlabelled_gain.get(key)}
        else:
            gain = _mean_by_site([_gains(result, _references(results), select) for result in here])
        yield PairRow(
            **row.model_dump(),
            labelled="+".join(first.labelled) if first else AVERAGE,
            unlabelled="+".join(first.unlabelled) if first else AVERAGE,
            accuracy_source=at_source[key],
            accuracy_target=at_target[key],
            harmonic_mean=row.mean,
            harmonic_mean_of_averages=harmonic_mean(at_source[key], at_target[key]),
            gain={name: value for name, value in gain.items() if value is not None},
            proxy_a_distance=distances.get(key),
        )


def site_gains(table_rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Method → site → what it gains over the best model that it can train alone, mean over pairs and splits."""
    gains: dict[str, dict[str, list[float]]] = {}
    for row in table_rows:
        if isinstance(row, PairRow) and row.target != AVERAGE:
            for site, gain in row.gain.items():
                gains.setdefault(row.method, {}).setdefault(site, []).append(gain)
    return {method: {site: fmean(values) for site, values in sites.items()} for method, sites in gains.items()}


def notes(pair_rows: Sequence[PairRow], metric: Metric) -> Iterable[Note]:
    """Notes with numbers that the averages do not show."""
    averages = [row for row in pair_rows if row.target == AVERAGE]
    if averages:
        listing = ", ".join(f"{row.method} {row.harmonic_mean_of_averages:.2f}" for row in averages)
        what = f"Harmonic mean of the average {_PLURALS[metric]}"
        yield Note("harmonic", f"{what}, which is another number and not the headline: {listing}.")
    gains = [row for row in averages if "unlabelled" in row.gain]
    if gains:
        listing = ", ".join(f"{row.method} {row.gain['unlabelled']:+.2f}" for row in gains).replace("-", "−")
        yield Note(
            "gain",
            "Win-win gain of the unlabelled sites: alone they have no name for any class and can only guess, which is "
            f"right once in as many times as there are classes; points above that: {listing}.",
        )


def beside(results: Sequence[RunResult]) -> Iterable[tuple[Measure, Sequence[RunResult]]]:
    """The measures of the tables below the table of harmonic means, each with its results."""
    name = METRICS[results[0].metric].name
    yield Measure(name, RunResult.source_accuracy, title=f"{name} at the labelled sites, part held out"), results
    yield Measure(name, RunResult.accuracy, title=f"{name} at the unlabelled sites"), results
    for distance in DISTANCES:
        yield (
            replace(distance, title=f"{distance.name} at the unlabelled sites", repeat="split", share_sites=True),
            results,
        )
    text = "Points over the model that each labelled site trains alone, at equal work."
    gain = _Gain(results, "labelled")
    yield Measure("Win-win gain", gain, title="Win-win gain of the labelled sites", notes=(text,)), results
    apart = "2(1 − 2ε), ε the error of a linear classifier that tells the sites' inputs apart; 2: it always can."
    yield Measure("Proxy A-distance", _distance, title="Proxy A-distance", notes=(apart,)), _one_method(results)


def _one_method(results: Sequence[RunResult]) -> Sequence[RunResult]:
    """One result for each (pair, split). The distance of two sites does not depend on the method."""
    first = {(result.target, result.seed): result for result in reversed(results)}
    return [result.model_copy(update={"method": PAIR}) for result in first.values()]


def _distance(result: RunResult, select: Selection) -> float | None:
    """Mean proxy A-distance over the labelled and unlabelled sites of a run."""
    distances = result.data.get("proxy_a_distance") or {}
    return fmean(distances.values()) if distances else None


Reference = dict[tuple[str, int], RunResult]


def _references(results: Sequence[RunResult]) -> Reference:
    """(pair, split) → the run in which its labelled sites trained alone.

    With one labelled site, Source-only trains on that site's samples alone. So its run is used where `ALONE` has none.
    """
    out: Reference = {}
    for result in results:
        name = (result.options.get("method") or {}).get("name")
        key = result.target, result.seed
        if name == ALONE or (name == "source_only" and len(result.labelled) == 1 and key not in out):
            out[key] = result
    return out


def _gains(result: RunResult, references: Reference, select: Selection) -> dict[str, float]:
    """Percentage points over the best model that each site can train alone. Sites without such a model are left out."""
    chosen = result.selected.get(select)
    if chosen is None:
        return {}
    reference = references.get((result.target, result.seed))
    alone = reference.selected.get(select) if reference is not None else None
    out = {}
    for site in result.labelled:
        if alone is not None and site in alone.sites and site in chosen.sites:
            out[site] = chosen.sites[site] - alone.sites[site]
    for site in result.unlabelled if result.metric == "accuracy" else ():  # a mask cannot be guessed
        if site in chosen.sites:
            out[site] = chosen.sites[site] - 100 / len(result.classes)
    return out


def _mean_by_site(gains: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Site → mean over splits."""
    sites = dict.fromkeys(site for by_site in gains for site in by_site)
    return {site: fmean(by_site[site] for by_site in gains if site in by_site) for site in sites}


class _Gain:
    """The mean gain of one side's sites in a run, as a `Value`."""

    def __init__(self, results: Sequence[RunResult], side: str) -> None:
        self._references, self._side = _references(results), side

    def __call__(self, result: RunResult, select: Selection) -> float | None:
        gains = _gains(result, self._references, select)
        of_site = [gains[site] for site in getattr(result, self._side) if site in gains]
        return fmean(of_site) if of_site else None
