"""Averages of methods over the seeds that all of them have.

Runs that are missing, or that another process still trains, leave methods with different seeds. Their averages in the
table are then over different splits of the data, and are not ranked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.summary import AVERAGE, Row, Value, rows


@dataclass(frozen=True)
class Comparable:
    """What methods are ranked by."""

    # method → its average over all targets and the seeds that all these methods have. If there is no such seed: over
    # its own
    means: Mapping[str, Row]
    seeds: Mapping[str, frozenset[int]]  # method → the seeds at which it was measured at every target

    @property
    def common(self) -> list[int]:
        """The seeds that all methods have."""
        return sorted(frozenset.intersection(*self.seeds.values())) if self.seeds else []

    @property
    def unseen(self) -> bool:
        """Whether methods have different seeds of which they have equally many, so that no count shows it."""
        sets = set(self.seeds.values())
        return len({len(seeds) for seeds in sets}) < len(sets)

    @property
    def alike(self) -> bool:
        """Whether all methods have the same seeds."""
        return len(set(self.seeds.values())) <= 1


NOTHING = Comparable({}, {})
"""Where no method has a result."""


def comparable(
    results: Sequence[RunResult],
    targets: Sequence[str],
    value: Value,
    select: Selection = "last",
    methods: Sequence[str] = (),
) -> Comparable:
    """The averages of the methods that were measured at every target.

    ``select``: the selection rule whose round is taken.
    """
    at: dict[str, dict[str, set[int]]] = {name: {} for name in methods}
    for result in results:
        if value(result, select) is not None:
            at.setdefault(result.method, {}).setdefault(result.target, set()).add(result.seed)
    whole = {
        name: frozenset(set[int].intersection(*(by_target[target] for target in targets)))
        for name, by_target in at.items()
        if targets and by_target.keys() >= set(targets)
    }
    comparable = Comparable({}, {name: seeds for name, seeds in whole.items() if seeds})
    common = comparable.common
    kept: Iterable[RunResult] = (
        results if comparable.alike or not common else (result for result in results if result.seed in common)
    )
    averages = rows(kept, select, methods, targets, value)
    means = {row.method: row for row in averages if row.target == AVERAGE and row.method in comparable.seeds}
    return Comparable(means, comparable.seeds)


def unlike_seeds(comparable: Comparable, repeat: str) -> str:
    """Which methods have which seeds, as a sentence without its end; "" if all have the same.

    ``repeat``: what a seed is: "seed" or "split".
    """
    if comparable.alike:
        return ""
    names: dict[frozenset[int], list[str]] = {}
    for name, seeds in comparable.seeds.items():
        names.setdefault(seeds, []).append(name)
    parts = (f"{', '.join(those)} {', '.join(map(str, sorted(seeds)))}" for seeds, those in names.items())
    return f"Methods have different {repeat}s ({'; '.join(parts)})"
