"""Targets without labels: what to expect there, with a picture, and in what their samples are unlike the sources'."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.report import plots
from fedshift.report.report import Report
from fedshift.report.sections.blocks import Block, Cells, Entry, Listing, Section, Text, figure, grid, number, section

_RESTS_ON = (
    "An estimate is no measurement: it compares the models' answers there with those at targets that have labels. "
    "Here, in tables and in the verdict it rests on the scores that runs noted. fedshift estimate also looks at "
    "samples again where it can, so it may say another number: that is then the one to take."
)


def without_labels_section(report: Report) -> Section | None:
    """What is estimated where nothing could be measured; None where all targets have labels."""
    if not report.unmeasured.means:
        return None
    return section("estimates", "Targets without labels", *_blocks(report), folds=False)


def _blocks(report: Report) -> Iterator[Block]:
    unmeasured = report.unmeasured
    yield from (Text(paragraph, "verdict") for paragraph in unmeasured.for_a_board)
    yield Text(" ".join([*unmeasured.sentences, *report.choices, _RESTS_ON]))
    rows = list[Cells]()
    for site, method, samples, middle, usual in unmeasured.means:
        ends = (Entry("–"),) * 3 if middle is None else tuple(number(part, 1) for part in middle)
        rows.append([site, method, f"{samples:,}", *ends, number(usual, 1)])
    drawn = {f"{method} at {site}": (*middle, usual) for site, method, _, middle, usual in unmeasured.means if middle}
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
    further: list[Cells] = [[*names, *(number(part, 1) for part in ends)] for *names, ends in unmeasured.further]
    if further:
        head = ["target", "method", "measure", "estimate, %", "low", "high"]
        yield grid("AUROC, sensitivity and specificity there", head, further, ["Of the first seed; intervals of 90 %."])
    if unmeasured.reasons:
        yield Listing(unmeasured.reasons, "What is unlike, and what else to know")
