"""Find the runs of an experiment below a folder and read them.

A run is one (method, target, seed). Its folder is `<experiment>/<method>/<target>/seed-<n>/`. It is finished if that
folder holds `result.json`, or if the experiment's packed files hold the run. The experiment's folder may hold
`order.json`, which has the planned names in order: `{"methods": […], "targets": […], "seeds": […]}`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedshift.errors import UserError, nearest
from fedshift.evaluation.packs import RUNS, with_kept_digits
from fedshift.evaluation.records import RoundRecord, RunResult, SelectedRound, Selection, SiteMetrics
from fedshift.evaluation.stored import (
    ORDER,
    RESULT,
    Order,
    is_finished,
    packed_run,
    read_failure,
    read_order,
    read_result,
    run_folders,
)
from fedshift.experiment.protocols.index import protocol_of
from fedshift.text import one_line


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


_MOST_NAMES = 12


@dataclass(frozen=True)
class FinishedRun:
    """A finished run and its folder."""

    folder: Path
    result: RunResult


@dataclass(frozen=True)
class Collected:
    """The finished runs below a folder."""

    name: str  # the experiment's name
    runs: tuple[FinishedRun, ...]  # the finished runs, in the order of the experiment
    order: Order  # methods, targets and seeds that have results: the planned ones in their order, then the others
    unfinished: int  # number of planned runs without a result
    planned: int  # number of planned runs
    reasons: tuple[str, ...] = ()  # why runs stopped that are unfinished, one line for each that failed
    # finished runs whose target has no labels. They are not among ``runs``, nor in the order
    unmeasured: tuple[FinishedRun, ...] = ()

    @property
    def results(self) -> list[RunResult]:
        """What tables are made of: the results of ``runs``, by site where a run measures each site by itself."""
        return list(self._results)

    @cached_property
    def _results(self) -> tuple[RunResult, ...]:
        return tuple(at_sites(run.result for run in self.runs))

    @property
    def seen(self) -> tuple[FinishedRun, ...]:
        """`results` with their folders."""
        return tuple(FinishedRun(run.folder, result) for run in self.runs for result in at_sites([run.result]))

    @property
    def all_runs(self) -> tuple[FinishedRun, ...]:
        """The finished runs, measured or not."""
        return (*self.runs, *self.unmeasured)

    @property
    def progress(self) -> str | None:
        """Text such as "2 of 18 runs unfinished", and why the first one stopped; None if all runs are finished."""
        if not self.unfinished:
            return None
        more = f" (and {len(self.reasons) - 1} more failed)" if len(self.reasons) > 1 else ""
        why = f": {one_line(self.reasons[0])}{more}" if self.reasons else ""
        return f"{self.unfinished} of {self.planned} runs unfinished{why}"


def natural(text: str) -> list[tuple[int, str]]:
    """A sorting key that puts M15 before M100.

    Example:
        >>> sorted(["M100", "M15", "art"], key=natural)
        ['art', 'M15', 'M100']
    """
    pieces = re.findall(r"\d+|\D+", text.casefold())
    return [(int(piece), "") if piece.isdecimal() else (0, piece) for piece in pieces]


def collect(folder: str | os.PathLike[str]) -> Collected:
    """Read all finished runs in or below a folder.

    ``folder``: an experiment's folder, a folder that holds one experiment, or the folder of a method, target or seed.
    UserError if there is no such folder, it holds no finished run or several experiments, or a file is corrupt.
    """
    root = Path(folder).resolve()
    folders = run_folders(root)
    if not folders:
        _check_is_folder(root, folder)
        raise UserError(f"'{folder}' holds no run: give a folder that 'fedshift run' made, such as runs/<experiment>")
    experiments = sorted({run.parents[2] for run in folders})
    if len(experiments) > 1:
        names = ", ".join(str(experiment.relative_to(root)) for experiment in experiments)
        raise UserError(f"'{folder}' holds {len(experiments)} experiments ({names}): give the folder of one of them")
    runs = [FinishedRun(run, read_result(run / RESULT)) for run in folders if is_finished(run)]
    if not runs:
        raise UserError(
            f"no finished run in '{folder}' ({len(folders)} begun): "
            "call 'fedshift run' with the same experiment file to resume them"
        )
    _check_unique(runs)

    order = read_order(experiments[0] / ORDER)
    planned = max(_number_planned(root, experiments[0], order, folders), len(folders))
    methods = _in_planned_order(order.methods, (run.result.method for run in runs))
    targets = _in_planned_order(order.targets, (run.result.target for run in runs))
    runs.sort(key=lambda p: (methods.index(p.result.method), targets.index(p.result.target), p.result.seed))
    measured = [run for run in runs if run.result.is_measured]
    seen = list(at_sites(run.result for run in measured))
    there = {name for run in seen for name in (run.method, run.target)}
    targets = list(dict.fromkeys((*targets, *(run.target for run in seen))))
    return Collected(
        name=experiments[0].name,
        runs=tuple(measured),
        unmeasured=tuple(run for run in runs if not run.result.is_measured),
        order=Order(
            methods=[name for name in methods if name in there],
            targets=[name for name in targets if name in there],
            seeds=sorted({run.result.seed for run in runs}),
            headline=order.headline,
        ),
        unfinished=planned - len(runs),
        planned=planned,
        reasons=tuple(_reasons(folder for folder in folders if not is_finished(folder))),
    )


def _reasons(unfinished: Iterable[Path]) -> Iterator[str]:
    """Why runs stopped, for those that failed."""
    yield from (reason for folder in unfinished if (reason := read_failure(folder)) is not None)


def _check_is_folder(root: Path, asked: str | os.PathLike[str]) -> None:
    if root.is_dir():
        return
    if root.exists():
        raise UserError(f"'{asked}' is a file: give the folder that 'fedshift run' made, such as runs/<experiment>")
    beside = [path.name for path in root.parent.iterdir() if path.is_dir()] if root.parent.is_dir() else []
    hint = nearest(root.name, beside) if 0 < len(beside) <= _MOST_NAMES else "run an experiment first"
    raise UserError(f"no folder '{asked}': {hint}")


def _check_unique(runs: Sequence[FinishedRun]) -> None:
    seen: dict[tuple[str, str, int], Path] = {}
    for run in runs:
        key = (run.result.method, run.result.target, run.result.seed)
        if key in seen:
            raise UserError(f"{seen[key]} and {run.folder} hold the same run {key}: remove one of the two")
        seen[key] = run.folder
        twin = packed_run(run.folder) if (run.folder / RESULT).exists() else None
        if twin is not None and _as_packed(twin.result) != _as_packed(run.result.model_dump(mode="json")):
            raise UserError(
                f"{run.folder} and {RUNS} hold the same run {key} with other results: remove the folder, or move it "
                "elsewhere"
            )


def _as_packed(result: Mapping[str, Any]) -> RunResult:
    """The result with the digits that packing keeps."""
    return RunResult.model_validate(with_kept_digits(result))


def _in_planned_order(planned: Iterable[str], present: Iterable[str]) -> list[str]:
    """``present`` without duplicates: the planned ones in their order, then the others in natural order."""
    names = set(present)
    first = [name for name in dict.fromkeys(planned) if name in names]
    return first + sorted(names - set(first), key=lambda name: (natural(name), name))


def _number_planned(root: Path, experiment: Path, order: Order, begun: Sequence[Path]) -> int:
    """The number of planned runs in or below ``root``, which may be the folder of one method, target or seed."""
    depth = len(root.relative_to(experiment).parts) if root.is_relative_to(experiment) else 0
    seeds = len(order.seeds) or len({run.name for run in begun})
    counts = [len(order.methods), len(order.targets), seeds][depth:]
    product = 1
    for count in counts:
        product *= count
    return product
