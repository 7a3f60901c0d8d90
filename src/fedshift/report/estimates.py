"""Targets that have no labels: they are not measured, and what stands in their place is an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from fedshift.evaluation.estimate.combination import LEVEL, Estimate
from fedshift.experiment.estimate import estimate_at_run
from fedshift.report.collect import Collected

Estimates = dict[str, dict[str, list[Estimate]]]
"""Target without labels → method → the estimate of each seed."""


def estimates_of(collected: Collected) -> Estimates:
    """The accuracy to expect at each target without labels, of every run.

    Raises:
        UserError: predictions are damaged.
    """
    found: Estimates = {}
    for run in collected.unmeasured:
        by_method = found.setdefault(run.result.target, {})
        by_method.setdefault(run.result.method, []).append(estimate_at_run(run.folder, run.result))
    return found


def notes_on(collected: Collected) -> Iterator[str]:
    """A sentence for each target without labels, and warnings."""
    return sentences(estimates_of(collected))


def sentences(found: Estimates) -> Iterator[str]:
    """The same of estimates that are known."""
    for site, by_method in found.items():
        told = "; ".join(f"{method} {in_words(estimates)}" for method, estimates in by_method.items())
        yield f"{site} has no labels, so it is not measured. Accuracy there, estimated: {told}."
        if any(one.harmful for estimates in by_method.values() for one in estimates):
            yield f"Warning: {site} differs so much that models may do much worse there: have some samples labelled."


def in_words(estimates: Sequence[Estimate]) -> str:
    """The mean over seeds of estimates with their interval, or why there is none."""
    found = mean_of(estimates)
    if found is None:
        return f"none ({estimates[0].reasons[0]})"
    given = sum(not one.abstain for one in estimates)
    fewer = f", {given} of {len(estimates)} seeds" if given < len(estimates) else ""
    return f"{found[0]:.1f} % ({found[1]:.1f} to {found[2]:.1f} in {LEVEL:.0%} of cases{fewer})"


def mean_of(estimates: Sequence[Estimate]) -> tuple[float, float, float] | None:
    """The means over seeds of estimates and of the ends of their intervals; None where none is given."""
    known = [(one.estimate, one.low, one.high) for one in estimates if not one.abstain]
    if not known:
        return None
    middle, low, high = (fmean(part or 0.0 for part in parts) for parts in zip(*known, strict=True))
    return middle, low, high
