"""What finished runs say, computed once. Whatever shows it reads this value and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedshift.evaluation.records import Selection
from fedshift.report.advice.verdict import Verdict, verdict
from fedshift.report.choice import choices, choices_in_words
from fedshift.report.collect import Collected
from fedshift.report.conditions import Conditions, Role, conditions
from fedshift.report.details import Details, details_of, warnings_with_places
from fedshift.report.estimates import Unmeasured, estimates_of, unmeasured_of
from fedshift.report.mistakes import ShownSamples
from fedshift.report.table import Table, table_of, with_worst_columns


@dataclass(frozen=True)
class Report:
    """What the finished runs of an experiment say."""

    name: str  # the experiment's name
    # methods by targets, with further tables below it; of very many targets the worst few. Its rows have all
    table: Table
    targets: int  # the number of targets
    used: Mapping[str, Conditions]  # what each method used
    unmeasured: Unmeasured  # what to expect at targets without labels
    choices: tuple[str, ...]  # whose model should answer at these, in words
    verdict: Verdict | None  # what the last rounds say; None where the table is of other rounds or of another metric
    warnings: tuple[str, ...] = ()  # what the page warns of
    # the tables of the other selection rules; None where no source kept a held-out part
    others: Mapping[Selection, Table | None] = field(default_factory=dict)
    # what the page has beside; None for what shows tables and verdict alone, and where nothing was measured
    details: Details | None = None

    @property
    def roles(self) -> dict[str, Role]:
        """Method → what it is to its reader."""
        return {name: row.role for name, row in self.used.items()}


def report_of(collected: Collected, select: Selection = "last", metric: str = "") -> Report:
    """Compute what tables and verdict of finished runs show.

    Args:
        select: the selection rule whose round is taken.
        metric: what the table reports, such as auroc; "": the experiment's headline.

    Raises:
        UserError: no run has a round of this rule or such a metric, the runs are of several tasks, or predictions are
            damaged.
    """
    return _Computing(collected).report(select, metric)


def whole_report(collected: Collected, samples: ShownSamples | None = None) -> Report:
    """Compute what the page shows, too.

    ``samples``: the samples, if the page shows them. UserError as `report_of`; or a `rounds.jsonl` is corrupt.
    """
    return _Computing(collected).whole(samples)


def verdict_of(collected: Collected) -> Verdict:
    """What the last rounds of finished runs say. UserError as `report_of`."""
    verdict = report_of(collected).verdict
    assert verdict is not None
    return verdict


class _Computing:
    """What tables and verdict are made of."""

    def __init__(self, collected: Collected) -> None:
        self._runs = collected
        self._used, self._estimates = conditions(collected.results), estimates_of(collected)
        self._choices = choices(collected, self._estimates)

    def _table(self, select: Selection, metric: str = "") -> Table:
        return table_of(self._runs, self._used, self._estimates, self._choices, select, metric)

    def report(self, select: Selection = "last", metric: str = "", table: Table | None = None) -> Report:
        table = table or self._table(select, metric)
        usual = select == "last" and not metric
        return Report(
            self._runs.name,
            with_worst_columns(table),
            len(table.columns) - 1,
            self._used,
            unmeasured_of(self._runs, self._estimates),
            tuple(choices_in_words(self._choices)),
            verdict(self._runs, table, self._used, self._estimates, self._choices) if usual else None,
        )

    def whole(self, samples: ShownSamples | None) -> Report:
        runs, table = self._runs, self._table("last")
        report = self.report(table=table)
        if not runs.runs:  # no target has labels, so nothing was measured
            return replace(report, warnings=warnings_with_places([run.result for run in runs.unmeasured]))
        assert report.verdict is not None
        return replace(
            report,
            warnings=warnings_with_places([run.result for run in runs.runs], runs.results),
            others={rule: self._other(rule) for rule in _OTHERS},
            details=details_of(runs, table, report.verdict.method, samples),
        )

    def _other(self, rule: Selection) -> Table | None:
        measured = any(result.score(rule) is not None for result in self._runs.results)
        return with_worst_columns(self._table(rule)) if measured else None


_OTHERS: tuple[Selection, ...] = ("source", "oracle")
