"""Targets that have no labels: they are not measured, and what stands in their place is an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedshift.evaluation.estimate.combination import LEVEL, Estimate
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.experiment.estimate import AT_SITE, estimate_at_run
from fedshift.report.collect import Collected

Estimates = dict[str, dict[str, list[Estimate]]]
"""Target without labels → method → the estimate of each seed."""
Interval = tuple[float, float, float]
"""An estimate, and the ends of its interval, in percent."""


@dataclass(frozen=True)
class Unmeasured:
    """What to expect at the targets without labels."""

    sentences: tuple[str, ...]  # a sentence for each target, and warnings
    for_a_board: tuple[str, ...]  # a paragraph for each, for people who decide and do not train models
    # target, method, samples, mean over seeds or None, and the usual accuracy of measured targets or None
    means: tuple[tuple[str, str, int, Interval | None, float | None], ...]
    # target, method, name of a measure, and its estimate of the first seed
    further: tuple[tuple[str, str, str, Interval], ...]
    reasons: tuple[str, ...]  # in what samples are unlike the sources'


def unmeasured_of(collected: Collected, by_site: Estimates) -> Unmeasured:
    """What estimates say, in numbers and words."""
    every = [(site, method, those) for site, by_method in by_site.items() for method, those in by_method.items()]
    return Unmeasured(
        tuple(sentences(by_site)),
        tuple(for_a_board(by_site)),
        tuple(
            (
                site,
                method,
                _samples(collected, site),
                mean_of(those),
                next((o.usual for o in those if o.usual is not None), None),
            )
            for site, method, those in every
        ),
        tuple((site, method, *further) for site, method, those in every for further in _further(those[0])),
        tuple(_reasons(by_site)),
    )


def _further(first: Estimate) -> Iterator[tuple[str, Interval]]:
    """AUROC, sensitivity and specificity of two classes, where they can be estimated."""
    for name, measure in first.measures.items():
        if measure.estimate is not None and measure.low is not None and measure.high is not None:
            at = "" if name == "auroc" else f" at {first.threshold:.2f}"
            yield f"{ENTRIES[name].title}{at}", (measure.estimate, measure.low, measure.high)


def _samples(collected: Collected, site: str) -> int:
    known = (run.result.without_labels.get(site) for run in collected.unmeasured)
    return next((labelled.samples for labelled in known if labelled is not None), 0)


def _reasons(by_site: Estimates) -> Iterator[str]:
    """Each reason once, with the methods that it holds for."""
    by_reason: dict[tuple[str, str], Sequence[str]] = {}
    for site, by_method in by_site.items():
        for method, estimates in by_method.items():
            for reason in dict.fromkeys(reason for estimate in estimates for reason in estimate.reasons):
                by_reason[site, reason] = [*by_reason.get((site, reason), []), method]
    for (site, reason), methods in by_reason.items():
        whom = "" if len(methods) == len(by_site[site]) else f" ({', '.join(methods)})"
        yield f"{site}: {reason}{whom}"


def estimates_of(collected: Collected) -> Estimates:
    """The accuracy to expect at each target without labels, of every run. UserError if predictions are damaged."""
    by_site: Estimates = {}
    for run in collected.unmeasured:
        by_method = by_site.setdefault(run.result.target, {})
        by_method.setdefault(run.result.method, []).append(estimate_at_run(run.folder, run.result))
    return by_site


def sentences(by_site: Estimates) -> Iterator[str]:
    """A sentence for each target without labels, and warnings."""
    for site, by_method in by_site.items():
        told = "; ".join(f"{method} {in_words(estimates)}" for method, estimates in by_method.items())
        yield f"{site} has no labels, so it is not measured. Accuracy there, estimated: {told}."
        if any(estimate.harmful for estimates in by_method.values() for estimate in estimates):
            yield f"Warning: {site} differs so much that models may do much worse there: have some samples labelled."


def in_words(estimates: Sequence[Estimate]) -> str:
    """The mean over seeds of estimates with their interval, or why there is none."""
    mean = mean_of(estimates)
    if mean is None:
        return f"none ({estimates[0].reasons[0]})"
    given = sum(not estimate.abstain for estimate in estimates)
    fewer = f", {given} of {len(estimates)} seeds" if given < len(estimates) else ""
    return f"{mean[0]:.1f} % ({mean[1]:.1f} to {mean[2]:.1f} in {LEVEL:.0%} of cases{fewer})"


def for_a_board(by_site: Estimates) -> Iterator[str]:
    """A paragraph for each target without labels, in words for people who decide and do not train models."""
    for site, by_method in by_site.items():
        method = max(by_method, key=lambda name: (mean_of(by_method[name]) or (0.0, -1.0, 0.0))[1])
        yield " ".join(_for_a_board(site, method, len(by_method), by_method[method]))


def _for_a_board(site: str, method: str, methods: int, estimates: Sequence[Estimate]) -> Iterator[str]:
    first, middle = estimates[0], mean_of(estimates)
    which = method if methods == 1 else f"{method}, the one of {methods} that promises most"
    yield f"Nobody has checked how often the model is right at {site}, since no sample there has a label ({which})."
    if first.reasons[:1] == (AT_SITE,):
        yield f"What to expect is known there alone: {AT_SITE}. Ask its people before anybody relies on the model."
        return
    if middle is None:
        yield f"We cannot say what to expect: {first.reasons[0]}."
    else:
        share, low, high = (f"{part:.0f}" for part in middle)
        yield (
            f"At {first.sites} other sites that such models had not seen, it is known. From that we expect {share} of "
            f"100 answers to be right, and {low} to {high} with a certainty of {LEVEL:.0%}."
        )
        unlike = [reason for estimate in estimates for reason in estimate.reasons if "look unlike" in reason]
        yield f"What is unlike there: {unlike[0]}." if unlike else "Its samples look like those of the other sites."
    yield f"What to do: {_advice(estimates, known=middle is not None)}."


def _advice(estimates: Sequence[Estimate], *, known: bool) -> str:
    if any(estimate.too_unlike for estimate in estimates):
        return "do not use the model there until the data are mended, or samples with labels show that it works"
    if not known:
        return "have samples labelled before the model is used; fedshift label says which"
    if any(estimate.harmful for estimate in estimates):
        return "do not use it there yet, since it may do much worse than elsewhere: have samples labelled first"
    return "have some samples labelled to confirm it before use (fedshift label), and watch it by the month after"


def mean_of(estimates: Sequence[Estimate]) -> Interval | None:
    """The means over seeds of estimates and of the ends of their intervals; None where none is given."""
    known = [(estimate.estimate, estimate.low, estimate.high) for estimate in estimates if not estimate.abstain]
    if not known:
        return None
    middle, low, high = (fmean(part or 0.0 for part in parts) for parts in zip(*known, strict=True))
    return middle, low, high
