"""A federation whose sites are other machines: requests and replies as messages, whatever carries them.

What a request says and what a reply may hold stands here; an engine such as FLARE carries `Message`s (`Transport`).
Replies come in any order and are handed on in the order asked, so a run over a network ends in the same bits as one in
a single process. A reply that is late, doubled, of another shape or not finite is refused and recorded, and its site
counts as lost in this exchange.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
import typing
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from fedshift.errors import FedshiftError, KindRefused, Refused, TrainingDiverged
from fedshift.federation.federation import Answer, Federation, Missing, Request, StepOwner
from fedshift.federation.messages import Content, Reply, Statistics, returned
from fedshift.federation.outbox import Outbox
from fedshift.federation.policy import ACCURACY
from fedshift.federation.wire import Body, Message, Residuals, Wire, body_of, seal, unseal
from fedshift.weights import NamedTensors, Weights

PROTOCOL = 1
"""The version of requests and replies. A site refuses another one."""

HERE = "coordinator"
"""Where a checkpoint keeps what is the coordinator's own; no site may be called so."""

Event = Callable[[dict[str, Any]], None]
"""Told of every step on the way of an exchange, for people who watch."""


class Again(FedshiftError):
    """The run has to go on in a new job: a site is back that the present one cannot reach."""


@dataclass(frozen=True)
class Lost:
    """Why no reply of a site can be used in an exchange. ``error``: the name of the error that the site answered."""

    reason: str
    error: str = ""

    @property
    def refused(self) -> bool:
        """Whether the site is there, and its policy does not let out what was asked for."""
        return self.error == KindRefused.__name__

    def missing(self) -> KindRefused | TrainingDiverged | None:
        """Why a site that is there has nothing to give in this exchange; None for one that is not there."""
        kinds: tuple[type[KindRefused | TrainingDiverged], ...] = (KindRefused, TrainingDiverged)
        return next((kind(self.reason) for kind in kinds if kind.__name__ == self.error), None)


class Transport(Protocol):
    """What an engine does: carry one message to each of some sites and bring back what they answer."""

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        """Answers as they come; a site without one within ``deadline`` seconds is `Lost`.

        patience: seconds that a site has to fetch its message, for those that were lost before. Raises Again.
        """
        ...


def reply_type(method: StepOwner, step: str) -> type[Reply]:
    """What a step of ``method`` returns. Raises FedshiftError when ``step`` is no step: a private name, server code."""
    named = isinstance(step, str) and not step.startswith("_")
    function = getattr(type(method.step_owner(step)), step, None) if named else None
    if inspect.isfunction(function):
        parameters = list(inspect.signature(function).parameters)
        kind = returned(function)
        if parameters[1:2] == ["site"] and kind is not None:
            return kind
    raise FedshiftError(f"'{step}' is not a step of {type(method).__name__}")


def checked_reply(kind: type[Reply], content: Mapping[str, Any]) -> Reply:
    """``content`` as a reply of the class a step promises. Raises FedshiftError where names or kinds differ."""
    expected = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if set(content) != names:
        raise FedshiftError(f"a {kind.__name__} has the fields {sorted(names)}, not {sorted(map(str, content))}")
    for name in names:
        if not _fits(content[name], expected[name]):
            raise FedshiftError(f"'{name}' of a {kind.__name__} is a {type(content[name]).__name__}")
    return kind(**content)


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        inner = typing.get_args(kind)[1]
        return (
            isinstance(value, Mapping)
            and not isinstance(value, NamedTensors)
            and all(_fits(item, inner) for item in value.values())
        )
    if origin is not None:  # a union
        return any(_fits(value, part) for part in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else False


class RemoteFederation(Federation):
    """Sites behind a `Transport`.

    recipe and parts: the setting, and what each site is told of its own part. Every request repeats them, so a site
    that was started again needs no memory of the coordinator. like: the network's tensors, to check models against.
    """

    def __init__(
        self,
        method: StepOwner,
        transport: Transport,
        *,
        run: str,
        recipe: Mapping[str, Any],
        parts: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        deadline: float,
        wire: Wire = "float32",
        patience: float = 10.0,
        on_event: Event | None = None,
        **options: Any,
    ) -> None:
        super().__init__(method, **options)
        self.transport, self.run = transport, run
        self.deadline, self.wire, self.patience = deadline, wire, patience
        self._recipe, self._parts = recipe, parts
        self._like = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()}
        self._event = on_event or (lambda event: None)
        self._memory: dict[str, dict[str, str]] = {}
        self._kept: dict[str, dict[str, str]] = {}
        self._checkpoint = 0
        self._lost: set[str] = set()
        self._shapes: dict[tuple[str, str], Any] = {}
        self._outbox = Outbox(wire)

    # An exchange ------------------------------------------------------------------------------------------------------

    def crossing(self, step: str, site: str, content: Mapping[str, Content]) -> Mapping[str, Content]:
        return self._outbox.write(step, site, content).body.content

    def deliver(self, step: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Send all requests, hand the answers on in the order asked; those of lost sites are left out, and those of
        sites that refuse are `Missing`.
        """
        self._outbox.clear()
        asked: list[Request] = []
        keys: dict[str, str] = {}
        owed: dict[str, Residuals] = {}

        def messages() -> Iterator[tuple[str, Message]]:
            for request in requests:
                asked.append(request)
                written = self._outbox.write(step, request.site, request.content)
                body, owed[request.site] = written.body, written.owed
                header = {
                    "do": "step",
                    "step": step,
                    "envelope": vars(request.envelope),
                    "memory": self._memory.get(request.site, {}),
                    **self._common(request.site),
                }
                keys[request.site] = header["key"] = request_key(header, body)
                yield request.site, seal(header, body)

        kind = reply_type(self.method, step)
        outgoing = list(messages())
        self._outbox.clear()
        waiting: dict[str, tuple[Answer[Any], dict[str, str]] | Lost] = {}
        arrivals = self._arrivals(step, outgoing)
        del outgoing
        lost: list[Request] = []
        gone = 0
        spent: list[float] = []
        for request in asked:
            while request.site not in waiting:
                found = next(arrivals, None)
                if found is None:
                    waiting[request.site] = Lost("did not answer")
                    break
                site, message = found
                if site in waiting:
                    self._record(step, site, "refused", "a second reply to one request")
                    continue
                waiting[site] = self._taken(kind, step, site, message, keys.get(site, ""))
            outcome = waiting[request.site]
            if isinstance(outcome, Lost):
                gone += 1
                self._record(step, request.site, "refused" if outcome.refused else "lost", outcome.reason)
                self._may_go_on(step, request.site, len(asked), gone, outcome)
                why = outcome.missing()
                if why is not None:
                    yield Missing(request.site, why)
                else:
                    self._lost.add(request.site)
                    lost.append(request)
                continue
            answer, memory = outcome
            waiting[request.site] = Lost("handed on")
            self._lost.discard(request.site)
            self._memory[request.site] = memory
            self._outbox.taken(step, request.site, owed[request.site])
            budget = self.budget.get(request.site, 0)
            spent.append(answer.mini_batches / budget if budget else 0.0)
            yield answer
        for request in lost:
            self.forfeit(request.site, spent)

    def _arrivals(
        self, what: str, outgoing: list[tuple[str, Message]]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        for site, message in outgoing:
            self._event({"what": what, "site": site, "is": "asked", "bytes": message.size, **self._where()})
        patience = dict.fromkeys(self._lost, self.patience)
        for site, reply in self.transport.exchange(iter(outgoing), self.deadline, patience):
            if isinstance(reply, Message):
                self._event({"what": what, "site": site, "is": "answered", "bytes": reply.size, **self._where()})
            yield site, reply

    def _taken(
        self, kind: type[Reply], step: str, site: str, message: Message | Lost, key: str
    ) -> tuple[Answer[Any], dict[str, str]] | Lost:
        """The answer in a message, or why it cannot be used. Raises what a site raised that no waiting will change."""
        if isinstance(message, Lost):
            return message
        try:
            header, content, crossed = _opened(message, key)
            if "error" in header:
                return self._site_error(site, header)
            mini_batches, memory = header.get("mini_batches"), header.get("memory")
            if not isinstance(mini_batches, int) or isinstance(mini_batches, bool) or mini_batches < 0:
                raise FedshiftError("it does not say how many mini-batches it took")
            if not isinstance(memory, dict) or not all(
                isinstance(item, str) for pair in memory.items() for item in pair
            ):
                raise FedshiftError("it does not say what the site remembers")
            reply = checked_reply(kind, content)
            self._check_tensors(step, content)
        except FedshiftError as error:
            if isinstance(error, _Stop):
                raise error.reason from None
            self._record(step, site, "refused", str(error))
            return Lost(f"its reply was refused: {error}")
        return Answer(site, reply, mini_batches, crossed), memory

    def _site_error(self, site: str, header: Mapping[str, Any]) -> Lost:
        name, text = str(header.get("error")), str(header.get("message"))[:2000]
        stops: dict[str, type[FedshiftError]] = {"Refused": Refused}
        if self.on_refusal == "stop":
            stops["KindRefused"] = KindRefused
        if self.quorum is None:
            stops["TrainingDiverged"] = TrainingDiverged
        if name in stops:
            raise _Stop(stops[name](text))
        return Lost(text, name)

    def _check_tensors(self, step: str, content: Mapping[str, Any]) -> None:
        """Raises FedshiftError for numbers that are not finite and shapes that are not those of the network."""
        for name, value in content.items():
            for path, tensors in _named(name, value):
                tensors.check_finite(f"'{path}'")
                if not isinstance(tensors, Weights):
                    continue
                shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
                for key, shape in shapes.items():
                    if key in self._like and shape != self._like[key]:
                        raise FedshiftError(
                            f"'{path}': tensor '{key}' is {shape[0]} {shape[1]}, the network's is {self._like[key][0]} "
                            f"{self._like[key][1]}"
                        )
                if self._shapes.setdefault((step, path), shapes) != shapes:
                    raise FedshiftError(f"'{path}' holds other tensors than in replies before")

    def _may_go_on(self, step: str, site: str, asked: int, gone: int, outcome: Lost) -> None:
        """Raises FedshiftError when too few sites are left for this exchange."""
        needed = asked if self.quorum is None else min(self.quorum, asked)
        if asked - gone < needed:
            left = f"{asked - gone} of {asked} sites are left and the experiment asks for {needed} (engine.quorum)"
            why = outcome.missing()
            if why is not None:
                raise type(why)(f"round {self.round}, step {step}: {why}; {left}")
            raise FedshiftError(
                f"round {self.round}, step {step}: site '{site}' is lost ({outcome.reason}); {left}; when the site is "
                "back, go on with fedshift deploy resume"
            )

    def _record(self, step: str, site: str, outcome: str, reason: str) -> None:
        self._event({"what": step, "site": site, "is": outcome, "reason": reason[:500], **self._where()})

    def _where(self) -> dict[str, Any]:
        return {"run": self.run, "round": self.round, "exchange": self.progress.exchange}

    def _common(self, site: str) -> dict[str, Any]:
        """What every request repeats."""
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "setting": self._recipe,
            "part": self._parts[site],
            "kept": self._kept.get(site, {}),
            "checkpoint": self._checkpoint,
            "wire": self.wire,
        }

    # Measuring --------------------------------------------------------------------------------------------------------

    def measure(self, weights: Weights, sites: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Each site's accuracy on its own held-out samples, with the counts per class; lost sites are left out.

        What crosses is counted under the kind ``accuracy``, apart from what the method sends.
        """
        body = body_of({"weights": weights}, self.wire)
        size = sum(value.nbytes for value in body.content.values() if isinstance(value, NamedTensors))
        outgoing: list[tuple[str, Message]] = []
        keys: dict[str, str] = {}
        for site in sites:
            header = {"do": "measure", "round": self.round, **self._common(site)}
            keys[site] = header["key"] = request_key(header, body)
            outgoing.append((site, seal(header, body)))
            self.ledger.record(0, "measure", site, "down", {"measured": _counted(size)})
        found: dict[str, dict[str, Any]] = {}
        for site, message in self._arrivals("measure", outgoing):
            if isinstance(message, Lost):
                self._record("measure", site, "lost", message.reason)
                self._lost.add(site)
                continue
            try:
                header, _, _ = _opened(message, keys.get(site, ""))
                if "error" in header:
                    lost = self._site_error(site, header)
                    self._record("measure", site, "refused" if lost.refused else "lost", lost.reason)
                    if lost.refused:
                        self.note_refusal(site, lost.reason)
                    continue
                if site in found:
                    raise FedshiftError("a second reply to one request")
                found[site] = _checked_measures(header.get("measures"))
            except _Stop as stop:
                raise stop.reason from None
            except FedshiftError as error:
                self._record("measure", site, "refused", str(error))
                continue
            self.ledger.record(
                0, "measure", site, "up", {"measures": _counted(8 * (2 + 2 * len(found[site]["classes"])))}
            )
        return {site: found[site] for site in sites if site in found}

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        """What each site remembers lies at the site; the checkpoint holds the names of its files. What sites are owed
        lies here.
        """
        self._kept = {site: dict(files) for site, files in self._memory.items()}
        self._checkpoint = self.progress.exchange
        owed = self._outbox.save(folder / HERE, self._checkpoint)
        return {**{site: dict(names) for site, names in self._memory.items()}, **({HERE: owed} if owed else {})}

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """Sites load what the next request names."""
        self._memory = {site: dict(names) for site, names in files.items() if site != HERE}
        self._kept = {site: dict(names) for site, names in self._memory.items()}
        self._checkpoint = self.progress.exchange
        self._outbox.load(folder / HERE, files.get(HERE, {}))


class _Stop(FedshiftError):
    """Carries out of a reply's check what ends the run."""

    def __init__(self, reason: FedshiftError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _opened(message: Message, key: str) -> tuple[dict[str, Any], dict[str, Content], dict[str, Content]]:
    """``(header, content, content as it crossed)`` of the answer to the request ``key``, which may be an ``error``.

    Raises FedshiftError for anything else.
    """
    header, content, crossed = unseal(message)
    if "error" not in header and header.get("answers") != key:
        raise FedshiftError("it answers another request")
    return header, content, crossed


def request_key(header: Mapping[str, Any], body: Body) -> str:
    """What makes two requests the same request: a site answers it again without doing it again.

    Not the checkpoint's place, which differs when a round is done again.
    """
    own = {name: value for name, value in header.items() if name not in ("key", "kept", "checkpoint")}
    return hashlib.sha256(f"{json.dumps(own, sort_keys=True)}\n{body.sha256}".encode()).hexdigest()


def ask_plain(
    transport: Transport, what: str, run: str, headers: Mapping[str, Mapping[str, Any]], deadline: float
) -> dict[str, dict[str, Any] | Lost]:
    """Ask sites for plain values before there is a federation: ``headers`` by site, their replies' headers by site.

    ``arrived`` in a reply: the time of this machine's clock when it came.
    """
    body = body_of({})
    outgoing: list[tuple[str, Message]] = []
    keys: dict[str, str] = {}
    for site, header in headers.items():
        whole = {"do": what, "protocol": PROTOCOL, "run": run, **header}
        keys[site] = whole["key"] = request_key(whole, body)
        outgoing.append((site, seal(whole, body)))
    return _plain(transport.exchange(iter(outgoing), deadline, {}), keys)


def _plain(arrivals: Iterator[tuple[str, Message | Lost]], keys: Mapping[str, str]) -> dict[str, dict[str, Any] | Lost]:
    found: dict[str, dict[str, Any] | Lost] = {}
    for site, message in arrivals:
        if isinstance(message, Lost):
            found[site] = message
            continue
        try:
            header, _, _ = _opened(message, keys.get(site, ""))
        except FedshiftError as error:
            found[site] = Lost(str(error))
            continue
        if "error" in header:
            found[site] = Lost(str(header.get("message"))[:2000], str(header["error"]))
        else:
            found[site] = {**header, "arrived": time.time()}
    return found


def _named(path: str, value: Any) -> Iterator[tuple[str, NamedTensors]]:
    if isinstance(value, NamedTensors):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{path}/{key}", item)


class Measured(Statistics):
    """Stands in the ledger for a model sent to be measured, and for what is said of it."""

    kind = ACCURACY


def _counted(size: int) -> Measured:
    import torch

    return Measured({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def _checked_measures(value: Any) -> dict[str, Any]:
    """``{accuracy, samples, classes: [[right, of] or None]}`` as a site says it. Raises FedshiftError if it is not."""
    try:
        accuracy, samples, classes = float(value["accuracy"]), int(value["samples"]), list(value["classes"])
        pairs = [None if pair is None else (int(pair[0]), int(pair[1])) for pair in classes]
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise FedshiftError("what it measured cannot be read") from error
    if not (0 <= accuracy <= 100 and samples >= 1 and all(pair is None or 0 <= pair[0] <= pair[1] for pair in pairs)):
        raise FedshiftError("what it measured is not an accuracy")
    return {"accuracy": accuracy, "samples": samples, "classes": pairs}
