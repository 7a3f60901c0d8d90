"""Targets without labels: what to expect there, with a picture, and in what their samples are unlike the sources'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.report import plots
from fedshift.report.choice import choices_in_words
from fedshift.report.collect import Collected
from fedshift.report.estimates import Estimates, for_a_board, mean_of, sentences
from fedshift.report.report import Report
from fedshift.report.sections.blocks import Block, Cells, Entry, Listing, Section, Text, figure, grid, number, section

_TITLE = "Targets without labels"


def without_labels_section(collected: Collected, report: Report) -> Section | None:
    """What is estimated where nothing could be measured; None where all targets have labels."""
    if not report.estimates:
        return None
    return section("estimates", _TITLE, *_blocks(collected, report), folds=False)


def _blocks(collected: Collected, report: Report) -> Iterator[Block]:
    found = report.estimates
    yield from (Text(paragraph, "verdict") for paragraph in for_a_board(found))
    yield Text(" ".join(_in_short(report)))
    rows, drawn = list[Cells](), {}
    for site, by_method in found.items():
        for method, estimates in by_method.items():
            middle = mean_of(estimates)
            usual = next((one.usual for one in estimates if one.usual is not None), None)
            ends = (Entry("–"),) * 3 if middle is None else tuple(number(part, 1) for part in middle)
            rows.append([site, method, f"{_samples(collected, site):,}", *ends, number(usual, 1)])
            if middle is not None:
                drawn[f"{method} at {site}"] = *middle, usual
    if drawn:
        yield figure(
            "estimates",
            plots.estimates(drawn),
            "Estimated accuracy at targets without labels, with intervals of 90 %",
            "Estimate and interval; the cross is the mean of the targets that have labels.",
            [["run", "estimate", "low", "high", "usual"], *([name, *numbers] for name, numbers in drawn.items())],
        )
    head = ["target", "method", "samples", "estimate, %", "low", "high", "mean of measured targets, %"]
    yield grid("Accuracy where it could not be measured", head, rows, ["Means over seeds; intervals of 90 %."])
    if further := list(_further(found)):
        head = ["target", "method", "measure", "estimate, %", "low", "high"]
        yield grid("AUROC, sensitivity and specificity there", head, further, ["Of the first seed; intervals of 90 %."])
    if reasons := tuple(_reasons(found)):
        yield Listing(reasons, "What is unlike, and what else to know")


def _further(found: Estimates) -> Iterator[Cells]:
    """AUROC, sensitivity and specificity of two classes, where they can be estimated."""
    for site, by_method in found.items():
        for method, estimates in by_method.items():
            for name, one in estimates[0].measures.items():
                if one.estimate is not None:
                    at = "" if name == "auroc" else f" at {estimates[0].threshold:.2f}"
                    ends = (number(part, 1) for part in (one.estimate, one.low, one.high))
                    yield [site, method, f"{ENTRIES[name].title}{at}", *ends]


def _in_short(report: Report) -> Iterator[str]:
    """The same in numbers, and what they rest on."""
    yield from sentences(report.estimates)
    yield from choices_in_words(report.choices)
    yield (
        "An estimate is no measurement: it compares the models' answers there with those at targets that have labels. "
        "Here, in tables and in the verdict it rests on the scores that runs noted. fedshift estimate also looks at "
        "samples again where it can, so it may say another number: that is then the one to take."
    )


def _samples(collected: Collected, site: str) -> int:
    known = (run.result.without_labels.get(site) for run in collected.unmeasured)
    return next((one.samples for one in known if one is not None), 0)


def _reasons(found: Estimates) -> Iterator[str]:
    """Each reason once, with the methods that it holds for."""
    by_reason: dict[tuple[str, str], Sequence[str]] = {}
    for site, by_method in found.items():
        for method, estimates in by_method.items():
            for reason in dict.fromkeys(reason for one in estimates for reason in one.reasons):
                by_reason[site, reason] = [*by_reason.get((site, reason), []), method]
    for (site, reason), methods in by_reason.items():
        whom = "" if len(methods) == len(found[site]) else f" ({', '.join(methods)})"
        yield f"{site}: {reason}{whom}"
