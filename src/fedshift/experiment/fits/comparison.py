"""What methods are compared by, and whether it can be measured at the targets."""

from __future__ import annotations

from fedshift.data.builders.at_sites import AtSites
from fedshift.data.tasks.objective import objective_of
from fedshift.errors import UserError
from fedshift.evaluation.measuring import measuring_of
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import ERRORS
from fedshift.experiment.fits.about import About


def protocol_fits(about: About) -> None:
    """Check that the protocol can compare what the task is measured by."""
    protocol, data = about.experiment.protocol, about.data
    if protocol.both_sides and measuring_of(objective_of(data.preprocessing)).metric in ERRORS:
        raise UserError(
            f"protocol.kind: {protocol.kind} compares by the harmonic mean of both sides, which is near the smaller "
            f"number, so the better side's of two errors, and {data.task} is compared by errors: use leave_one_out or "
            "adapt_to_one"
        )


def headline_fits(about: About) -> None:
    """Check that the headline can be measured on these data."""
    headline, data = about.experiment.evaluation.headline, about.data
    if headline != "accuracy" and data.task == "segmentation":
        raise UserError(
            f"evaluation.headline: {headline} is a measure of classification, but data set {data.name} is for "
            "segmentation, which is compared by the Dice coefficient: leave it out"
        )
    measuring = measuring_of(objective_of(data.preprocessing))
    if headline not in ("accuracy", *measuring.metrics):
        raise UserError(
            f"evaluation.headline: {headline} is no measure of {data.task}, which data set {data.name} is for: choose "
            f"{' or '.join(measuring.metrics)}"
        )
    if "two classes" in ENTRIES[headline].needs and len(data.classes) != 2:
        raise UserError(
            f"evaluation.headline: {headline} needs two classes, but data set {data.name} has {len(data.classes)}: "
            "choose balanced_accuracy or auroc"
        )


def targets_fit(about: About) -> None:
    """Check that something can be measured at every target."""
    plan, protocol = about.plan, about.experiment.protocol
    measuring = measuring_of(objective_of(about.data.preprocessing))
    if measuring.metric != "concordance" or isinstance(about.experiment.data, AtSites):
        return
    for target in plan.targets:
        sides = protocol.rows_to_compare(plan.split(target, protocol.seeds[0]))
        for site, rows in ((site, rows) for side in sides for site, rows in side.items()):
            labels = about.data.domains[site].labels[rows]
            if measuring.value(labels[:, 0], labels) is None:
                raise UserError(
                    f"data: at site '{site}' no two samples can be compared, since no event was seen before another "
                    "time: take more samples, or do not measure there"
                )
