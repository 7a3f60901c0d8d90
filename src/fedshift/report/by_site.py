"""Runs in which each site is measured by itself, told apart: one result for each site, as if each were a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fedshift.evaluation.records import RoundRecord, RunResult, SelectedRound, Selection, SiteMetrics
from fedshift.experiment.protocols.index import protocol_of


def measures_each(result: RunResult) -> bool:
    """Whether a run's protocol measures each site by itself."""
    protocol = protocol_of(result.options.get("protocol"))
    return protocol is not None and protocol.by_site


def at_sites(results: Iterable[RunResult]) -> Iterator[RunResult]:
    """The results, those of runs that measure each site replaced by one for each site.

    Example:
        >>> last = SelectedRound(round=1, accuracy=75.0, sites={"a": 70.0, "b": 80.0})
        >>> options = {"protocol": {"kind": "participants"}}
        >>> run = RunResult.model_construct(target="sites", selected={"last": last}, sites=[], options=options, data={})
        >>> [(one.target, one.accuracy()) for one in at_sites([run])]
        [('a', 70.0), ('b', 80.0)]
    """
    for result in results:
        yield from _apart(result, "target") if measures_each(result) else (result,)


def at_common_tests(results: Iterable[RunResult]) -> Iterator[RunResult]:
    """The results on common test sets, one for each; none of runs without any."""
    for result in results:
        yield from _apart(result, "common")


def rounds_at(result: RunResult, rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The rounds of a run as one of `at_sites` has them: measured at its site alone; of other runs as they are."""
    if not measures_each(result):
        return list(rounds)
    return [
        record.model_copy(
            update={
                "target_accuracy": {
                    name: record.target_accuracy[name] for name in (result.target,) if name in record.target_accuracy
                }
            }
        )
        for record in rounds
    ]


def _apart(result: RunResult, part: str) -> Iterator[RunResult]:
    by_site: dict[str, list[SiteMetrics]] = {}
    for site in result.sites:
        if site.part in (part, "held_out"):
            by_site.setdefault(site.site, []).append(site)
    last = result.selected.get("last")
    for name in {} if last is None else (last.common if part == "common" else _measured_sites(last, result)):
        selected: dict[Selection, SelectedRound | None] = {
            rule: None if chosen is None else _at(chosen, name, part) for rule, chosen in result.selected.items()
        }
        sites = [
            site.model_copy(update={"part": "target"}) if site.part == part else site for site in by_site.get(name, ())
        ]
        yield result.model_copy(update={"target": name, "selected": selected, "sites": sites})


def _measured_sites(last: SelectedRound, result: RunResult) -> Iterable[str]:
    """The sites with a test part, in the order of the data; all that a record has where it does not say which."""
    known = result.data.get("measured_samples")
    return [name for name in known if name in last.sites] if isinstance(known, Mapping) else last.sites


def _at(selected: SelectedRound, name: str, part: str) -> SelectedRound | None:
    value = (selected.common if part == "common" else selected.sites).get(name)
    if value is None:
        return None
    return selected.model_copy(update={"accuracy": value, "sites": {name: value}, "common": {}, "per_class": []})
