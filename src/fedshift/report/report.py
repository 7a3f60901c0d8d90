"""What finished runs say, computed once. Whatever shows it reads this value and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedshift.evaluation.records import Selection
from fedshift.report.advice.verdict import Verdict, verdict
from fedshift.report.choice import Choice, choices
from fedshift.report.collect import Collected
from fedshift.report.conditions import Conditions, conditions
from fedshift.report.estimates import Estimates, estimates_of
from fedshift.report.roles import Role
from fedshift.report.table import Table, table_of


@dataclass(frozen=True)
class Report:
    """What the finished runs of an experiment say.

    Attributes:
        name: the experiment's name.
        table: methods by targets, with further tables below it.
        used: what each method used.
        estimates: the accuracies to expect at targets without labels.
        choices: whose model answers at these.
        verdict: what the last rounds say; None where the table is of other rounds or of another metric.
    """

    name: str
    table: Table
    used: Mapping[str, Conditions]
    estimates: Estimates
    choices: tuple[Choice, ...]
    verdict: Verdict | None

    @property
    def roles(self) -> dict[str, Role]:
        """Method → what it is to its reader."""
        return {name: row.role for name, row in self.used.items()}


def report_of(collected: Collected, select: Selection = "last", metric: str = "") -> Report:
    """Compute what finished runs say.

    Args:
        collected: the runs.
        select: the selection rule whose round is taken.
        metric: what the table reports, such as auroc; "": the experiment's headline.

    Raises:
        UserError: no run has a round of this rule or such a metric, the runs are of several tasks, or predictions are
            damaged.
    """
    used, estimates = conditions(collected.results), estimates_of(collected)
    found = choices(collected, estimates)
    table = table_of(collected, used, estimates, found, select, metric)
    usual = select == "last" and not metric
    says = verdict(collected, table, used, estimates, found) if usual else None
    return Report(collected.name, table, used, estimates, found, says)


def verdict_of(collected: Collected) -> Verdict:
    """What the last rounds of finished runs say.

    Raises:
        UserError: as `report_of`.
    """
    found = report_of(collected).verdict
    assert found is not None
    return found
