"""Means over runs, for the plots and tables of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from fedshift.evaluation.records import RoundRecord, RunResult, SiteMetric
from fedshift.evaluation.site_bytes import Direction, SiteBytes
from fedshift.report.collect import natural

Curve = tuple[Sequence[float], Sequence[float], Sequence[float] | None]
"""x, mean and standard deviation (None for one seed) of a line."""
SiteBytesRow = tuple[str, int, dict[Direction, dict[str, float]]]
"""A site, the number of runs that it took part in, and direction → kind → bytes of a run."""
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
_MOVES = 0.02
"""Weights that change by no more than this are treated as constant and are not plotted."""
BINS = 10
"""Bins of scores in a reliability curve, as records have them."""


def mean_over_targets(
    runs: Sequence[tuple[RunResult, list[RoundRecord]]],
) -> list[tuple[int, float, float, float | None]]:
    """The curve of a method over rounds: means over targets and seeds.

    It uses only seeds that have every target, and only rounds that all of these runs measured. Otherwise the curve
    would jump where a target is missing.

    Args:
        runs: the finished runs of one method with their rounds.

    Returns:
        Per round: its number, the mini-batches per site, the accuracy in percent, and the standard deviation of the
        accuracy over seeds (None for one seed).
    """
    targets, both = {result.target for result, _ in runs}, all(result.labelled for result, _ in runs)
    by_seed: dict[int, dict[str, dict[int, RoundRecord]]] = defaultdict(dict)
    for result, rounds in runs:
        by_seed[result.seed][result.target] = {record.round: record for record in rounds if record.target_accuracy}
    whole = [by_target for by_target in by_seed.values() if by_target.keys() == targets]
    if not whole:
        return []
    common = set[int].intersection(*(set(rounds) for by_target in whole for rounds in by_target.values()))
    points = []
    for number in sorted(common):
        seeds = [fmean(rounds[number].score(both) or 0.0 for rounds in by_target.values()) for by_target in whole]
        batches = fmean(rounds[number].mini_batches for by_target in whole for rounds in by_target.values())
        points.append((number, batches, fmean(seeds), stdev(seeds) if len(seeds) > 1 else None))
    return points


def curve_of(runs: Sequence[tuple[RunResult, list[RoundRecord]]]) -> tuple[Curve, Curve] | None:
    """`mean_over_targets` as curves over rounds and over mini-batches; None if there is no point."""
    points = mean_over_targets(runs)
    if not points:
        return None
    numbers, batches, mean, spread = zip(*points, strict=True)
    band = None if None in spread else spread
    return (numbers, mean, band), (batches, mean, band)


def rows_of_sites(runs: Sequence[SiteBytes]) -> list[SiteBytesRow]:
    """What left each site and reached it, means over the runs that it took part in; of many sites their spread."""
    rows: list[SiteBytesRow] = []
    for site in sorted({name for run in runs for name in run.sites}, key=lambda name: (natural(name), name)):
        of_site = [run.sites[site] for run in runs if site in run.sites]
        rows.append(
            (site, len(of_site), {way: mean_by_kind([both.get(way, {}) for both in of_site]) for way in DIRECTIONS})
        )
    many = [run for run in runs if run.spread]
    if many:
        numbers = sorted({run.number for run in many})
        of = f"of {numbers[0]:,}" + (f" to {numbers[-1]:,}" if len(numbers) > 1 else "") + " sites"
        for rank in ("least", "median", "most"):
            rows.append((f"{rank} {of}", len(many), {way: _at_rank(many, way, rank) for way in DIRECTIONS}))
    return rows


def _at_rank(many: Sequence[SiteBytes], way: Direction, rank: str) -> dict[str, float]:
    spreads = [{kind: getattr(spread, rank) for kind, spread in run.spread[way].items()} for run in many]
    return mean_by_kind(spreads)


def mean_by_kind(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Kind → mean over runs. A run without the kind counts as 0."""
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    return {kind: fmean(count.get(kind, 0) for count in counts) for kind in kinds}


def mean_per_class(runs: Sequence[RunResult]) -> dict[int, float]:
    """Class number → mean accuracy in the last round, over the runs whose target has the class."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        last = run.selected["last"]
        for index, accuracy in enumerate(last.per_class if last is not None else []):
            if accuracy is not None:
                values[index].append(accuracy)
    return {index: fmean(accuracies) for index, accuracies in values.items()}


def mean_site_metrics(runs: Sequence[RunResult]) -> dict[SiteMetric, float]:
    """Metric → mean over the runs that have it, each at its target(s) in the last round."""
    values: dict[SiteMetric, list[float]] = defaultdict(list)
    for run in runs:
        for metric in dict.fromkeys(metric for site in run.targets for metric in site.values):
            value = run.site_metric(metric)
            if value is not None:
                values[metric].append(value)
    return {metric: fmean(measured) for metric, measured in values.items()}


def pooled_reliability(runs: Sequence[RunResult]) -> list[tuple[float, float, int]]:
    """Mean score, share that came true and samples of each bin of scores, over all samples of the runs' targets."""
    bins: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for run in runs:
        for site in run.targets:
            for point in site.reliability:
                bins[min(int(point[0] * BINS / 100), BINS - 1)].append(point)
    pooled = []
    for number in sorted(bins):
        counts = [count for *_, count in bins[number]]
        scores, shares = (fmean((point[of] for point in bins[number]), counts) for of in (0, 1))
        pooled.append((scores, shares, sum(counts)))
    return pooled


def weights_over_rounds(runs: Sequence[Sequence[RoundRecord]]) -> dict[str, Curve]:
    """Curves of the sites' weights at one target.

    Returns site → (rounds, mean over seeds, standard deviation over seeds), for the rounds that all seeds report. Empty
    if. Returns the method does not report one number per site.
    """
    series = [_numbers(rounds) for rounds in runs]
    if not series or not all(series):
        return {}
    common = sorted(set[int].intersection(*(set(weights) for weights in series)))
    sites = dict.fromkeys(site for weights in series for number in common for site in weights[number])
    curves: dict[str, Curve] = {}
    for site in sites:
        values = [[weights[number].get(site, 0.0) for weights in series] for number in common]
        spread = [stdev(seeds) for seeds in values] if len(series) > 1 else None
        curves[site] = (common, [fmean(seeds) for seeds in values], spread)
    return curves


def weights_by_layer(runs: Sequence[Sequence[RoundRecord]]) -> dict[str, dict[str, Curve]]:
    """Layer → curves of the sites' weights, as `weights_over_rounds`, for methods that report weights by layer.

    ``runs``: the rounds of each seed at one target.
    """
    reported = [record.aggregation_weights for rounds in runs for record in rounds]
    layers = dict.fromkeys(
        name for weights_of_round in reported for name, value in weights_of_round.items() if isinstance(value, Mapping)
    )

    def only(record: RoundRecord, layer: str) -> RoundRecord:
        of_layer = record.aggregation_weights.get(layer)
        return record.model_copy(update={"aggregation_weights": of_layer if isinstance(of_layer, Mapping) else {}})

    return {
        layer: weights_over_rounds([[only(record, layer) for record in rounds] for rounds in runs]) for layer in layers
    }


def moving(curves: Iterable[Curve]) -> bool:
    """Whether any weight changes by more than 0.02 during training."""
    return any(max(mean) - min(mean) > _MOVES for _, mean, _ in curves if len(mean))


def mean_weights(runs: Sequence[Sequence[RoundRecord]], site: str, number: int) -> float | None:
    """The mean weight of ``site`` in round ``number`` over the ``runs`` that report it; None if none does."""
    shares = [weights[number][site] for weights in map(_numbers, runs) if site in weights.get(number, {})]
    return fmean(shares) if shares else None


def _numbers(rounds: Sequence[RoundRecord]) -> dict[int, dict[str, float]]:
    out: dict[int, dict[str, float]] = defaultdict(dict)
    for record in rounds:
        for site, weight in record.aggregation_weights.items():
            if isinstance(weight, int | float):
                out[record.round][site] = float(weight)
    return out
