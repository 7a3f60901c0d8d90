"""What the runs cost, what they warn of, and how they were made."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedshift.evaluation.cautions import cautions
from fedshift.evaluation.records import RunResult
from fedshift.experiment.protocols.index import protocol_of
from fedshift.report import plots
from fedshift.report.advice.words import short_kind
from fedshift.report.averages import mean_by_kind
from fedshift.report.collect import Collected
from fedshift.report.sections.blocks import (
    Block,
    Cells,
    Listing,
    Section,
    Text,
    figure,
    grid,
    number,
    section,
    settings,
)
from fedshift.report.sections.metrics import unit_of
from fedshift.report.sections.sites_sent import sites_sent
from fedshift.report.unlike_training import otherwise
from fedshift.text import listed

_OF_A_RUN = ("target", "seed", "method", "versions", "aggregation", "wire")
"""Settings that a run records and an experiment file does not have."""


def facts(collected: Collected) -> list[tuple[str, str]]:
    """What the experiment is of."""
    results, order = collected.results, collected.order
    data = sorted({str(result.data["name"]) for result in results if "name" in result.data})
    missing = f", {collected.unfinished} unfinished" if collected.unfinished else ""
    found = [
        ("data", ", ".join(data)),
        ("methods", ", ".join(order.methods)),
        ("targets", listed(order.targets)),
        ("seeds", ", ".join(map(str, order.seeds))),
        _learned(results),
        ("runs", f"{len(collected.runs)} finished{missing}"),
    ]
    return [(what, said) for what, said in found if said]


def cost_section(results: Sequence[RunResult], methods: Sequence[str]) -> Section:
    """Rounds, seconds and bytes."""
    lines: list[Cells] = []
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for method in methods:
        runs = [result for result in results if result.method == method]
        sizes[method] = {
            "up": mean_by_kind([run.bytes_up for run in runs]),
            "down": mean_by_kind([run.bytes_down for run in runs]),
        }
        batches = sum(run.mini_batches for run in runs)
        lines.append(
            [
                method,
                f"{fmean(run.rounds for run in runs):g}",
                number(fmean(run.mini_batches for run in runs), 0),
                number(fmean(run.seconds for run in runs), 1),
                number(1e3 * sum(run.seconds for run in runs) / max(1, batches), 1),
                number(sum(sizes[method]["up"].values()) / 1e6),
                number(sum(sizes[method]["down"].values()) / 1e6),
            ]
        )
    head = ["method", "rounds", "mini-batches per site", "seconds", "ms per mini-batch", "MB up", "MB down"]
    note = "Means over the runs of a method. Up leaves the sites, down reaches them; all sites together; 1 MB = 10⁶ B."
    known = {
        method: [run.bytes_by_site for run in results if run.method == method and run.bytes_by_site is not None]
        for method in methods
    }
    own = sites_sent(
        "What left each site, in a run",
        "method",
        known,
        "Means over the runs in which the site took part; sites with equal numbers share a row.",
    )
    return section("cost", "Cost", grid("Cost of a run", head, lines, [note]), own, *_bytes(sizes))


def _bytes(sizes: dict[str, dict[str, dict[str, float]]]) -> Iterator[Block]:
    ways = [(method, way, kinds) for method, both in sizes.items() for way, kinds in both.items()]
    if any(sum(kinds.values()) for *_, kinds in ways):
        shown = {
            method: {way: {short_kind(kind): size for kind, size in kinds.items()} for way, kinds in both.items()}
            for method, both in sizes.items()
        }
        rows = [[method, way, kind, size] for method, way, kinds in ways for kind, size in sorted(kinds.items())]
        yield figure(
            "bytes-by-kind",
            plots.bytes_by_kind(shown),
            "Megabytes per run by kind of content",
            "What crossed the sites' borders, by kind of content.",
            [["method", "direction", "kind", "bytes"], *rows],
        )


def warnings_section(results: Sequence[RunResult], measured: Sequence[RunResult] = ()) -> Section:
    """What follows from the results, or from ``measured``, and what the runs warned of."""
    where: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for warning in dict.fromkeys(result.warnings):
            where[warning].append(f"{result.method} / {result.target} / seed {result.seed}")
    items = cautions(measured or results)
    for warning, places in where.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        items.append(f"{warning} ({'; '.join(places[:3])}{more})")
    return section("warnings", "Warnings", Listing(tuple(items)) if items else Text("None."), folds=not items)


def experiment_file(collected: Collected) -> dict[str, Any]:
    """The experiment as a file for `fedshift run`, with every default written out, as far as records have it.

    Each run records its own settings, where the budget of every site takes the place of `training.mini_batches`. If
    the mean over sites is the same in all runs of a method, it takes its place again; else the budgets follow from the
    rounds.
    """
    results, order = collected.results, collected.order
    whole = {name: value for name, value in results[0].options.items() if name not in _OF_A_RUN}
    for section_name, left_out in (("data", "fingerprint"), ("training", "mini_batches")):
        if isinstance(found := whole.get(section_name), Mapping):
            whole[section_name] = {name: value for name, value in found.items() if name != left_out}
    common = _common_budget(results, results[0].method)
    if common is not None and "steps" not in whole["training"]:
        whole["training"]["mini_batches"] = common
    if (protocol := protocol_of(whole.get("protocol"))) is not None:
        pairs = {result.target: (result.labelled, result.unlabelled) for result in results}
        whole["protocol"] = {**whole["protocol"], **protocol.extent_of(order.targets, order.seeds, pairs)}
    first = {method: next(one for one in results if one.method == method) for method in order.methods}
    methods = [
        # Packing does not keep the order of options.
        {"name": own.get("name"), **own, **_changes(results, method, common)}
        for method, one in first.items()
        if isinstance(own := one.options.get("method"), Mapping)
    ]
    return whole | ({"methods": methods} if methods else {})


def _changes(results: Sequence[RunResult], method: str, common: int | None) -> dict[str, Any]:
    """The ``training`` of a method that trained otherwise than the first run, whose runs have the budget ``common``."""
    own = next(one for one in results if one.method == method)
    changes, budget = otherwise(own, results[0]), _common_budget(results, method)
    if budget != common and "steps" not in own.options.get("training", {}):
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


def settings_section(collected: Collected) -> Section:
    """Versions, the command, and every setting."""
    results = collected.results
    seen: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        for name, value in {**result.versions, "device": result.device, "threads": str(result.threads)}.items():
            seen[name].setdefault(value)
    rows = [[name, ", ".join(values)] for name, values in seen.items()]
    blocks: list[Block | None] = [grid("Versions", ["what", "in these runs"], rows, css="facts")]
    mixed = [name for name, values in seen.items() if len(values) > 1]
    if mixed:
        blocks.append(Text(f"The runs were not run alike ({', '.join(mixed)}): compare with care.", "note"))
    file = f"{collected.name}.yaml"
    command = f"fedshift run {shlex.quote(file)}"
    blocks.append(
        Text(f"To run it again: {command}, with the file below. A file of your own is named there by its checksum.")
    )
    blocks.append(settings(file, experiment_file(collected)))
    first = {method: next(one for one in results if one.method == method) for method in collected.order.methods}
    blocks.append(settings("Data", results[0].data))
    blocks += [settings(f"Settings of {method}", result.options) for method, result in first.items()]
    return section("settings", "Settings and versions", *blocks)


def _learned(results: Sequence[RunResult]) -> tuple[str, str]:
    """A fact: how many classes there are, or which label is predicted."""
    if results[0].metric in ("rmse", "concordance"):
        return "predicted", ", ".join(results[0].classes)
    return {"class": "classes"}.get(unit_of(results), f"{unit_of(results)}s"), str(len(results[0].classes))
