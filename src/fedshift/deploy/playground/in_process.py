"""A deployed federation inside this process: real sites, real messages, no network. An attacker sits in between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedshift.deploy.coordinator import EXPERIMENT, coordinate
from fedshift.deploy.playground.played import Played
from fedshift.deploy.remote.requests import request_key
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.digests import write_object
from fedshift.experiment.config.experiment import parse
from fedshift.federation.messages import Content

Differs = Callable[[str], Mapping[str, Any]]
"""What a site's SITE.yaml says otherwise: sections, and rules of its policy."""
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


def unchanged(_: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
    """An attacker who only looks on."""
    return answer


def rehearse(
    played: Played,
    name: str,
    change: Change = unchanged,
    method: str = "fedavg",
    experiment: Mapping[str, Any] | None = None,
    differs: Differs = lambda site: {},
) -> list[dict[str, Any]]:
    """Run an experiment of the federation in this process, with an attacker between sites and coordinator.

    One site is enough for the run to go on, unless ``experiment`` says otherwise. Raises what the coordinator would.

    Args:
        played: the federation.
        name: of the run; its files lie below `folder_of`.
        change: the attacker.
        method: what trains.
        experiment: sections of the experiment that differ, and options of its engine.
        differs: what sites' SITE.yaml say otherwise.

    Returns:
        What the coordinator wrote down.
    """
    folder = folder_of(played, name)
    different = dict(experiment or {})
    engine = {"quorum": 1, **different.pop("engine", {})}
    _prepare(folder, played.experiment(name, {"name": method}, engine=engine, **different))
    transport = Loopback({item: site_copy(played, item, folder, differs) for item in played.sites}, change)
    coordinate(folder / "deployment", transport, [*played.sites])
    lines = (folder / "deployment" / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def folder_of(played: Played, name: str) -> Path:
    """The folder of a run in this process: ``deployment`` is the coordinator's, the others are the sites'."""
    return played.folder / "in process" / name


def _prepare(folder: Path, options: Mapping[str, Any]) -> None:
    (folder / "deployment").mkdir(parents=True)
    write_object(folder / "deployment" / EXPERIMENT, parse(options).dump())


def site_copy(played: Played, site: str, folder: Path, differs: Differs = lambda site: {}) -> Path:
    """The site's SITE.yaml in another folder, where its memory and log begin anew."""
    options, changes = yaml.safe_load(played.site_file(site).read_text(encoding="utf-8")), differs(site)
    policy = {**options["policy"], **changes.get("policy", {})}
    options |= {"kit": str(played.sites[site]), **changes, "policy": policy}
    path = folder / site / "SITE.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return path


def caught_requests(
    played: Played,
    name: str,
    call: str = "fit",
    method: str = "fedavg",
    experiment: Mapping[str, Any] | None = None,
    differs: Differs = lambda site: {},
) -> tuple[dict[str, SiteProgram], dict[str, Message]]:
    """New programs of the sites, and the first requests of a call that the coordinator sends, which nobody got yet.

    Arguments are as those of `rehearse`; ``call``: of the method, or what a request asks for beside a call.
    """
    caught: dict[str, Message] = {}

    class Caught(Exception):
        """Enough was seen."""

    class Listening(Loopback):
        def exchange(
            self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
        ) -> Generator[tuple[str, Message | Lost], None, None]:
            whole = list(messages)
            for to, message in whole:
                header = json.loads(message.header)
                if call in (header.get("call"), header.get("do")):
                    caught[to] = message
            if caught:
                raise Caught
            yield from super().exchange(iter(whole), deadline, patience)

    folder = folder_of(played, name)
    _prepare(folder, played.experiment(name, {"name": method}, **(experiment or {})))
    transport = Listening({other: site_copy(played, other, folder, differs) for other in played.sites})
    with contextlib.suppress(Caught):
        coordinate(folder / "deployment", transport, [*played.sites])
    return transport.programs, caught


def forged(request: Message, content: Mapping[str, Content] | None = None, **changes: Any) -> Message:
    """A request with other fields or other content, as a coordinator can make it: key and digest fit.

    A changed ``key`` stays. A change to None leaves the field out.
    """
    header, genuine, _ = unseal(request)
    body = body_of(genuine if content is None else content)
    header = {name: value for name, value in {**header, **changes}.items() if changes.get(name, 0) is not None}
    key = {} if "key" in changes else {"key": request_key(header, body.sha256)}
    return seal({**header, **key}, body)


def answer_to(program: SiteProgram, request: Message) -> dict[str, Any]:
    """The header of a site's answer."""
    return unseal(program.handle(request, "an attacker"))[0]
