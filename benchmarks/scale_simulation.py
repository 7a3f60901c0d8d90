"""What federations of 10,000 hospitals and of 10 million phones need: a simulation of one round, event by event.

    python benchmarks/scale_simulation.py            # a minute; writes results/scale_simulation.json

Sites are drawn, load the model, train, and send. Some are lost on the way. Those of a group mask their models for each
other, so a group whose answers are fewer than its threshold is lost whole. A group's sum goes up a tree of
coordinators, each of which reads one message after the other through its own link. What a formula gives, such as
expected losses, stands beside it in the result, and is compared in `tests/benchmarks/test_scale_simulation.py`.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "scale_simulation.json"
PRIVATE = 40
"""Bits of privacy, as Bell et al. (CCS 2020) count them."""
CORRECT = 20
"""Bits: a sum fails in no more than one of 2^20 rounds."""


@dataclass(frozen=True)
class Federation:
    """A federation, and how a round goes.

    Attributes:
        name: in tables.
        population: sites that there are.
        drawn: of these, for a round.
        group: sites of one secure sum; 0: no secure sums, and all is one group.
        fanout: messages that a coordinator of the tree reads at most; 0: one coordinator reads all.
        model: bytes of a model.
        lost: share of the drawn sites that do not answer.
        train: seconds of training, the median; spread by a log-normal of ``sigma``.
        sigma: its standard deviation.
        site_link: bytes a second of a site.
        server_link: bytes a second of a coordinator.
        deadline: seconds of a round; later answers count as lost.
    """

    name: str
    population: int
    drawn: int
    group: int
    fanout: int
    model: int
    lost: float
    train: float
    sigma: float
    site_link: float
    server_link: float
    deadline: float


@dataclass
class Round:
    """What a round came to."""

    seconds: float
    answered: int
    counted: int
    groups: int
    groups_lost: int
    root_bytes: int
    busiest_bytes: int
    coordinators: int


def threshold(group: int) -> int:
    """How many of a group must answer: more than half, as fedshift's secure sums need."""
    return (group + 2) // 2


def simulate(federation: Federation, seed: int) -> Round:
    """One round."""
    draw = random.Random(seed)
    size = federation.group or federation.drawn
    groups = [min(size, federation.drawn - first) for first in range(0, federation.drawn, size)]
    events: list[tuple[float, int]] = []  # when an answer is ready to cross, and of which group
    for number, members in enumerate(groups):
        for _ in range(members):
            if draw.random() >= federation.lost:
                heapq.heappush(events, (_ready(federation, draw), number))
    answered, there, latest = _leaves(federation, events, len(groups), size)
    whole = [number for number, count in enumerate(there) if not federation.group or count >= threshold(groups[number])]
    sums = [latest[number] for number in whole]
    seconds, root, nodes = _up_the_tree(federation, sums)
    leaf = max(there, default=0) * federation.model
    flat = not federation.group and not federation.fanout
    return Round(
        seconds=max(latest, default=0.0) if flat else seconds,
        answered=answered,
        counted=sum(there[number] for number in whole),
        groups=len(groups),
        groups_lost=len(groups) - len(whole),
        root_bytes=answered * federation.model if flat else root,
        busiest_bytes=max(leaf, root),
        coordinators=1 if flat else len(groups) + nodes,
    )


def _ready(federation: Federation, draw: random.Random) -> float:
    """Seconds until a site has loaded the model, trained and sent."""
    train = federation.train * math.exp(draw.gauss(0, federation.sigma)) if federation.train else 0.0
    return 2 * federation.model / federation.site_link + train


def _leaves(
    federation: Federation, events: list[tuple[float, int]], groups: int, size: int
) -> tuple[int, list[int], list[float]]:
    """Each group's coordinator reads its answers one after the other.

    Returns:
        How many came in time, how many of each group, and when each group's last was read.
    """
    free, there = [0.0] * groups, [0] * groups
    while events:
        ready, number = heapq.heappop(events)
        done = max(ready, free[number]) + federation.model / federation.server_link
        if done <= federation.deadline:
            free[number] = done
            there[number] += 1
    return sum(there), there, free


def _up_the_tree(federation: Federation, ready: list[float]) -> tuple[float, int, int]:
    """Sums go up: each coordinator reads those of its children one after the other.

    Returns:
        Seconds until the root has all, the bytes that it read, and the coordinators above the leaves.
    """
    nodes = 0
    while True:
        width = federation.fanout or max(1, len(ready))
        parts = [sorted(ready[first : first + width]) for first in range(0, len(ready), width)]
        nodes += len(parts)
        above = []
        for part in parts:
            free = 0.0
            for log in part:
                free = max(log, free) + federation.model / federation.server_link
            above.append(free)
        if len(above) <= 1:
            return (above[0] if above else 0.0), (len(parts[0]) if parts else 0) * federation.model, nodes
        ready = above


# What formulas say ----------------------------------------------------------------------------------------------------


def log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def binomial_below(n: int, p: float, least: int) -> float:
    """P(X < least) of X ~ Binomial(n, p)."""
    if p in (0.0, 1.0):
        return float(n * p < least)
    logs = [log_choose(n, k) + k * math.log(p) + (n - k) * math.log1p(-p) for k in range(least)]
    return math.fsum(math.exp(log) for log in logs)


def neighbours(clients: int, corrupt: float, lost: float) -> tuple[int, int]:
    """The fewest neighbours k of a client, and the threshold t of their shares, for a sum over random neighbours.

    A client is safe where fewer than t of its k neighbours are corrupt, and its shares come back where at least t
    remain; both for all clients, by the union bound with binomial tails in place of hypergeometric ones, which are
    smaller. This is the argument of Bell et al. (CCS 2020, semi-honest), whose exact constants differ.
    """
    for k in range(4, 2000):
        safe = (t for t in range(k // 2, k) if clients * at_least(k, corrupt, t) <= 2.0**-PRIVATE)
        t = next(safe, k)  # a larger one only loses more
        if clients * binomial_below(k, 1 - lost, t) <= 2.0**-CORRECT:
            return k, t
    raise ValueError("no such number of neighbours")


def at_least(n: int, p: float, least: int) -> float:
    """P(X ≥ least), summed from its small terms."""
    return math.fsum(
        math.exp(log_choose(n, k) + k * math.log(p) + (n - k) * math.log1p(-p)) for k in range(least, n + 1)
    )


# The two federations -----------------------------------------------------------------------------------------------

MEGA = 1e6
HOSPITALS = Federation(
    "10,000 hospitals, all, one coordinator", 10_000, 10_000, 0, 0, 45_000_000, 0.02, 600, 0.5, 12.5 * MEGA,
    1250 * MEGA, 7200,
)  # fmt: skip
PHONES = Federation(
    "10 million phones, 100,000 a round, one coordinator", 10_000_000, 100_000, 0, 0, 5_000_000, 0.10, 60, 0.8,
    1.25 * MEGA, 1250 * MEGA, 600,
)  # fmt: skip
CASES = (
    HOSPITALS,
    replace(HOSPITALS, name="… 500 drawn", drawn=500),
    replace(HOSPITALS, name="… all, groups of 100, tree of 100", group=100, fanout=100),
    replace(HOSPITALS, name="… 500 drawn, groups of 100, tree of 100", drawn=500, group=100, fanout=100),
    replace(HOSPITALS, name="… all, groups of 100, 40 % lost", group=100, fanout=100, lost=0.4),
    PHONES,
    replace(PHONES, name="… groups of 100, tree of 100", group=100, fanout=100),
    replace(PHONES, name="… groups of 1,000, tree of 100", group=1000, fanout=100),
    replace(PHONES, name="… groups of 100, 40 % lost", group=100, fanout=100, lost=0.4),
    replace(PHONES, name="… groups of 1,000, 40 % lost", group=1000, fanout=100, lost=0.4),
)


def row(federation: Federation, rounds: int = 5) -> dict[str, Any]:
    """What several rounds came to, and what formulas expect."""
    played = [simulate(federation, seed) for seed in range(rounds)]

    def middle(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in played))

    group = federation.group or federation.drawn
    return {
        "federation": asdict(federation),
        "rounds": rounds,
        "seconds": middle("seconds"),
        "answered_share": statistics.fmean(run.answered for run in played) / federation.drawn,
        "counted_share": statistics.fmean(run.counted for run in played) / federation.drawn,
        "groups_lost": statistics.fmean(run.groups_lost for run in played),
        "root_bytes": middle("root_bytes"),
        "busiest_bytes": middle("busiest_bytes"),
        "coordinators": middle("coordinators"),
        "bytes_up_of_all": middle("answered") * federation.model,
        "rounds_until_each_site_was_drawn_once_on_average": federation.population / federation.drawn,
        "expected_groups_lost": (federation.drawn // group)
        * binomial_below(group, 1 - federation.lost, threshold(group))
        if federation.group
        else 0.0,
        "least_seconds_of_one_coordinator": (1 - federation.lost)
        * federation.drawn
        * federation.model
        / federation.server_link,
    }


def main() -> None:
    result = {
        "rounds": [row(case) for case in CASES],
        "neighbours": [
            {"clients": clients, "corrupt": corrupt, "lost": lost, "k": k, "t": t}
            for clients in (1_000, 10_000, 100_000, 1_000_000_000)
            for corrupt, lost in ((0.05, 0.05), (0.2, 0.1), (1 / 3, 1 / 3))
            for k, t in [neighbours(clients, corrupt, lost)]
        ],
    }
    RESULT.write_text(json.dumps(_round_numbers(result), indent=1) + "\n", encoding="utf-8")
    shown = ("seconds", "answered_share", "counted_share", "groups_lost", "expected_groups_lost", "root_bytes")
    for line in result["rounds"]:
        print(line["federation"]["name"], *(f"{key} {line[key]:.4g}" for key in shown), sep=", ")
    for line in result["neighbours"]:
        print(*(f"{key} {value:.4g}" for key, value in line.items()), sep=", ")


def _round_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_numbers(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
