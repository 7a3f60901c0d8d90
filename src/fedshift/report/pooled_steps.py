"""Optimiser steps of the pooled rows of a table, which train on equally many samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from fedshift.evaluation.records import RunResult
from fedshift.methods.index import ENTRIES
from fedshift.report.method_roles import method_name, role_of

_LEFT_OVER, _ROUNDED = 3, 0.02
"""Differences that come from mini-batches which are divided over sites and rounded up."""


def steps_of(runs: Sequence[RunResult]) -> float | None:
    """Steps of a row's optimiser in a run, mean over its runs; None if it is not pooled, or a record does not say it.

    It follows from the options, so that old records have it.
    """
    if role_of(runs[0]) != "pooled":
        return None
    steps_of_runs = [_steps_of_run(run.options, method_name(run)) for run in runs]
    known = [steps for steps in steps_of_runs if steps is not None]
    return fmean(known) if len(known) == len(steps_of_runs) else None


def _steps_of_run(options: Mapping[str, Any], name: str) -> float | None:
    training, method = options.get("training"), options.get("method")
    budget = training.get("mini_batches") if isinstance(training, Mapping) else None
    # Only known names: a record must not decide which code is imported.
    if name not in ENTRIES or not isinstance(method, Mapping) or not isinstance(budget, Mapping):
        return None
    from fedshift.methods.pooled.equal_steps import steps_of_run  # with torch, which other tables do not need
    from fedshift.methods.registry import method_class

    kind = method_class(name)
    try:
        made = kind.model_validate({field: value for field, value in method.items() if field in kind.model_fields})
    except ValidationError:  # options of another version
        return None
    return steps_of_run(made, budget)


def steps_in_words(steps: Mapping[str, float]) -> str | None:
    """What to say of the steps of a table's pooled rows, which train on equally many samples; None if it has one.

    Example:
        >>> steps_in_words({"deepall": 60.0, "split": 60.0})
        'Optimiser steps in a run: 60 in every pooled row.'
        >>> steps_in_words({"deepall": 60.0, "masf": 20.0, "dger": 20.0})[:55]
        'Optimiser steps in a run, on equally many samples: deep'
    """
    if len(steps) < 2:
        return None
    least, most = min(steps.values()), max(steps.values())
    if most - least <= max(_LEFT_OVER, _ROUNDED * most):
        shown = f"{most:,.0f}" if f"{least:,.0f}" == f"{most:,.0f}" else f"{least:,.0f} to {most:,.0f}"
        return f"Optimiser steps in a run: {shown} in every pooled row."
    rows: dict[str, list[str]] = {}
    for name, number in steps.items():
        rows.setdefault(f"{number:,.0f}", []).append(name)
    listing = "; ".join(f"{', '.join(names)} {number}" for number, names in rows.items())
    return (
        f"Optimiser steps in a run, on equally many samples: {listing}. Of these pooled rows only those of equal steps "
        "are alike; with domain_batches: split each draws as often as deepall."
    )
