"""A deployed federation inside this process: real sites, real messages, no network. An attacker sits in between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedshift.deployment.coordinator import EXPERIMENT, coordinate
from fedshift.deployment.site_file import load_site
from fedshift.deployment.site_server import SiteProgram
from fedshift.experiment.config.experiment import parse
from fedshift.federation.remote.transport import Lost, request_key
from fedshift.federation.remote.wire import Message, body_of, seal, unseal
from fedshift.playground.played import Played

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
            self.asked.append((site, header.get("step", header["do"])))
            answer = self.programs[site].handle(message, "coordinator")
            changed = self.change(site, header, answer)
            for one in changed if isinstance(changed, list) else [changed]:
                yield site, one


def rehearse(played: Played, name: str, change: Change, method: str = "fedavg") -> list[dict[str, Any]]:
    """Run an experiment of the federation in this process, with an attacker between sites and coordinator.

    One site is enough for the run to go on. Raises what the coordinator would raise.

    Returns:
        What the coordinator wrote down.
    """
    folder = played.folder / "in process" / name
    place = folder / "deployment"
    place.mkdir(parents=True)
    options = played.experiment(name, {"name": method})
    options["engine"]["quorum"] = 1
    (place / EXPERIMENT).write_text(json.dumps(parse(options).dump()), encoding="utf-8")
    coordinate(
        place, Loopback({site: site_copy(played, site, folder) for site in played.sites}, change), [*played.sites]
    )
    return [json.loads(line) for line in (place / "progress.jsonl").read_text(encoding="utf-8").splitlines()]


def site_copy(played: Played, site: str, folder: Path) -> Path:
    """The site's SITE.yaml in another folder, where its memory and log begin anew."""
    options = yaml.safe_load(played.site_file(site).read_text(encoding="utf-8"))
    place = folder / site / "SITE.yaml"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(options), encoding="utf-8")
    return place


def genuine_request(played: Played, name: str) -> tuple[SiteProgram, Message]:
    """A new program of the first site, and a request to train that the coordinator sends it."""
    caught: list[Message] = []
    site = next(iter(played.sites))

    class Caught(Exception):
        """Enough was seen."""

    class Listening(Loopback):
        def exchange(
            self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
        ) -> Generator[tuple[str, Message | Lost], None, None]:
            whole = list(messages)
            caught.extend(message for to, message in whole if to == site and '"step"' in message.header)
            if caught:
                raise Caught
            yield from super().exchange(iter(whole), deadline, patience)

    folder = played.folder / "in process" / name
    place = folder / "deployment"
    place.mkdir(parents=True)
    (place / EXPERIMENT).write_text(json.dumps(parse(played.experiment(name, {"name": "fedavg"})).dump()))
    transport = Listening({other: site_copy(played, other, folder) for other in played.sites})
    with contextlib.suppress(Caught):
        coordinate(place, transport, [*played.sites])
    return transport.programs[site], caught[0]


def forged(request: Message, **changes: Any) -> Message:
    """A request with other fields, as a coordinator can make it: key and digest fit. A changed ``key`` stays."""
    header, content, _ = unseal(request)
    body = body_of(content)
    header = {**header, **changes}
    if "key" not in changes:
        del header["key"]
        header["key"] = request_key(header, body.sha256)
    return seal(header, body)


def answer_to(program: SiteProgram, request: Message) -> dict[str, Any]:
    """The header of a site's answer."""
    return unseal(program.handle(request, "an attacker"))[0]
