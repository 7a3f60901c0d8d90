"""The faults of `campaign.py`: what can be done to a federation that is played on this machine.

`campaign.py` puts the folders of the tests on the path before it imports this.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from namespaces import Namespaces, ip
from network import Network

from campaign_site import COORDINATOR, LIES
from fedshift.files import write_bytes

SECONDS = 0.4
"""How long every call of a study takes."""


@dataclass(frozen=True)
class Fault:
    """What is done to the federation.

    name: in the report. begin: does it. end: undoes it, after ``lasts`` seconds. quorum: whether the study goes on
    without the site.
    """

    name: str
    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    lasts: float = 0.0
    quorum: bool = False


class Faults:
    """The kinds of faults that can be played on a network, drawn at random."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.chance = random.Random()
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.apart = isinstance(network, Namespaces)

    def kinds(self) -> list[Callable[[], Fault]]:
        """Every kind of fault that can be played here, as a function that draws one."""
        kinds: list[Callable[[], Fault]] = [
            self.kill_job,
            self.kill_site,
            self.kill_coordinators_job,
            self.kill_coordinator,
            self.clock_jump,
            self.lie,
        ]
        if self.apart:
            kinds += [self.partition, self.slow_link, self.full_disk]
        return kinds

    def site(self) -> str:
        return str(self.chance.choice(self.network.names))

    def kill_job(self) -> Fault:
        kit = self.network.made.sites[self.site()]
        return Fault("kill -9 of a site's job", partial(self.network.kill, kit, "worker_process"))

    def kill_site(self) -> Fault:
        site = self.site()
        kill = partial(self.network.kill, self.network.made.sites[site])
        return Fault("kill -9 of a site, started again", kill, partial(self.network.start, site))

    def kill_coordinators_job(self) -> Fault:
        return Fault(
            "kill -9 of the coordinator's job", partial(self.network.kill, self.network.coordinator, "runner_process")
        )

    def kill_coordinator(self) -> Fault:
        kill = partial(self.network.kill, self.network.coordinator)
        return Fault("kill -9 of the coordinator, started again", kill, partial(self.network.start, COORDINATOR))

    def clock_jump(self) -> Fault:
        who = self.chance.choice([COORDINATOR, *self.network.names])
        seconds = self.chance.choice([-7200, -60, 60, 7200])
        return Fault("a clock jumps (time.time of a role's job)", partial(self.order, who, clock=seconds), lasts=3.0)

    def lie(self) -> Fault:
        site, how = self.site(), self.chance.choice(sorted(LIES))
        return Fault(
            f"a site lies: {how}",
            partial(self.order, site, lie=how),
            partial(self.order, site),
            lasts=1.5 * SECONDS,
            quorum=True,
        )

    def partition(self) -> Fault:
        site = self.site()
        cut = partial(self.cable, site, "down")
        name = "a site's cable is pulled for a while"
        return Fault(name, cut, partial(self.cable, site, "up"), lasts=self.chance.choice([2.0, 8.0]))

    def slow_link(self) -> Fault:
        site = self.site()
        space = self.network.space(site)
        shape = ["tc", "qdisc", "replace", "dev", "out", "root", "tbf", "rate", "128kbit", "burst", "16kbit"]
        slow = partial(run, *("ip", "netns", "exec", space), *shape, "latency", "400ms")
        fast = partial(run, *("ip", "netns", "exec", space), "tc", "qdisc", "delete", "dev", "out", "root")
        return Fault("a site's link has 128 kbit/s for a while", slow, fast, lasts=8.0)

    def full_disk(self) -> Fault:
        who = self.chance.choice([COORDINATOR, *self.network.names])
        disk = self.disk(who)
        return Fault(
            f"a full disk at {'the coordinator' if who == COORDINATOR else 'a site'} for a while",
            partial(fill, disk),
            (disk / "filler").unlink,
            lasts=4.0,
        )

    def order(self, who: str, **what: Any) -> None:
        write_bytes(self.orders / f"{who}.json", json.dumps(what).encode())

    def cable(self, site: str, state: str) -> None:
        assert isinstance(self.network, Namespaces)
        ip("-netns", self.network.space("coordinator"), "link", "set", f"to-{site}", state)

    def disk(self, who: str) -> Path:
        """The folder that a role writes its work to; a small disk of its own."""
        if who == COORDINATOR:
            return Path(self.network.coordinator) / "deployments"
        return Path(self.network.made.sites[who]) / "memory"

    @contextlib.contextmanager
    def small_disks(self) -> Iterator[None]:
        """Put every role's folder on a small file system in memory, so that it can be filled."""
        mounted = []
        try:
            for who in (COORDINATOR, *self.network.names) if self.apart else ():
                self.disk(who).mkdir(exist_ok=True)
                run("mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "none", str(self.disk(who)))
                mounted.append(self.disk(who))
            yield
        finally:
            for disk in mounted:
                subprocess.run(["umount", "-l", str(disk)], capture_output=True)


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60, capture_output=True)


def fill(disk: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
