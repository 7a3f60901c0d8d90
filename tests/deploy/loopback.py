"""A deployed federation inside this process: real sites, real messages, no network. For tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from site_yaml import SITES, UNSEEN, VECTOR_MODEL, site_file, write_data

from fedshift.deploy.coordinator import EXPERIMENT, coordinate
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.exchange import Answer, Request
from fedshift.federation.local.in_process import LocalFederation
from fedshift.json_objects import write_object

ADAPT = {"kind": "adapt_to_one", "targets": ["east"], "seeds": [0], "test_fraction": 0.3}


T = TypeVar("T")


Change = Callable[[str, dict[str, Any], Message | Lost], Message | Lost | list[Message]]


class Loopback:
    """Carries messages to site programs in this process. ``change`` may lose, double or spoil an answer."""

    def __init__(self, places: Mapping[str, Path], change: Change | None = None) -> None:
        self.programs = {name: SiteProgram(load_site(path)) for name, path in places.items()}
        self.change = change or (lambda site, header, answer: answer)
        self.asked: list[tuple[str, str]] = []
        self.backwards = False

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        whole = list(messages)
        for site, message in reversed(whole) if self.backwards else whole:
            header = json.loads(message.header)
            self.asked.append((site, header.get("call", header.get("do"))))
            answer = self.programs[site].handle(message, "coordinator")
            changed = self.change(site, header, answer)
            for item in changed if isinstance(changed, list) else [changed]:
                yield site, item


def losing(*lost: tuple[str, str, int | None], why: str = "it is away") -> Change:
    """Sites that are lost in the exchange of a kind (call, unmask) of a round; None: of every round."""

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        number = header.get("envelope", header).get("round")
        return Lost(why) if {(site, header["do"], number), (site, header["do"], None)} & {*lost} else answer

    return change


def options_of(method: str | Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    training = {"rounds": 3, "batch_size": 8, "lr": 0.1, "momentum": 0.9, "reset_optimizer_each_round": False}
    return {
        "name": "tiny",
        "protocol": {"targets": ["west"], "seeds": [0], "test_fraction": 0.3},
        "model": VECTOR_MODEL,
        "training": training,
        "methods": [{"name": method} if isinstance(method, str) else dict(method)],
        "device": "cpu",
        **changes,
    }


class Killed(BaseException):
    """Stands for a coordinator that dies."""


def killed_when(dies: Callable[[str, dict[str, Any]], bool]) -> Change:
    """The coordinator dies when an answer arrives of whose site and request that is true."""

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if dies(site, header):
            raise Killed
        return answer

    return change


def killed_at(*moments: tuple[str, str, int], lose: Mapping[int, Path] | None = None) -> Change:
    """The coordinator dies when an answer of a site arrives, to a kind of request or call, in a round: once each.

    ``lose``: number of a death → the folder below which sites then have lost the answers that they kept.
    """
    left = set(moments)

    def dies(site: str, header: dict[str, Any]) -> bool:
        round_number = header.get("envelope", header).get("round")
        now = left & {(site, name, round_number) for name in (header["do"], header.get("call"))}
        left.difference_update(now)
        folder = (lose or {}).get(len(moments) - len(left)) if now else None
        for file in folder.rglob("answer-*") if folder else ():
            file.unlink()
        return bool(now)

    return killed_when(dies)


def through_deaths(run: Callable[[], T]) -> tuple[T, int]:
    """What a run gives that begins anew whenever it is killed, and how often that was."""
    deaths = 0
    while True:
        try:
            return run(), deaths
        except Killed:
            deaths += 1


def deploy(
    folder: Path,
    options: dict[str, Any],
    *,
    sites: Mapping[str, int] = SITES,
    unseen: Mapping[str, Any] = UNSEEN,
    transport: Loopback | None = None,
    change: Change | None = None,
    engine: dict[str, Any] | None = None,
    **policy: Any,
) -> tuple[Path, Loopback]:
    """Run a deployed experiment over a `Loopback`; ``(folder of the runs, the transport)``.

    ``unseen`` may be a section of data.
    """
    section = None
    if "name" in unseen:
        section, unseen = unseen, {}
    if transport is None or unseen:
        files = write_data(folder / "data", {**sites, **unseen})
        section = section or (unseen and {"name": "arrays", "sites": {name: files[name] for name in unseen}}) or None
        transport = transport or Loopback(
            {name: site_file(folder, name, files[name], **policy) for name in sites}, change
        )
    whole = {
        **options,
        "data": {"name": "sites", "unseen": section},
        "engine": {"name": "flare", "threads": 1, **(engine or {})},
    }
    deployment_folder = folder / "deployment"
    deployment_folder.mkdir(exist_ok=True, parents=True)
    write_object(deployment_folder / EXPERIMENT, parse(whole).dump())
    coordinate(deployment_folder, transport, list(sites))
    return deployment_folder / "runs" / options["name"], transport


class Without(LocalFederation):
    """The local engine with a site that misses exchanges, as docs/deploy.md says what that means."""

    absent: ClassVar[set[tuple[str, int]]] = set()
    """(site, round)"""

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any], None, None]:
        spent, lost = [], None
        for request in requests:
            if (request.site, request.envelope.round) in self.absent:
                lost = request
                continue
            reply, mini_batches = self._runners[request.site].run(call, request.envelope, request.content)
            spent.append(mini_batches / self.budget[request.site])
            yield Answer(request.site, reply, mini_batches)
        if lost is not None:
            share = -(-self.budget[lost.site] * sum(spent) // len(spent))
            self.progress.used[lost.site] += min(int(share), lost.envelope.mini_batches_left)


def simulate(
    folder: Path,
    options: dict[str, Any],
    sites: Mapping[str, int] = SITES,
    unseen: Mapping[str, int] = UNSEEN,
    data: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Path:
    """The same experiment in the local engine, of a section of ``data`` if it is given."""
    if data is None:
        data = {"name": "arrays", "sites": write_data(folder / "data", {**sites, **unseen}), "classes": ["0", "1", "2"]}
    experiment = parse({**options, "data": data, "engine": {"threads": 1, **engine}})
    return run_experiment(experiment, folder / "simulated")
