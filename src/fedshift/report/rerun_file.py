"""The experiment of finished runs as a file for ``fedshift run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedshift.evaluation.records import RunResult
from fedshift.experiment.protocols.index import protocol_of
from fedshift.report.collect import Collected
from fedshift.report.conditions import otherwise

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
