"""A deployed federation inside this process: real sites, real messages, no network. For tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from tiny import domains

from fedshift.deploy.coordinator import EXPERIMENT, coordinate
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.exchange import Answer, Request
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Content
from fedshift.json_objects import write_object
from fedshift.weights import Weights

ADAPT = {"kind": "adapt_to_one", "targets": ["east"], "seeds": [0], "test_fraction": 0.3}
SITES = {"north": 41, "south": 17, "east": 26}
UNSEEN = {"west": 30}
VECTOR_MODEL: dict[str, Any] = {"name": "mlp", "hidden": [8, 6]}

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


def forge(request: Message, content: Mapping[str, Content] | None = None, **changes: Any) -> Message:
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


def write_data(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """One npz per site with made-up vectors of three classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in domains(VECTOR_MODEL, sizes):
        if not (folder / f"{domain.name}.npz").exists():
            np.savez(folder / f"{domain.name}.npz", x=domain.inputs, y=domain.labels)
    return {name: str(folder / f"{name}.npz") for name in sizes}


def options_of(method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An experiment but for its data and engine."""
    return {
        "name": "tiny",
        "protocol": {"targets": ["west"], "seeds": [0], "test_fraction": 0.3},
        "model": VECTOR_MODEL,
        "training": {
            "rounds": 3,
            "batch_size": 8,
            "lr": 0.1,
            "momentum": 0.9,
            "reset_optimizer_each_round": False,
        },
        "methods": [method],
        "device": "cpu",
        **changes,
    }


def site_file(folder: Path, name: str, data: str, **policy: Any) -> Path:
    """A SITE.yaml of one npz."""
    site_yaml = folder / name / "SITE.yaml"
    site_yaml.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "site": name,
        "data": {"name": "arrays", "sites": {name: data}},
        "classes": ["0", "1", "2"],
        "device": "cpu",
        "threads": 1,
        "policy": {"smallest_group": 1, **policy},
    }
    site_yaml.write_text(yaml.safe_dump(options))
    return site_yaml


def site_files(folder: Path, sites: Mapping[str, int] = SITES, **policy: Any) -> dict[str, Path]:
    """A SITE.yaml for each of some sites, and their data."""
    files = write_data(folder / "data", sites)
    return {name: site_file(folder, name, files[name], **policy) for name in sites}


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
    unseen: Mapping[str, int] = UNSEEN,
    transport: Loopback | None = None,
    engine: dict[str, Any] | None = None,
    **policy: Any,
) -> tuple[Path, Loopback]:
    """Run a deployed experiment over a `Loopback`; ``(folder of the runs, the transport)``."""
    files = write_data(folder / "data", {**sites, **unseen})
    transport = transport or Loopback({name: site_file(folder, name, files[name], **policy) for name in sites})
    unseen_section = {"name": "arrays", "sites": {name: files[name] for name in unseen}} if unseen else None
    whole = {
        **options,
        "data": {"name": "sites", "unseen": unseen_section},
        "engine": {"name": "flare", "threads": 1, **(engine or {})},
    }
    deployment_folder = folder / "deployment"
    deployment_folder.mkdir(exist_ok=True)
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
    **engine: Any,
) -> Path:
    """The same experiment in the local engine."""
    files = write_data(folder / "data", {**sites, **unseen})
    data = {"name": "arrays", "sites": files, "classes": ["0", "1", "2"]}
    experiment = parse({**options, "data": data, "engine": {"threads": 1, **engine}})
    return run_experiment(experiment, folder / "simulated")


def events(folder: Path) -> list[dict[str, Any]]:
    """What the coordinator wrote down of a deployment."""
    return [json.loads(line) for line in (folder / "deployment" / "progress.jsonl").read_text().splitlines()]


__all__: Sequence[str] = ("SITES", "UNSEEN", "Loopback", "deploy", "events", "options_of", "simulate", "site_file")


# Runs -----------------------------------------------------------------------------------------------------------------


def model(folder: Path, method: str, target: str) -> dict[str, torch.Tensor]:
    return load_file(folder / method / target / "seed-0" / "model.safetensors")


def result(folder: Path, method: str, target: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / method / target / "seed-0" / "result.json").read_text())
    return stored


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SETTING: dict[str, Any] = {
    "method": {"name": "fedavg", "options": {}},
    "training": {},
    "network": {"name": "linear"},
    "preprocessing": {"kind": "features"},
    "input_shape": [5],
    "classes": 3,
    "sources": 3,
    "seed": 0,
    "refuse": [],
    "on_refusal": "stop",
}
CARD: dict[str, Any] = {
    "versions": {"torch": "2"},
    "shape": [2],
    "type": "float32",
    "preprocessing": {"kind": "features"},
    "classes": ["a", "b"],
    "samples": 4,
    "rows": {"0": [3, 1]},
    "given": None,
    "grouped": False,
    "fingerprint": "f",
    "send": ["weights"],
    "device": "cpu",
    "threads": 1,
}
"""What a site says of itself."""


def part_of(program: SiteProgram) -> dict[str, Any]:
    """What a site trains on, as a request says it."""
    split = {"test_fraction": 0.3, "split": "auto", "seed": 0}
    return {"role": "source", "number": 0, "whole": False, "fingerprint": program.holding.fingerprint, "split": split}


def call_header(program: SiteProgram, **changes: Any) -> dict[str, Any]:
    """What a request for a call says, with something in it changed."""
    return {
        "do": "call",
        "run": "r",
        "call": "fit",
        "envelope": {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5},
        "memory": {},
        "kept": {},
        "checkpoint": 0,
        "wire": "float32",
        "setting": SETTING,
        "part": part_of(program),
        **changes,
    }


def full_answer(
    program: SiteProgram, weights: Weights, sender: str = "someone", **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a site answers to a request for a call with something in it changed: the header, and the content."""
    header = {"protocol": PROTOCOL, **call_header(program, **changes)}
    body = body_of({"weights": weights})
    answer, content, _ = unseal(program.handle(seal({"key": request_key(header, body.sha256), **header}, body), sender))
    return answer, content


def request(program: SiteProgram, **changes: Any) -> dict[str, Any]:
    """The header of what a site `full_answer`, to a linear model of zeros."""
    start = Weights({"classifier.weight": torch.zeros(3, 5), "classifier.bias": torch.zeros(3)})
    return full_answer(program, start, **changes)[0]
