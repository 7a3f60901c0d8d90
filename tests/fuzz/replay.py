"""A run's server side with recorded replies in place of sites, of which one site's are mutated.

The run is played once with sites in this process, and every reply is kept. After that, a run costs the server's work
alone: reading, checking and using replies. So many thousands of broken replies can be tried, to every call of a method.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny import CNN, domains, normed_for, plans, setting, start_of, step_on

from fedshift.deploy.remote.incoming import Taken
from fedshift.deploy.remote.remote_federation import RemoteFederation
from fedshift.deploy.remote.requests import SeedSplit, SitePart
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Body, Message, body_of, seal, unseal
from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Request
from fedshift.federation.messages import Content, leaves, reply_content
from fedshift.federation.replies import reply_type
from fedshift.federation.setting_json import setting_recipe
from fedshift.federation.site import Envelope
from fedshift.federation.site_runner import SitePlan, SiteRunner, about_sites
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.rounds import start_run
from fedshift.weights import NamedTensors

SIZES = {"north": 20, "south": 12, "east": 17}
ROUNDS, QUORUM = 2, 2
SMALL: dict[str, object] = {"name": "mlp", "hidden": [4]}
NORMED = ("fedavg", "kd3a", "copa")
"""Methods whose network has BatchNorm. Each tensor takes time, and the checks of its statistics are the same in all."""
METHODS = [
    name
    for name in registry.names()
    if not registry.method_class(name).traits.pooled and name not in ("oracle", "zero_shot")
]
"""All that sites of a deployment carry out; the oracle is one site, and zero_shot asks none."""
LARGEST_SENT = 2e18
"""No number that the server sends is larger, whatever one site said: the largest variance of BatchNorm is 1e18."""

_USED_ANYWAY = 0.01
"""Part of the refused replies that a run meets all the same: the run must go on without them."""

Told = dict[str, Any]
Change = Callable[[Told, dict[str, Content], Body, random.Random], Message]
"""A mutation: an honest reply's header, content and bytes as a message that is not honest."""


@dataclass(frozen=True)
class Reply:
    """What a site said to one request: the header without the request's name, the content, and that as bytes."""

    header: Told
    content: Mapping[str, Content]
    body: Body


@dataclass(frozen=True)
class Slot:
    """One request of the run without a hostile site, and the reply to it. number: how many of this call were before."""

    request: Request
    call: str
    number: int
    key: str
    reply: Reply


Place = tuple[str, int]
"""A call, and how many requests of it the site had before."""
Look = frozenset[tuple[str, str]]


@dataclass
class Recording:
    """A run of one method that was played with sites, and can be played again without them."""

    method: Method
    sites: tuple[str, ...]
    sources: tuple[str, ...]
    build: Callable[..., RemoteFederation]
    start: Any
    slots: dict[str, dict[Place, Slot]] = field(default_factory=dict)
    """By site."""
    sent: dict[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)
    """How the tensors look that each site was sent, by site and call."""

    def reply(self, site: str, call: str, number: int) -> Reply:
        """The honest reply; the last one of its call, where a run has more requests than the one that was recorded."""
        while (call, number) not in self.slots[site]:
            number -= 1
        return self.slots[site][call, number].reply


def looks(content: Mapping[str, Content]) -> Look:
    """Names, sizes and types of what a site is sent, without the first size, which counts samples."""
    return frozenset(
        (path, " ".join(f"{name}:{tuple(tensor.shape[1:])}:{tensor.dtype}" for name, tensor in sorted(value.items())))
        for path, value in leaves(content)
        if isinstance(value, NamedTensors) and value
    )


class Counted:
    """Opens requests, and counts those of every site and call."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], int] = {}

    def opened(self, site: str, message: Message) -> tuple[Told, Mapping[str, Content], int]:
        header, content, _ = unseal(message)
        number = self._asked.get((site, header["call"]), 0)
        self._asked[site, header["call"]] = number + 1
        return header, content, number


class Played(Counted):
    """Carries messages to sites in this process, and keeps what they answer."""

    def __init__(self, recording: Recording, runners: Mapping[str, SiteRunner]) -> None:
        super().__init__()
        self._recording, self._runners = recording, runners

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        for site, message in messages:
            header, content, number = self.opened(site, message)
            call, envelope = header["call"], Envelope(**header["envelope"])
            self._recording.sent.setdefault((site, call), set()).update(looks(content))
            answer, mini_batches = self._runners[site].run(call, envelope, content)
            said = {"mini_batches": mini_batches, "memory": {"optimizer": "optimizer-1.safetensors"}}
            reply = Reply(said, reply_content(answer), body_of(reply_content(answer)))
            slot = Slot(Request(site, envelope, content), call, number, header["key"], reply)
            self._recording.slots.setdefault(site, {})[call, number] = slot
            yield site, seal({"answers": header["key"], **said}, reply.body)


class Replayed(Counted):
    """Answers as the sites did, but for what one site says in their place. It looks at what honest sites are sent."""

    def __init__(self, recording: Recording, hostile: str, instead: Mapping[Place, Message]) -> None:
        super().__init__()
        self._recording, self._hostile, self._instead = recording, hostile, instead

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        for site, message in messages:
            header, content, number = self.opened(site, message)
            place = header["call"], number
            if site != self._hostile:
                self._check_sent((site, header["call"]), content)
            elif place in self._instead:
                yield site, readdressed(self._instead[place], header["key"])
                continue
            reply = without_strangers(self._recording.reply(site, *place), content)
            left = max(0, header["envelope"]["mini_batches_left"])
            said = {**reply.header, "mini_batches": min(reply.header["mini_batches"], left)}
            yield site, seal({"answers": header["key"], **said}, reply.body)

    def _check_sent(self, place: tuple[str, str], content: Mapping[str, Content]) -> None:
        """Nothing travels on to an honest site that has another look than in a run without a hostile one."""
        strange = looks(content) - self._recording.sent[place]
        assert not strange, f"{place} was sent {sorted(strange)}"
        for path, value in leaves(content):
            tensors = value.values() if isinstance(value, NamedTensors) else ()
            numbers = [number.item() for tensor in tensors if tensor.numel() for number in torch.aminmax(tensor)]
            numbers += [value] if isinstance(value, float) else []
            assert all(math.isfinite(one) and abs(one) <= LARGEST_SENT for one in numbers), f"{place}: {path}"


def without_strangers(reply: Reply, sent: Mapping[str, Content]) -> Reply:
    """An honest reply without entries for sites of which this run sent nothing, since they were left out of it."""
    fitting, strangers = dict(reply.content), False
    for name, value in reply.content.items():
        known = sent.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and value.keys() - known.keys():
            fitting[name], strangers = {key: item for key, item in value.items() if key in known}, True
    return reply if not strangers else Reply(reply.header, fitting, body_of(fitting))


def readdressed(message: Message, key: str) -> Message:
    """The same message as the answer to another request, if it names one at all."""
    try:
        said = json.loads(message.header)
    except (ValueError, RecursionError):
        return message
    if not isinstance(said, dict) or "answers" not in said:
        return message
    text = json.dumps({**said, "answers": key})
    digest = hashlib.sha256(f"{hashlib.sha256(message.body).hexdigest()}\n{text}".encode(errors="replace")).hexdigest()
    return Message(text, message.body, digest)


def part_of(plan: SitePlan) -> SitePart:
    """What a site is told of its part; the sites here look at none of it."""
    split = SeedSplit(test_fraction=0.3, split="auto", seed=0)
    return SitePart(role=plan.role, number=0, split=split, whole=False, fingerprint="f")


def recorded(name: str) -> Recording:
    """Play a run of a method, and keep what its sites say."""
    method = registry.parse({"name": name, **registry.method_class(name).traits.small})
    network = CNN if normed_for(method)["name"] == "digit_cnn" else {**SMALL, "batch_norm": name in NORMED}
    found = domains(network, SIZES)
    whole, sites = setting(method, found, network), plans(method, found)
    about = about_sites(sites, whole, whole.build_network())
    roles = {role: tuple(plan.name for plan in sites if plan.role == role) for role in ("source", "target")}

    def build(transport: Any, watch: Callable[[Told], None] = lambda event: None) -> RemoteFederation:
        return RemoteFederation(
            method,
            transport,
            run="fuzz",
            recipe=setting_recipe(whole),
            parts={plan.name: part_of(plan) for plan in sites},
            about=about,
            deadline=1.0,
            quorum=QUORUM,
            on_event=watch,
            sources=roles["source"],
            targets=roles["target"],
            budget=dict.fromkeys(about, 1000),
            rounds=ROUNDS,
            seed=whole.seed,
        )

    recording = Recording(method, tuple(about), roles["source"], build, start_of(method, found, network))
    assert play(recording, Played(recording, {plan.name: SiteRunner(plan, whole) for plan in sites})) == set()
    return recording


def play(recording: Recording, transport: Any) -> set[str]:
    """Play the run; the sites that were lost or refused in it.

    Raises:
        FedshiftError: the run ends early, as it may where a call needs the very site that is hostile.
    """
    blamed: set[str] = set()

    def watch(event: Told) -> None:
        if event["is"] in ("lost", "refused"):
            blamed.add(event["site"])
            json.dumps(event, ensure_ascii=False).encode()  # a person may read it

    federation = recording.build(transport, watch)
    state = start_run(recording.method, federation, recording.start)
    federation.settle()
    for _ in range(ROUNDS):
        state = step_on(recording.method, federation, state)
        # A target may say that a source's model is of no use to it. That is noted as what the target says.
        missing = {site for site, reason in federation.missing.items() if not reason.startswith("target '")}
        blamed |= {*missing, *federation.refused}
    state.weights.check_finite("the model")
    return blamed


def use(recording: Recording, hostile: str, instead: Mapping[Place, Message]) -> None:
    """Play the run with replies of one hostile site.

    Raises:
        AssertionError: another site was blamed, or the run ended though it could do without the hostile site.
    """
    ended: FedshiftError | None = None
    try:
        blamed = play(recording, Replayed(recording, hostile, instead))
    except FedshiftError as error:
        ended, blamed = error, {hostile}
    assert blamed <= {hostile}, f"{blamed} are blamed for {hostile}"
    assert ended is None or hostile not in recording.sources, f"the run ended for {hostile}: {ended}"
    assert ended is None or f"'{hostile}'" in str(ended), f"the end of the run does not name {hostile}: {ended}"


class Attack:
    """Tries broken replies of any site to any call, and uses those that are taken for honest ones."""

    def __init__(self, recording: Recording, change: Change, draws: random.Random) -> None:
        self._recording, self._change, self._draws = recording, change, draws
        self._federation = recording.build(None)
        self._slots = [slot for slots in recording.slots.values() for slot in slots.values()]
        self._queues: dict[str, dict[Place, Message]] = {}
        self.taken = 0
        """Replies that were taken for honest ones."""
        self.longest = 0.0
        """Seconds that reading and checking a reply took at most."""

    def one(self) -> None:
        """Try one reply.

        Raises:
            Exception: what no site should be able to cause.
        """
        slot = self._draws.choice(self._slots)
        site, said = slot.request.site, {"answers": slot.key, **slot.reply.header}
        message = self._change(said, dict(slot.reply.content), slot.reply.body, self._draws)
        outcome = self._timed(slot, message)
        self.taken += isinstance(outcome, Taken)
        if isinstance(outcome, Taken) or self._draws.random() < _USED_ANYWAY:
            queue, place = self._queues.setdefault(site, {}), (slot.call, slot.number)
            if place in queue:
                self.flush(site)
            self._queues.setdefault(site, {})[place] = message

    def flush(self, site: str) -> None:
        """Use the replies of a site that wait."""
        use(self._recording, site, self._queues.pop(site, {}))

    def end(self) -> None:
        """Use the replies of all sites that wait."""
        for site in list(self._queues):
            self.flush(site)

    def _timed(self, slot: Slot, message: Message) -> Any:
        kind = reply_type(self._recording.method, slot.call)
        seconds = math.inf
        for _ in range(5):  # on a busy machine a long time may be another program's
            begun = time.perf_counter()
            outcome = self._federation._read_reply(kind, slot.call, slot.request, message, slot.key)
            seconds = min(seconds, time.perf_counter() - begun)
            if seconds <= max(self.longest, 0.05):
                break
        self.longest = max(self.longest, seconds)
        return outcome
