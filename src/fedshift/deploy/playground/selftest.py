"""Every promise that depends on an installation, tried: ports, certificates, files, kits, processes, packages.

To add one, write a function that tries it, and a `Promise` in the list of its attacker: `by_strangers`,
`by_coordinators` (and beside it that of sums) or `by_holders`. Its ``tries`` goes under ``selftest`` of the row that it
shows, in tests/threats.yaml, of which docs/threats.md is made. An attack that comes out alike on every machine is a
test, which carries the mark of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedshift.deploy.playground import (
    by_coordinators,
    by_coordinators_of_sums,
    by_holders,
    by_strangers,
)
from fedshift.deploy.playground.played import Played, playing
from fedshift.deploy.playground.promise import Outcome, Promise, expect, tried


def _honest(played: Played) -> str:
    deployment, state = played.deploy("honest", {"name": "fedavg"})
    expect(state["state"] == "finished", f"the deployment: {state}")
    rounds = sum(event.get("what") == "round" for event in deployment.events())
    return f"{len(played.sites)} sites train for {rounds} rounds"


HONEST = Promise("an honest coordinator", "trains with honest sites, which must work", _honest)
PROMISES = (
    HONEST,
    *by_strangers.PROMISES,
    *by_coordinators.PROMISES,
    *by_coordinators_of_sums.PROMISES,
    *by_holders.PROMISES,
    *by_holders.AT_LAST,
)
"""The honest run comes first: without it, whatever is refused shows nothing."""


def selftest(folder: Path) -> Iterator[Outcome]:
    """Play a federation below ``folder`` and try every promise; what came of each, as it comes."""
    with playing(folder) as played:
        for promise in PROMISES:
            yield tried(promise, played)
